"""Calls the gateway for one inference: binary tensors both ways over HTTP, retried within the job's time.

The body is made and read by tritonclient's own functions; the connection is aiohttp's, because the stock asyncio
client can neither bound its wait per call nor show the gateway's error header.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

import aiohttp
import numpy as np
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from wire.errors import ERROR_KIND_HEADER, ErrorKind, kind_of_http
from wire.membership import JOB_HEADER, TIMEOUT_HEADER
from workers.retry import Attempts, CallFailure, GiveUp, InferenceFailed, Retry, next_step
from workers.settings import GatewayAccessSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

_JSON_LENGTH_HEADER = "Inference-Header-Content-Length"
#: Calls of one worker process open at once; those beyond wait here instead of at the gateway.
_CONNECTIONS = 64

RunOnCpu = Callable[..., Awaitable[Any]]


class GatewayClient:
    """The gateway at ``url``. ``run_on_cpu`` runs a function outside the event loop; ``dice`` returns [0, 1)."""

    def __init__(
        self, url: str, access: GatewayAccessSettings, *, run_on_cpu: RunOnCpu, dice: Callable[[], float]
    ) -> None:
        """Raises OSError (ssl.SSLError is one) when a file of ``access`` cannot be used."""
        self._url = url.rstrip("/")
        self._run_on_cpu = run_on_cpu
        self._dice = dice
        # Bodies are compressed only if asked for; tensors hardly shrink and cost CPU time.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS, ssl=_tls(access)),
            headers=_authorization(access),
            skip_auto_headers=("Accept-Encoding",),
            auto_decompress=True,
        )

    async def close(self) -> None:
        await self._session.close()

    async def infer(
        self, model: str, inputs: Mapping[str, "NDArray[Any]"], *, job_id: str, deadline: float
    ) -> dict[str, "NDArray[Any]"]:
        """All outputs of ``model`` for these inputs, by tensor name. ``deadline`` is a ``time.monotonic()``.

        A held request (no replica yet) just waits.

        Raises:
            InferenceFailed: refused for good, or no success within the deadline.
        """
        body, json_length = await self._run_on_cpu(_encode, inputs)
        attempts = Attempts()
        while True:
            remaining = deadline - time.monotonic()
            answer = await self._post(model, body, json_length, job_id, remaining)
            if not isinstance(answer, CallFailure):
                outputs: dict[str, NDArray[Any]] = await self._run_on_cpu(_decode, *answer)
                return outputs
            attempts = attempts.after(answer)
            match next_step(attempts, answer, deadline - time.monotonic(), self._dice()):
                case Retry(delay):
                    await asyncio.sleep(delay)
                case GiveUp(out_of_time):
                    _give_up(model, answer, attempts, out_of_time=out_of_time)

    async def _post(
        self, model: str, body: bytes, json_length: int | None, job_id: str, remaining: float
    ) -> tuple[bytes, int | None] | CallFailure:
        """Body and JSON length of a good answer, else the failure."""
        headers = {
            JOB_HEADER: job_id,
            TIMEOUT_HEADER: str(max(1, int(remaining * 1000))),
            "Content-Type": "application/octet-stream",
        }
        if json_length is not None:
            headers[_JSON_LENGTH_HEADER] = str(json_length)
        url = f"{self._url}/v2/models/{quote(model, safe='')}/infer"
        # The gateway answers 504 at the same deadline; a little more lets that answer arrive.
        limit = aiohttp.ClientTimeout(total=max(0.001, remaining) + 0.5)
        try:
            async with self._session.post(url, data=body, headers=headers, timeout=limit) as response:
                content = await response.read()
        except TimeoutError:
            return CallFailure(504, ErrorKind.DEADLINE, "no answer within the job's time")
        except (aiohttp.ClientError, OSError) as error:
            return CallFailure(None, None, f"the gateway does not answer ({type(error).__name__})")
        if response.status == 200:
            length = response.headers.get(_JSON_LENGTH_HEADER)
            return content, None if length is None else int(length)
        return CallFailure(
            response.status,
            kind_of_http(response.status, response.headers.get(ERROR_KIND_HEADER)),
            _error_text(content) or f"status {response.status}",
            _seconds(response.headers.get("Retry-After")),
        )


def _tls(access: GatewayAccessSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=access.ca)
    if access.certificate is not None:
        context.load_cert_chain(access.certificate)
    return context


def _authorization(access: GatewayAccessSettings) -> dict[str, str]:
    if access.api_key_file is None:
        return {}
    return {"Authorization": f"Bearer {access.api_key_file.read_text().strip()}"}


def _give_up(model: str, failure: CallFailure, attempts: Attempts, *, out_of_time: bool) -> NoReturn:
    if out_of_time:
        message = f"no success within the job's time; the last of {attempts.made} tries: {failure.message}"
        failure = CallFailure(504, ErrorKind.DEADLINE, message)
    raise InferenceFailed(model, failure, attempts)


def _encode(inputs: Mapping[str, "NDArray[Any]"]) -> tuple[bytes, int | None]:
    tensors = []
    for name, array in inputs.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(np.ascontiguousarray(array))
        tensors.append(tensor)
    body, json_length = InferenceServerClient.generate_request_body(tensors)
    return body, json_length


def _decode(content: bytes, json_length: int | None) -> dict[str, "NDArray[Any]"]:
    result = InferenceServerClient.parse_response_body(content, header_length=json_length)
    names = [output["name"] for output in result.get_response()["outputs"]]
    return {name: result.as_numpy(name) for name in names}


def _error_text(content: bytes) -> str:
    """The sentence in an error body of the protocol; empty when it has none."""
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # a date: our gateway never sends one
