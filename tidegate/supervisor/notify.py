"""How a supervisor tells its progress: lines for people in the foreground, JSON lines to a pipe when detached."""

import json
import os
import sys
import time
from typing import Any


class Notifier:
    """Tells each change once. ``descriptor`` None means: to people, on stdout."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._last: tuple[str, ...] | None = None
        self._started = time.monotonic()

    def waiting(self, what: list[str]) -> None:
        """What is being waited for now."""
        if tuple(what) != self._last:
            self._last = tuple(what)
            self._tell({"waiting": what}, f"waiting for {', '.join(what)}")

    def ready(self, addresses: dict[str, str], seconds: float) -> None:
        lines = [f"ready after {seconds:.1f} s", *(f"  {name:<8} {address}" for name, address in addresses.items())]
        self._tell({"ready": addresses, "seconds": seconds}, "\n".join(lines))

    def warning(self, sentence: str) -> None:
        """Something that does not keep the system from starting."""
        self._tell({"warning": sentence}, f"warning: {sentence}")

    def failed(self, sentence: str) -> None:
        self._tell({"failed": sentence}, sentence)

    def draining(self, what: str) -> None:
        self._tell({"draining": what}, what)

    def _tell(self, event: dict[str, Any], text: str) -> None:
        try:
            if self._descriptor is not None:
                os.write(self._descriptor, (json.dumps(event) + "\n").encode())
            else:
                sys.stdout.write(f"[{time.monotonic() - self._started:6.1f} s] {text}\n")
                sys.stdout.flush()
        except OSError:
            # Whoever listened has gone (a closed terminal, a detached start that is over): nobody to tell.
            self._descriptor = os.open(os.devnull, os.O_WRONLY)
