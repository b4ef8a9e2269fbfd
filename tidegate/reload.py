"""``tidegate reload``: the running system takes over changed settings."""

import os
import signal
import sys
import time
from pathlib import Path

from tidegate.settings import Loaded
from tidegate.supervisor.record import running_record

#: Longest wait for the gateway, beyond what each of its instances may take to drain. Seconds.
_RELOAD_SECONDS = 120.0
_ENDS = ("event=reloaded", "event=reload-unneeded", "event=reload-refused", "event=reload-failed")


def reload_running(loaded: Loaded) -> int:
    """Tell every process that reads the settings; 0 once they are in force, 1 when they could not be taken over, 2 when
    nothing runs."""
    record = running_record(loaded.state_dir)
    pids = {} if record is None else {row["name"]: row["pid"] for row in record["processes"] if row["pid"]}
    if "gateway" not in pids:
        sys.stderr.write(f"nothing runs in {loaded.state_dir}\n")
        return 2
    log = loaded.logs_dir / "gateway.log"
    seen = log.stat().st_size
    os.kill(pids["gateway"], signal.SIGHUP)
    # These take nothing from anybody by leaving: the supervisor starts them again, with the settings of now.
    for name, pid in pids.items():
        if name == "autoscaler" or name.startswith("worker-"):
            os.kill(pid, signal.SIGTERM)
    gateway = loaded.system.gateway
    end = _await_end(log, seen, _RELOAD_SECONDS + (gateway.instances + 1) * gateway.drain_limit_seconds)
    sys.stdout.write("the autoscaler and the workers start again; the gateway: " + end + "\n")
    return 0 if end.startswith(_ENDS[:2]) else 1


def _await_end(log: Path, seen: int, limit_seconds: float) -> str:
    """What the gateway says of the reload in the part of its log after ``seen`` bytes."""
    limit = time.monotonic() + limit_seconds
    while time.monotonic() < limit:
        with log.open("rb") as file:
            file.seek(seen)
            lines = file.read().decode(errors="replace").splitlines()
        for line in lines:
            _, found, words = line.partition('message="')
            if found and words.startswith(_ENDS):
                return words.rstrip('"')
        time.sleep(0.1)
    return f"no end within {limit_seconds:g} s, see {log}"
