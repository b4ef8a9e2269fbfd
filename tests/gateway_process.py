"""A whole gateway in a process of its own: Ray, Serve, one instance. ``-m tests.gateway_process JSON`` runs it."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.local_ray import descendants
from gateway.settings import GatewaySettings, InstanceSettings
from stores.settings import StoreSettings
from wire.pools import ModelSettings, PoolSettings

ROOT = Path(__file__).parent.parent


@dataclass
class GatewayProcess:
    """The running process. ``log`` is its standard error, that of its instances included."""

    settings: GatewaySettings
    process: subprocess.Popen[bytes]
    ray_dir: Path
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_until_logged(self, words: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while words not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < until, self.log
            time.sleep(0.05)

    def family(self) -> dict[int, int]:
        """Its living descendants."""
        return descendants(self.process.pid)

    def instance_pid(self) -> int:
        """The process of its gateway instance."""
        for pid in self.family():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica:tidegate"):
                return pid
        raise AssertionError(self.log)


@contextmanager
def gateway_process(settings: GatewaySettings, store: StoreSettings) -> Iterator[GatewayProcess]:
    """Start one; whatever is left of it at the end is killed."""
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        log_file, ray_dir = Path(folder) / "log", Path(folder) / "ray"
        given = json.dumps(
            {"gateway": settings.model_dump(), "store_port": store.embedded_port, "ray_dir": str(ray_dir)}
        )
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gateway_process", given], cwd=ROOT, stdout=log, stderr=log
            )
        running = GatewayProcess(settings, process, ray_dir, log_file)
        try:
            yield running
        finally:
            family = running.family()
            process.kill()
            process.wait()
            for pid in family:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _main(given: str) -> int:
    from gateway.app import run_gateway

    options = json.loads(given)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    settings = InstanceSettings(
        GatewaySettings(**options["gateway"]),
        StoreSettings(embedded_port=options["store_port"]),
        {"vision": PoolSettings(models=(ModelSettings(name="ident"),))},
        queues=(),
    )
    return run_gateway(settings, Path(options["ray_dir"]), lambda: settings)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
