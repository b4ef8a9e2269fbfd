"""Both doors with TLS, client certificates and API keys, asked by real clients."""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import trustme
import uvloop

from gateway.access import digest, new_key
from gateway.at_zero import AtZero
from gateway.ingress.http_door import HttpDoor
from gateway.ingress.rpc_door import GrpcDoor
from gateway.settings import GatewaySettings
from tests.doors import Counted, HandRouter, Memory, pool_settings
from tests.upstream import Upstream
from tests.upstream_grpc import running_upstream
from wire.errors import ERROR_KIND_HEADER

LOOP_FACTORY = uvloop.new_event_loop
CALLER, OPERATOR = new_key(), new_key()
KEYS = [
    {"tenant": "scans", "sha256": digest(CALLER.encode())},
    {"tenant": "ops", "sha256": digest(OPERATOR.encode()), "role": "operator"},
]
SERVICE = "/inference.GRPCInferenceService/"


class Authority:
    """A certificate authority with its files in ``folder``."""

    def __init__(self, folder: Path, name: str = "a") -> None:
        self._authority = trustme.CA()
        self._folder, self._name = folder, name
        self.ca = folder / f"{name}-ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str) -> dict[str, str]:
        """``certificate`` and ``private_key`` of a server or a caller, for 127.0.0.1."""
        issued = self._authority.issue_cert("127.0.0.1", "localhost", common_name=name)
        files = {"certificate": self._folder / f"{name}.pem", "private_key": self._folder / f"{name}.key"}
        issued.private_key_pem.write_to_path(str(files["private_key"]))
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        files["certificate"].write_bytes(chain)
        return {key: str(file) for key, file in files.items()}

    def for_callers(self, own: dict[str, str] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if own is not None:
            context.load_cert_chain(own["certificate"], own["private_key"])
        return context


@asynccontextmanager
async def http_door(**settings: Any) -> AsyncIterator[tuple[int, Upstream]]:
    async with Upstream() as upstream:
        router = HandRouter({"vision": pool_settings()})
        router.pools["vision"].update([upstream.lease()])
        door = HttpDoor(router, GatewaySettings(**settings), Memory(), Counted())
        port = await door.start("127.0.0.1", 0, reuse_port=False)
        try:
            yield port, upstream
        finally:
            await door.drain(0.0)


@asynccontextmanager
async def grpc_door(**settings: Any) -> AsyncIterator[int]:
    async with running_upstream() as upstream:
        router = HandRouter({"vision": pool_settings()})
        router.pools["vision"].update([upstream.lease()])
        door = GrpcDoor(router, GatewaySettings(**settings), AtZero(router), Counted())
        port = await door.start("127.0.0.1", 0)
        try:
            yield port
        finally:
            await door.drain(0.0)


async def post(
    url: str, path: str, tls: ssl.SSLContext | None = None, key: str = "", body: bytes = b"{}"
) -> tuple[int, bytes, str | None]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or False)) as session,
        session.post(url + path, data=io.BytesIO(body), headers=headers) as answer,
    ):
        return answer.status, await answer.read(), answer.headers.get(ERROR_KIND_HEADER)


INFER = "/v2/models/ident/infer"


async def test_https_carries_large_bodies_both_ways_and_plain_text_gets_nowhere(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with http_door(tls=authority.issue("server")) as (port, _):
        body = bytes(range(256)) * 40_000
        answered = await post(f"https://127.0.0.1:{port}", INFER, authority.for_callers(), body=body)
        assert answered == (200, body, None)
        with pytest.raises(aiohttp.ClientError):
            await post(f"http://127.0.0.1:{port}", INFER)


async def test_mtls_lets_in_only_whom_the_authority_knows(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "b")
    tls = {**authority.issue("server"), "client_ca": str(authority.ca)}
    async with http_door(tls=tls) as (port, _):
        url = f"https://127.0.0.1:{port}"
        known = authority.for_callers(authority.issue("caller"))
        assert (await post(url, INFER, known))[0] == 200
        for own in (None, stranger.issue("stranger")):
            with pytest.raises(aiohttp.ClientError):
                await post(url, INFER, authority.for_callers(own))
        assert (await post(url, INFER, known))[0] == 200


async def test_a_changed_certificate_is_used_and_a_broken_one_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("server")

    async def serial(port: int) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=authority.for_callers())
        found: str = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        writer.transport.abort()
        return found

    async with http_door(tls=files) as (port, _):
        first = await serial(port)
        Path(files["certificate"]).write_text("no certificate")
        await asyncio.sleep(1.5)
        assert await serial(port) == first
        authority.issue("server")
        async with asyncio.timeout(10):
            while await serial(port) == first:
                await asyncio.sleep(0.1)


async def test_http_keys_and_roles() -> None:
    async with http_door(api_keys=KEYS) as (port, upstream):
        url = f"http://127.0.0.1:{port}"
        for key in ("", new_key()):
            status, body, kind = await post(url, INFER, key=key)
            assert (status, kind) == (401, "unauthenticated")
            assert b"API key" in body and (not key or key.encode() not in body)
        assert (await post(url, INFER, key=CALLER))[0] == 200
        load = "/v2/repository/models/ident/load"
        assert (await post(url, load, key=CALLER))[::2] == (403, "forbidden")
        assert (await post(url, load, key=OPERATOR))[0] not in (401, 403)
        async with aiohttp.ClientSession() as session, session.get(url + "/v2/health/ready") as ready:
            assert ready.status == 200
        assert not any(CALLER.encode() in seen.raw_head for seen in upstream.seen)


async def test_grpc_with_tls_client_certificates_and_keys(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("caller")
    tls = {**authority.issue("server"), "client_ca": str(authority.ca)}
    async with grpc_door(tls=tls, api_keys=KEYS) as port:
        client = triton.InferenceServerClient(
            f"127.0.0.1:{port}",
            ssl=True,
            root_certificates=str(authority.ca),
            private_key=own["private_key"],
            certificate_chain=own["certificate"],
        )
        tensor = triton.InferInput("INPUT0", [1, 16], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 16), np.float32))

        def infer(headers: dict[str, str]) -> Any:
            return client.infer("ident", [tensor], headers=headers, client_timeout=5)

        def load(key: str) -> Any:
            return client.load_model("ident", headers={"authorization": f"Bearer {key}"}, client_timeout=5)

        try:
            await asyncio.to_thread(infer, {"authorization": f"Bearer {CALLER}"})
            with pytest.raises(Exception, match="UNAUTHENTICATED"):
                await asyncio.to_thread(infer, {})
            with pytest.raises(Exception, match="PERMISSION_DENIED"):
                await asyncio.to_thread(load, CALLER)
            assert await asyncio.to_thread(client.is_server_ready, client_timeout=5)
        finally:
            await asyncio.to_thread(client.close)
        stranger = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", stranger) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(SERVICE + "ServerLive")(b"", timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
