"""The pool's catalogue: what Triton says of itself and its models, word for word, kept for when the pool is at zero."""

import asyncio
import base64
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replicas.triton import Triton, TritonRefused, TritonUnreachable
from wire.errors import TidegateError
from wire.membership import Catalogue, ModelCatalogue

if TYPE_CHECKING:
    from stores.membership import CatalogueStore
    from stores.store import Store

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


async def publish_catalogue(
    triton: Triton, store: "Callable[[], Awaitable[Store]]", pool: str, models: Sequence[str]
) -> None:
    """Bring the stored catalogue of ``pool`` up to date; tried until the store takes it."""
    from stores.membership import CatalogueStore

    catalogues = CatalogueStore(await store())
    while True:
        try:
            await _publish(triton, catalogues, pool, models)
            return
        except TidegateError:
            await asyncio.sleep(_RETRY_SECONDS)
        except (TritonRefused, TritonUnreachable) as error:
            _log.warning("the catalogue of pool %s was not published: %s", pool, error)
            return


async def _publish(triton: Triton, catalogues: "CatalogueStore", pool: str, models: Sequence[str]) -> None:
    server = (await triton.server_metadata()).decode()
    metadata = {model: (await triton.model_metadata(model)).decode() for model in models}
    configs = {model: (await triton.model_config(model)).decode() for model in models}
    stored = await catalogues.get(pool)
    # The gRPC messages say the same: when these did not change, the others need not be fetched, nor gRPC imported.
    said = {model: (metadata[model], configs[model]) for model in models}
    if stored is not None and _said(stored) == _meaning(server, said):
        return
    calls = [("ServerMetadata", ""), *((rpc, model) for model in models for rpc in ("ModelMetadata", "ModelConfig"))]
    messages = [base64.b64encode(message).decode() for message in await triton.grpc_messages(calls)]
    catalogue = Catalogue(
        server_metadata_http=server,
        server_metadata_grpc=messages[0],
        models={
            model: ModelCatalogue(
                metadata_http=metadata[model],
                config_http=configs[model],
                metadata_grpc=messages[1 + 2 * position],
                config_grpc=messages[2 + 2 * position],
            )
            for position, model in enumerate(models)
        },
    )
    await catalogues.put(pool, catalogue)


def _said(catalogue: Catalogue) -> Any:
    models = {model: (kept.metadata_http, kept.config_http) for model, kept in catalogue.models.items()}
    return _meaning(catalogue.server_metadata_http, models)


def _meaning(server: str, models: Mapping[str, tuple[str, ...]]) -> Any:
    """What JSON bodies say: Triton writes the parameters of a config in another order at every start."""
    return json.loads(server), {model: [json.loads(body) for body in bodies] for model, bodies in models.items()}
