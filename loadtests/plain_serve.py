"""Ray Serve as its documentation shows it, for comparison: its own proxy in front of a plain pass-through application.

``python -m loadtests.plain_serve PORT UPSTREAM`` (host:port of a Triton's HTTP front end) runs until standard input
closes, and says ``SECONDS <time to start>`` when it is ready. The one place outside the gateway that knows Ray.
"""

import os
import sys
import time
from typing import Any


def main(port: int, upstream: str) -> None:
    # Nobody is called home, and no word of access is left in the home folder.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")  # noqa: TID251
    begin = time.perf_counter()
    import ray
    from ray import serve

    ray.init(address="local", num_cpus=2, log_to_driver=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    passing = serve.deployment(max_ongoing_requests=1000)(PassThrough)
    serve.run(passing.bind(upstream), name="plain", route_prefix="/")
    print("SECONDS", time.perf_counter() - begin, flush=True)
    sys.stdin.read()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


class PassThrough:
    """Reads a request, calls Triton, answers with what it said."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: Any = None

    async def __call__(self, request: Any) -> Any:
        import aiohttp
        from starlette.responses import Response

        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        headers = {key: value for key, value in request.headers.items() if key.startswith(("content", "inference"))}
        url = f"http://{self._upstream}{request.url.path}"
        async with self._session.request(request.method, url, data=await request.body(), headers=headers) as answer:
            passed = {key: value for key, value in answer.headers.items() if key.lower() != "content-length"}
            return Response(await answer.read(), answer.status, passed)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
