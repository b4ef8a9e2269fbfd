"""The demo's own system: the shipped pool with short delays, on free ports, in a folder of its own."""

import shutil
import socket
from pathlib import Path

import yaml

from tidegate.settings import Loaded, load

_POOL = "vision"
#: Short enough to watch the pool go, long enough to look at its statistics before.
_SCALE_TO_ZERO_SECONDS = 8.0


class DemoError(Exception):
    """Why the demo cannot go on or did not come out right, in one sentence."""


def prepare(loaded: Loaded, out: Path) -> Loaded:
    """Settings in ``out`` that serve the pool ``vision`` of ``loaded`` without getting in a running system's way.

    Raises:
        DemoError: there is no such pool, or ``out`` cannot be written.
    """
    if _POOL not in loaded.pools:
        raise DemoError(f"the demo needs the pool {_POOL}; there are: {', '.join(sorted(loaded.pools))}")
    try:
        config = _write(loaded, out)
    except OSError as error:
        raise DemoError(f"the folder {out} cannot be written: {error.strerror}") from error
    return load(config)


def _write(loaded: Loaded, out: Path) -> Path:
    source = loaded.system.deployments_dir / _POOL
    target = out / "deployments" / _POOL
    shutil.rmtree(out / "deployments", ignore_errors=True)
    target.mkdir(parents=True)
    for name in ("models", "sources.yaml"):
        if (source / name).exists():
            (target / name).symlink_to(source / name)
    pool = loaded.pools[_POOL].model_dump(mode="json")
    pool["scaling"] |= {"scale_to_zero_delay_seconds": _SCALE_TO_ZERO_SECONDS, "scale_down_delay_seconds": 4.0}
    (target / "pool.yaml").write_text(yaml.safe_dump(pool))
    *ports, store_port = _free_ports(5)
    names = ("http_port", "grpc_port", "metrics_port", "control_port")
    document = {
        "state_dir": "state",
        "store": {"embedded_port": store_port},
        "gateway": dict(zip(names, ports, strict=True)),
    }
    config = out / "tidegate.yaml"
    config.write_text(yaml.safe_dump(document))
    return config


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
