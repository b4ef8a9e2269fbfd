"""Parts of the supervisor against real processes, ports and files."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidegate.supervisor.children import Child, Children, ChildSpec
from tidegate.supervisor.ports import sentence, taken_ports
from tidegate.supervisor.processes import (
    INSTALLATION_VARIABLE,
    Process,
    children_of_all,
    end_all,
    is_alive,
    memory_bytes,
    processes_of,
    resident_bytes,
    start_time,
)
from tidegate.supervisor.record import UpError, hold_state_dir, read_record, running_record, write_record

# Says that it runs, and on SIGTERM ends in order, or not.
_POLITE = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); time.sleep(60)"
_STUBBORN = "import signal, time; signal.signal(15, lambda *_: None); print('up', flush=True)\nwhile 1: time.sleep(60)"
_SECOND_FORCES = """
import signal, sys, time
seen = []
signal.signal(15, lambda *_: seen.append(1) or (len(seen) > 1 and sys.exit(3)))
print('up', flush=True)
while 1: time.sleep(60)
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Nursery:
    """Children that are all stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self.changes = 0
        self.force = asyncio.Event()
        self.children = Children(
            os.environ | {INSTALLATION_VARIABLE: str(folder)},
            folder,
            lambda: setattr(self, "changes", self.changes + 1),
        )
        self.children.watch()

    async def start(self, code: str, drain_seconds: float = 5.0, name: str = "stub") -> Child:
        child = self.children.start(ChildSpec(name, python(code), drain_seconds))
        await until(lambda: self.said(name))
        return child

    def said(self, name: str) -> str:
        return self.children.last_words(name)

    async def __aenter__(self) -> "Nursery":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.force.set()
        await asyncio.gather(*(self.children.stop(child, self.force) for child in self.children.all.values()))
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


async def test_a_child_that_dies_is_started_again_and_the_record_says_so(tmp_path: Path) -> None:
    async with Nursery(tmp_path) as nursery:
        child = await nursery.start(_POLITE)
        first = child.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.restarts == 1 and child.pid not in (None, first))
        assert child.as_record() == {
            "name": "stub",
            "pid": child.pid,
            "state": "running",
            "restarts": 1,
            "last_exit": "killed by SIGKILL",
        }
        assert child.failures == 1


async def test_a_child_that_keeps_dying_is_started_ever_more_slowly(tmp_path: Path) -> None:
    async with Nursery(tmp_path) as nursery:
        child = nursery.children.start(ChildSpec("stub", python("print('no port', flush=True); exit(7)"), 1.0))
        await until(lambda: child.failures == 2)
        assert child.last_exit == "exit code 7"
        assert nursery.said("stub") == "no port"
        assert child.state == "waiting 1 s to start again"


async def test_a_program_that_is_missing_counts_as_a_failure(tmp_path: Path) -> None:
    async with Nursery(tmp_path) as nursery:
        child = await nursery.start(_POLITE)
        child.spec = ChildSpec("stub", ("/nowhere/program",), 1.0)
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.failures == 2)
        assert "cannot be started" in child.last_exit


async def test_stopping_waits_for_the_drain(tmp_path: Path) -> None:
    async with Nursery(tmp_path) as nursery:
        child = await nursery.start(_POLITE)
        await nursery.children.stop(child, nursery.force)
        assert (child.state, child.last_exit, child.restarts) == ("stopped", "exit code 0", 0)


async def test_the_second_signal_comes_when_patience_is_over(tmp_path: Path) -> None:
    async with Nursery(tmp_path) as nursery:
        child = await nursery.start(_SECOND_FORCES, drain_seconds=0.2)
        await nursery.children.stop(child, nursery.force)
        assert child.last_exit == "exit code 3"


async def test_forcing_does_not_wait_for_patience(tmp_path: Path) -> None:
    async with Nursery(tmp_path) as nursery:
        child = await nursery.start(_SECOND_FORCES, drain_seconds=60)
        stopping = asyncio.create_task(nursery.children.stop(child, nursery.force))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        nursery.force.set()
        async with asyncio.timeout(3):
            await stopping
        assert child.last_exit == "exit code 3"


async def test_a_stubborn_child_is_killed_in_the_end(tmp_path: Path) -> None:
    async with Nursery(tmp_path) as nursery:
        child = await nursery.start(_STUBBORN, drain_seconds=0.1)
        await nursery.children.stop(child, nursery.force)
        assert child.last_exit == "killed by SIGKILL"


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Even SIGKILL of the parent reaches the child, as SIGTERM."""
    code = f"""
import asyncio, os, sys
from pathlib import Path
from tidegate.supervisor.children import Children, ChildSpec
async def main():
    children = Children(os.environ, Path({str(tmp_path)!r}), lambda: None)
    children.watch()
    child = children.start(ChildSpec("stub", (sys.executable, "-c", {_POLITE!r}), 1.0))
    while not children.last_words("stub"): await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert start_time(pid) is not None
        parent.kill()
        parent.wait()
    limit = time.monotonic() + 5
    while start_time(pid) is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert start_time(pid) is None


def test_processes_are_found_by_what_they_inherited_and_ended(tmp_path: Path) -> None:
    """Grandchildren that detached themselves too."""
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_POLITE!r}], start_new_session=True)"
    environment = os.environ | {INSTALLATION_VARIABLE: str(tmp_path)}
    subprocess.run(python(code), env=environment, check=True, stdout=subprocess.DEVNULL)
    found = processes_of(tmp_path)
    assert len(found) == 1
    assert processes_of(tmp_path / "other") == []
    assert processes_of(tmp_path, child="gateway") == []
    assert (resident_bytes(found[0].pid) or 0) > 1 << 20
    assert end_all(found, polite_seconds=3) == []
    assert processes_of(tmp_path) == []


def test_a_pid_that_is_used_again_is_another_process() -> None:
    mine = start_time(os.getpid())
    assert mine is not None
    assert is_alive(Process(os.getpid(), mine, ()))
    assert not is_alive(Process(os.getpid(), mine + 1, ()))
    assert start_time(2**22 + 1) is None


def test_memory_is_that_of_a_process_and_all_below_it_but_those_apart() -> None:
    code = (
        "import subprocess, sys; held = b'x' * (40 << 20);"
        "p = subprocess.Popen([sys.executable, '-c', 'held = b\"x\" * (80 << 20); print(1, flush=True); input()']);"
        "p.wait()"
    )
    with subprocess.Popen(python(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = children_of_all()
        (child,) = children[process.pid]
        together = memory_bytes(process.pid, children) or 0
        alone = memory_bytes(process.pid, children, apart={child}) or 0
        process.communicate(b"\n")
    assert 40 << 20 < alone < 80 << 20
    assert 120 << 20 < together < 200 << 20
    assert memory_bytes(process.pid, children) is None


def test_a_process_lives_as_long_as_any_of_its_threads() -> None:
    """Its first thread has ended, which looks like a zombie, and its port is still open."""
    code = (
        "import ctypes, socket, threading, time; s = socket.create_server(('127.0.0.1', 0));"
        "threading.Thread(target=time.sleep, args=(60,)).start(); print(s.getsockname()[1], flush=True);"
        "ctypes.CDLL(None).syscall(60, 0)"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        found = Process(process.pid, start_time(process.pid) or 0, ())
        time.sleep(0.2)
        assert is_alive(found)
        assert taken_ports({"a.port": ("127.0.0.1", port)})
        process.kill()
    assert not is_alive(found)
    assert not taken_ports({"a.port": ("127.0.0.1", port)})


def test_all_taken_ports_are_told_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as two:
        two.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        two.bind(("127.0.0.1", 0))
        two.listen()
        ports = {"a.port": one.getsockname()[1], "b.port": two.getsockname()[1]}
        told = sentence(taken_ports({key: ("127.0.0.1", port) for key, port in ports.items()}))
    assert f"port {ports['a.port']} (a.port) is taken, port {ports['b.port']} (b.port) is taken: stop" in told
    assert taken_ports({key: ("127.0.0.1", port) for key, port in ports.items()}) == {}
    assert "cannot be opened" in taken_ports({"gateway.http_port": ("203.0.113.7", 80)})["gateway.http_port"]


def test_two_supervisors_cannot_share_a_state_folder(tmp_path: Path) -> None:
    with hold_state_dir(tmp_path):
        write_record(tmp_path, {"pid": os.getpid(), "start_time": start_time(os.getpid())})
        with pytest.raises(UpError, match=f"runs in {tmp_path} already .pid {os.getpid()}."), hold_state_dir(tmp_path):
            pass
        assert running_record(tmp_path) is not None
    assert read_record(tmp_path) is None
    with hold_state_dir(tmp_path):
        pass


def test_the_record_of_a_dead_supervisor_is_stale(tmp_path: Path) -> None:
    write_record(tmp_path, {"pid": os.getpid(), "start_time": 1})
    assert running_record(tmp_path) is None
    (tmp_path / "up.json").write_text("{half")
    assert running_record(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UpError, match=r"state folder .*file/inner cannot be written: Not a directory"),
        hold_state_dir(tmp_path / "file" / "inner"),
    ):
        pass


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(UpError, match=f"the state folder {tmp_path} cannot be written: the disk is full"),
        hold_state_dir(tmp_path),
    ):
        pass
    assert not list(tmp_path.glob("probe-*"))


def test_a_wrong_setting_stops_every_command_with_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "tidegate.yaml"
    config.write_text("gateway: {http_port: 0}\ncolour: red\n")
    for command in (["up"], ["down"], ["status"], ["run", "worker"]):
        argv = [sys.executable, "-m", "tidegate", *command, "--config", str(config)]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 2, command
        for words in ("gateway.http_port", "colour: unknown key", "there is no pool"):
            assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_schema_is_printed_as_json() -> None:
    done = subprocess.run([sys.executable, "-m", "tidegate", "schema", "pool"], capture_output=True, check=True)
    assert json.loads(done.stdout)["title"] == "PoolSettings"
