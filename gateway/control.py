"""The control API: what people and programs ask about the system. Served by Ray Serve, apart from the data plane."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse

from gateway.access import Access
from stores.scaling import DecisionLog
from stores.settings import StoreSettings
from stores.snapshot import read_snapshot
from stores.store import Store
from wire.errors import ERROR_KIND_HEADER, TidegateError

#: Fields of the records that hold Unix seconds; the API shows them as ISO-8601 in UTC.
_TIMES = frozenset(("at", "started_at", "ready_at"))


def control_app(store_settings: StoreSettings, pools: Sequence[str], queues: Sequence[str], access: Access) -> FastAPI:
    """The application. Its connection to the store belongs to the event loop that serves it. All but the health of
    this instance is for operators.

    The documentation pages of FastAPI load scripts from a CDN, so they are off; /openapi.json is there.
    """
    store = Store.connect(store_settings, client_name="tidegate-control")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await store.close()

    app = FastAPI(title="Tidegate control API", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """This gateway instance answers."""
        return {"status": "ok"}

    def operator(request: Request) -> None:
        access.tenant(request.headers.get("authorization", "").encode("latin-1"), operator=True)

    operators_only = [Depends(operator)]

    @app.get("/v1/status", dependencies=operators_only)
    async def status() -> dict[str, Any]:
        """Pools with their replicas, load and last decision, queues with their backlog, gateway instances."""
        return with_times((await read_snapshot(store, pools, queues)).model_dump(mode="json"))

    @app.get("/v1/pools/{pool}/decisions", dependencies=operators_only)
    async def decisions(pool: str, count: Annotated[int, Query(ge=1, le=1000)] = 50) -> dict[str, Any]:
        """The newest decision of the autoscaler and those before it that changed something, newest first."""
        if pool not in pools:
            raise HTTPException(404, f"no pool '{pool}'; there are: {', '.join(sorted(pools))}")
        log = DecisionLog(store)
        latest = await log.latest(pool)
        history = await log.history(pool, count)
        return {
            "pool": pool,
            "latest": None if latest is None else with_times(latest.model_dump(mode="json")),
            "changes": [with_times(record.model_dump(mode="json")) for record in history],
        }

    @app.exception_handler(TidegateError)
    async def own_error(_: Request, error: TidegateError) -> JSONResponse:
        headers = {ERROR_KIND_HEADER: error.kind.value}
        return JSONResponse({"error": error.message}, status_code=error.row.http, headers=headers)

    @app.exception_handler(404)
    async def not_found(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, status_code=404)

    return app


def with_times(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with its times in ISO-8601 UTC, at every depth."""

    def shown(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: shown(name, inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [shown("", inner) for inner in value]
        if key in _TIMES and isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return value

    return {name: shown(name, value) for name, value in document.items()}
