"""Whose embedded store this is. Two systems whose settings name one port would otherwise mix without a word."""

from stores.store import Store

#: Outside every key prefix: an embedded store belongs to one system, whatever that calls its keys.
_KEY = "tidegate-installation"


async def claim(store: Store, installation: str) -> None:
    """Write down that ``installation`` (the path of its settings) runs this store.

    Raises:
        TidegateError: STORE_UNAVAILABLE.
    """
    with store.errors():
        await store.redis.set(_KEY, installation)


async def owner(store: Store) -> str | None:
    """The installation that runs this store; None where none has said so.

    Raises:
        TidegateError: STORE_UNAVAILABLE.
    """
    with store.errors():
        raw: bytes | None = await store.redis.get(_KEY)
    return None if raw is None else raw.decode("utf-8", "replace")
