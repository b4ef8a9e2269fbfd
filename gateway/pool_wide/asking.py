"""Asking one replica something of our own, over HTTP; on a connection that ends, as open ones keep it from leaving."""

import asyncio

from wire.changes import CallAnswer
from wire.membership import ReplicaLease

#: Longest wait for an answer. Seconds.
_ANSWER_SECONDS = 5.0


async def ask(replica: ReplicaLease, method: str, path: str, body: bytes) -> CallAnswer:
    """The replica's answer; ``unreachable`` says so where there is none."""
    address = replica.http_address or ""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await _exchange(replica.id, address, f"{method} {path} HTTP/1.1\r\nHost: {address}\r\n", body)
    except TimeoutError:
        why = f"replica '{replica.id}' did not answer within {_ANSWER_SECONDS:g} s"
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
        why = f"replica '{replica.id}' cannot be reached"
    return CallAnswer(replica=replica.id, status=0, unreachable=why)


async def _exchange(replica: str, address: str, head: str, body: bytes) -> CallAnswer:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = headers.get("content-length")
        content = await reader.read() if length is None else await reader.readexactly(int(length))
        return CallAnswer(
            replica=replica, status=int(lines[0].split(" ")[1]), content_type=headers.get("content-type"), body=content
        )
    finally:
        writer.close()
