"""What operators have changed in a pool beyond its settings: models loaded and unloaded, trace and log settings, shared
memory. The gateway writes changes down in one order, every replica of the pool makes them in that order and answers.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum

from pydantic import ConfigDict

from wire.membership import Record

#: A change that undoes another one is forgotten so long after it: by then every replica has read it. Milliseconds.
_UNDOING_KEPT_MS = 600_000


class CallProtocol(StrEnum):
    """In which protocol a call came, and is passed on."""

    HTTP = "http"
    GRPC = "grpc"


class _WithBytes(Record):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")


class Call(_WithBytes):
    """A call of an operator, as it came: a replica passes it on to its Triton."""

    protocol: CallProtocol
    target: str
    """Path (HTTP) or name of the method (gRPC)."""
    body: bytes
    """Body (HTTP, of a ``POST``) or message (gRPC, serialised)."""


class CallAnswer(_WithBytes):
    """Triton's answer to a call, as it came."""

    replica: str
    status: int
    """HTTP status or gRPC status code."""
    content_type: str | None = None
    body: bytes = b""
    """Body (HTTP) or message (gRPC)."""
    details: str = ""
    """gRPC's words for a status that is not OK."""
    unreachable: str | None = None
    """Why there is no answer of Triton, in one sentence."""

    @property
    def well(self) -> bool:
        return self.unreachable is None and self.status in (0, 200)


class ChangeKind(StrEnum):
    """What a change is about."""

    LOAD = "load"
    UNLOAD = "unload"
    SETTINGS = "settings"
    """Trace or log settings."""
    REGISTER = "register"
    """A region of shared memory."""
    UNREGISTER = "unregister"


class Change(Record):
    """One change. Its call is kept apart, as it may be large."""

    token: str
    """Names this change before it has a place in the order."""
    kind: ChangeKind
    about: str
    """What is changed: a model; the names of settings, and whose; a region, "" for all."""
    models: tuple[str, ...] = ()
    """For LOAD and UNLOAD: the models that are there, or gone, by this change; the first is the one named."""
    plain: bool = False
    """LOAD without parameters: changes nothing where the model is loaded already."""


class Numbered(Record):
    """A change with its place in the order: ``<milliseconds by the store's clock>-<count>``."""

    id: str
    change: Change


def obsolete(changes: Sequence[Numbered], done: Numbered, settings_models: Collection[str]) -> list[str]:
    """Ids of the changes that need not be kept once every replica has made ``done``.

    A replica that starts makes all kept changes in their order and must end where the others are. ``changes`` are all
    kept ones, in order. What merely undoes stays for a while, for replicas that are about to read it.
    """
    before = [each for each in changes if _key(each) < _key(done) and _group(each.change) == _group(done.change)]
    if done.change.kind is ChangeKind.LOAD and done.change.plain:
        # It does nothing to a model that was loaded with parameters: those stay in force, and so does that load.
        given = next((i for i in reversed(range(len(before))) if _sets_state(before[i].change)), None)
        if given is not None and before[given].change.kind is ChangeKind.LOAD:
            before = before[given + 1 :]
    elif done.change.kind is ChangeKind.UNREGISTER and not done.change.about.rpartition("/")[2]:
        before = [each for each in changes if _key(each) < _key(done) and _is_region_of(each.change, done.change.about)]
    gone = {each.id for each in before}
    now_ms = _key(done)[0]
    for each in changes:
        old = now_ms - _key(each)[0] > _UNDOING_KEPT_MS
        if old and each.id not in gone and _undoes(each, changes, settings_models):
            gone.add(each.id)
    return [each.id for each in changes if each.id in gone]


def loaded(changes: Sequence[Numbered]) -> frozenset[str]:
    """Models that operators have loaded and not unloaded since."""
    return frozenset(model for model, kind in _last(changes).items() if kind is ChangeKind.LOAD)


def unloaded(changes: Sequence[Numbered]) -> frozenset[str]:
    """Models that operators have unloaded and not loaded since."""
    return frozenset(model for model, kind in _last(changes).items() if kind is ChangeKind.UNLOAD)


def _last(changes: Sequence[Numbered]) -> dict[str, ChangeKind]:
    return {
        model: each.change.kind
        for each in changes
        if each.change.kind in (ChangeKind.LOAD, ChangeKind.UNLOAD)
        for model in each.change.models
    }


def _key(numbered: Numbered) -> tuple[int, int]:
    milliseconds, _, count = numbered.id.partition("-")
    return int(milliseconds), int(count)


def _group(change: Change) -> tuple[str, str]:
    if change.kind in (ChangeKind.LOAD, ChangeKind.UNLOAD):
        return "model", change.about
    if change.kind in (ChangeKind.REGISTER, ChangeKind.UNREGISTER):
        return "region", change.about
    return "settings", change.about


def _sets_state(change: Change) -> bool:
    """Whether a load or unload decides what is loaded, whatever was before."""
    return change.kind is ChangeKind.UNLOAD or not change.plain


def _is_region_of(change: Change, about: str) -> bool:
    """Whether it is about a region of the kind of memory (``system/``, ``cuda/``) that ``about`` is all of."""
    return _group(change)[0] == "region" and change.about.startswith(about)


def _undoes(numbered: Numbered, changes: Sequence[Numbered], settings_models: Collection[str]) -> bool:
    """Whether it leads to nothing but what a replica has without any change."""
    change = numbered.change
    if change.kind is ChangeKind.UNREGISTER:
        return True
    if any(each.id != numbered.id and _group(each.change) == _group(change) for each in changes):
        return False
    if change.kind is ChangeKind.UNLOAD:
        return not any(model in settings_models for model in change.models)
    return change.kind is ChangeKind.LOAD and change.plain and change.about in settings_models
