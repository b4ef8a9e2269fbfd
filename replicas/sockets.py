"""What the kernel says of TCP sockets on this host: which ports are free, who listens, who is connected."""

import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_ESTABLISHED, _FIN_WAIT_2, _LISTEN = "01", "05", "0A"


@dataclass(frozen=True, slots=True)
class SocketEntry:
    """One line of ``/proc/net/tcp`` or ``tcp6``."""

    local_port: int
    remote_port: int
    state: str
    """Two hex digits as the kernel writes them."""
    inode: str
    """``0`` when no process has it open any more."""


def parse_table(text: str) -> Iterator[SocketEntry]:
    """The entries of a ``/proc/net/tcp`` table; lines that are cut short are skipped."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9:
            local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
            yield SocketEntry(local, remote, fields[3], fields[9])


def free_ports(count: int) -> list[int]:
    """``count`` different loopback ports that nobody has now; somebody may take one before its user does."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def connections(ports: Collection[int]) -> int:
    """Callers of this host or another that are connected to a local server on ``ports``.

    Counted by the caller's intent, not by the server's sockets: Triton keeps the socket of a caller that has closed
    (CLOSE_WAIT) for as long as it likes. A local caller that closed only its sending half still waits for an answer.
    """
    return sum(
        (entry.local_port in ports and entry.state == _ESTABLISHED)
        or (entry.remote_port in ports and entry.state == _FIN_WAIT_2 and entry.inode != "0")
        for entry in _entries()
    )


def accepts(port: int) -> bool:
    """Whether a connection to loopback ``port`` is taken. Much cheaper than the kernel's tables."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def anyone_listens(port: int) -> bool:
    """Whether some process of this host (or pod) listens on ``port``."""
    return any(entry.local_port == port and entry.state == _LISTEN for entry in _entries())


def listens_on(pid: int, ports: Collection[int]) -> bool:
    """Whether process ``pid`` itself, and nobody else, is what listens on every one of ``ports``."""
    inodes = {entry.inode: entry.local_port for entry in _entries() if entry.state == _LISTEN}
    wanted = {inode for inode, port in inodes.items() if port in ports}
    if {inodes[inode] for inode in wanted} != set(ports):
        return False
    return wanted <= _socket_inodes(pid)


def _entries() -> Iterator[SocketEntry]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                text = file.read()
        except FileNotFoundError:
            continue  # a kernel without IPv6 has no tcp6
        yield from parse_table(text)


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue  # closed between the listing and the look
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        return set()  # the process is gone
    return inodes
