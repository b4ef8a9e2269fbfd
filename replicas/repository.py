"""What must stand in a model repository before Triton is asked to load from it, and what Triton's refusals mean."""

import re
from pathlib import Path

#: The file that a version directory must hold, by backend, where config.pbtxt names no other.
_MODEL_FILES = {"onnxruntime": "model.onnx", "python": "model.py", "tensorrt": "model.plan", "pytorch": "model.pt"}


class RepositoryError(Exception):
    """A model is not there as it must be; the message is one sentence."""


def check_model(repository: Path, model: str) -> None:
    """Find out in a millisecond, and in plain words, what Triton would say after seconds in its own.

    Raises:
        RepositoryError: the model's directory, its config.pbtxt, a version or the version's file is missing.
    """
    directory = repository / model
    if not directory.is_dir():
        raise RepositoryError(f"model '{model}' is not in the model repository: there is no folder {model}")
    try:
        config = re.sub(r"#.*", "", (directory / "config.pbtxt").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RepositoryError(f"model '{model}' has no config.pbtxt") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"the config.pbtxt of model '{model}' cannot be read: {error}") from error
    if _field(config, "platform") == "ensemble":
        return
    backend = _field(config, "backend") or ""
    file = _field(config, "default_model_filename") or _MODEL_FILES.get(backend)
    versions = [entry for entry in directory.iterdir() if entry.is_dir() and entry.name.isdigit()]
    if file is not None and not any((version / file).exists() for version in versions):
        raise RepositoryError(f"the model file of '{model}' is missing: the repository has no {model}/1/{file}")


def load_failure(model: str, said: str) -> str:
    """Triton's refusal to load ``model`` as one sentence."""
    # "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: <what>;\n", perhaps with a traceback.
    what = re.sub(r"^.*?is at UNAVAILABLE state: ", "", said, flags=re.DOTALL)
    what = re.split(r"\n\s*At:\n", what)[0]
    what = re.sub(r"^(Internal|Invalid argument|Unavailable|Not found|Unsupported|Unknown): ", "", what)
    what = re.sub(r"^\w+(Error|Exception): ", "", what)
    what = " ".join(what.split()).rstrip("; ")
    return f"model '{model}' cannot be loaded: {what}"


def _field(config: str, name: str) -> str | None:
    found = re.search(rf'(?m)^\s*{name}\s*:\s*"([^"]*)"', config)
    return found[1] if found else None
