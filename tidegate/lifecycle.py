"""``up`` and ``down`` from outside: the supervisor is a process of its own, so that typer and rich are not in it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tidegate.settings import Loaded
from tidegate.supervisor.ports import ports_to_bind, taken_ports
from tidegate.supervisor.processes import Process, end_all, is_alive, processes_of, send
from tidegate.supervisor.record import down_command, read_record, running_record

#: Longest wait for our ports after our processes; a port that is then taken is somebody else's.
_PORTS_SECONDS = 2.0


def start_here(config: Path | None) -> int:
    """Become the supervisor. Returns only when that is impossible."""
    sys.stdout.flush()
    os.execv(sys.executable, _supervisor_command(config))


def start_detached(config: Path | None) -> int:
    """Start the supervisor in a session of its own; 0 once everything is ready, 1 with its reason on stderr."""
    reading, writing = os.pipe()
    command = [*_supervisor_command(config), "--notify-fd", str(writing)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as events:
            return _follow(process, (json.loads(line) for line in events), down_command(config))
    except KeyboardInterrupt:
        sys.stderr.write("stopping what was started\n")
        process.send_signal(signal.SIGTERM)
        process.wait()
        return 1


def _follow(process: subprocess.Popen[bytes], events: Iterator[dict[str, Any]], how_to_stop: str) -> int:
    began = time.monotonic()
    for event in events:
        if "ready" in event:
            sys.stdout.write(f"ready after {event['seconds']:.1f} s (pid {process.pid}); stop it with {how_to_stop}\n")
            sys.stdout.writelines(f"  {name:<8} {address}\n" for name, address in event["ready"].items())
            return 0
        if "failed" in event:
            process.wait()
            sys.stderr.write(f"{event['failed']}\n")
            return 1
        if "warning" in event:
            sys.stderr.write(f"warning: {event['warning']}\n")
            continue
        words = f"waiting for {', '.join(event['waiting'])}" if "waiting" in event else str(event.get("draining", ""))
        sys.stdout.write(f"[{time.monotonic() - began:6.1f} s] {words}\n")
        sys.stdout.flush()
    code = process.wait()
    sys.stderr.write(f"the supervisor ended before the system was ready (exit code {code})\n")
    return 1


def stop(loaded: Loaded, say: Callable[[str], object] = sys.stdout.write) -> int:
    """Drain the running system and see that no process of it is left and none of its ports is held any more.
    0 when nothing runs afterwards."""
    record = running_record(loaded.state_dir)
    if record is None:
        return _clear_leftovers(loaded, say)
    supervisor = Process(record["pid"], record["start_time"], ("supervisor",))
    send(supervisor, signal.SIGTERM)
    shown = ""
    while is_alive(supervisor):
        try:
            phase = str((read_record(loaded.state_dir) or record).get("phase", ""))
            if phase.startswith("draining") and phase != shown:
                say(f"{phase}\n")
                shown = phase
            time.sleep(0.05)
        except KeyboardInterrupt:
            say("forcing\n")
            send(supervisor, signal.SIGTERM)
    left = processes_of(loaded.config_path)
    survivors = end_all(left, polite_seconds=1.0)
    for process in left:
        say(f"was left behind, and ended now: {process}\n")
    _until_ports_are_free(loaded)
    say("down\n" if not survivors else f"still there: {'; '.join(map(str, survivors))}\n")
    return 1 if survivors else 0


def _clear_leftovers(loaded: Loaded, say: Callable[[str], object]) -> int:
    """Nothing runs; but a killed supervisor may have left processes on their way out."""
    stale = read_record(loaded.state_dir)
    left = processes_of(loaded.config_path)
    if left:
        say(f"no supervisor runs, but {len(left)} processes of a killed one do: ending them\n")
    survivors = end_all(left, polite_seconds=10.0)
    if stale is not None:
        shutil.rmtree(str(stale.get("ray_dir") or ""), ignore_errors=True)
    if not left:
        say(f"nothing runs in {loaded.state_dir}\n")
        return 0
    _until_ports_are_free(loaded)
    return 1 if survivors else 0


def _until_ports_are_free(loaded: Loaded) -> None:
    """The kernel closes the listeners of an ended process a moment later than it reports the end."""
    limit = time.monotonic() + _PORTS_SECONDS
    while taken_ports(ports_to_bind(loaded.system)) and time.monotonic() < limit:
        time.sleep(0.05)


def _supervisor_command(config: Path | None) -> list[str]:
    command = [sys.executable, "-m", "tidegate", "run", "supervisor"]
    return command if config is None else [*command, "--config", str(config)]
