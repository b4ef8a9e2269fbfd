"""The CPU tritonserver inside the ``nvidia-pytriton`` wheel, laid out so that it runs on its own.

    <directory>/nvidia_pytriton.libs            symlink: the wheel's shared libraries
    <directory>/server/tritonserver, caches     symlinks
    <directory>/server/backends/python/         the wheel's Python backend, with the stub of this Python version
    <directory>/server/backends/onnxruntime/    our Python-based backend (backends/onnxruntime/model.py)

Symlinks, because the wheel's binaries find their libraries relative to their real place. One file is copied (or
hard-linked): Triton refuses a library of a Python-based backend whose real place is outside the backend directory. The
copy finds its libraries at ../../../nvidia_pytriton.libs, hence the level ``server``.
"""

import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

#: Where loaders of common distributions look; asked first because running the loader costs time at every start.
_LIBRARY_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/local/lib", "/lib64", "/usr/lib64")


class CannotLaunch(Exception):
    """tritonserver cannot be started here; the message is one sentence that says what to do."""


def find_wheel() -> Path:
    """The wheel's ``tritonserver`` folder.

    Raises:
        CannotLaunch: there is no wheel, it is not for this processor, or it has no stub for this Python version.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise CannotLaunch(
            f"the tritonserver of the nvidia-pytriton wheel needs an x86-64 processor and this one is "
            f"{platform.machine()}: put a tritonserver on PATH or attach to one that runs"
        )
    spec = find_spec("pytriton")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    root = Path(folders[0], "tritonserver") if folders else None
    if root is None or not (root / "bin/tritonserver").is_file():
        raise CannotLaunch("there is no tritonserver: put one on PATH or install the wheel nvidia-pytriton==0.7.0")
    if not _stub(root).is_file():
        raise CannotLaunch(
            f"the nvidia-pytriton wheel carries no Python backend for Python {_python()}; use 3.11 or 3.12"
        )
    return root


def library_folder(root: Path) -> str | None:
    """The folder to put on LD_LIBRARY_PATH for the stub's libpython; None where the loader finds it by itself.

    Raises:
        CannotLaunch: this system has no such library.
    """
    library = f"libpython{_python()}.so.1.0"
    if any(Path(folder, library).exists() for folder in _LIBRARY_FOLDERS):
        return None
    own = sysconfig.get_config_var("LIBDIR")
    if own and Path(own, library).exists():
        return str(own)
    # The loader has the last word: it knows ld.so.conf and LD_LIBRARY_PATH. Without arguments the stub ends at once.
    tried = subprocess.run([str(_stub(root))], capture_output=True, check=False, timeout=30)
    if library.encode() in tried.stderr:
        raise CannotLaunch(
            f"Triton's Python backend needs {library}, which this system lacks: install it "
            f"(Debian and Ubuntu: apt install libpython{_python()})"
        )
    return None


def lay_out_server(root: Path, directory: Path) -> Path:
    """Make ``directory`` a runnable Triton out of the wheel's folder ``root``; returns its tritonserver."""
    server = directory / "server"
    backends = server / "backends"
    links = {
        directory / "nvidia_pytriton.libs": root.parent.parent / "nvidia_pytriton.libs",
        server / "tritonserver": root / "bin/tritonserver",
        server / "caches": root / "caches",
        backends / "python/triton_python_backend_utils.py": root / "backends/python/triton_python_backend_utils.py",
        backends / "python/triton_python_backend_stub": _stub(root),
        # The stub writes __pycache__ next to this link, so into a directory that goes with the replica.
        backends / "onnxruntime/model.py": Path(__file__).parent / "backends/onnxruntime/model.py",
    }
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    _copy(root / "backends/python/libtriton_python.so", backends / "python/libtriton_python.so")
    return server / "tritonserver"


def _copy(origin: Path, target: Path) -> None:
    try:
        target.hardlink_to(origin)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(origin, target)


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _stub(root: Path) -> Path:
    return root / "python_backend_stubs" / _python() / "triton_python_backend_stub"
