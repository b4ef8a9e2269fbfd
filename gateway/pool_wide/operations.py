"""The endpoints that concern more than one replica, one table for HTTP and gRPC."""

from dataclasses import dataclass
from enum import Enum

from wire.changes import Call, ChangeKind


class Operation(Enum):
    """What is asked for: its name, and the kind of change that it makes on every replica (None: answers are merged)."""

    STATISTICS = "statistics", None
    INDEX = "repository index", None
    LOAD = "load", ChangeKind.LOAD
    UNLOAD = "unload", ChangeKind.UNLOAD
    TRACE = "trace settings", ChangeKind.SETTINGS
    LOG = "log settings", ChangeKind.SETTINGS
    REGIONS = "shared memory regions", None
    REGISTER = "register shared memory", ChangeKind.REGISTER
    UNREGISTER = "unregister shared memory", ChangeKind.UNREGISTER

    @property
    def words(self) -> str:
        return str(self.value[0])

    @property
    def change(self) -> ChangeKind | None:
        """The kind of change that it makes; None where it only reads."""
        kind: ChangeKind | None = self.value[1]
        return kind

    @property
    def for_operators(self) -> bool:
        """Whether it changes or watches the server as a whole (see ``gateway.operator_endpoints``)."""
        return self is not Operation.STATISTICS

    @property
    def shares_memory(self) -> bool:
        return self in (Operation.REGIONS, Operation.REGISTER, Operation.UNREGISTER)


@dataclass(frozen=True, slots=True)
class Asked:
    """One operation as a caller asks for it."""

    operation: Operation
    call: Call
    """For a change: what every replica passes on to its Triton."""
    model: str | None = None
    """None: it concerns the server as a whole."""
    names: tuple[str, ...] = ()
    """Of the parameters of a load or unload, or of the settings to change."""
    region: str = ""
    """``system/<name>`` or ``cuda/<name>``; without a name for all regions."""
    method: str = "POST"
    path: str = ""
    body: bytes = b""
    """How one replica is asked over HTTP, where answers are merged."""

    @property
    def changes(self) -> bool:
        """False for what only reads, settings that name no new values included."""
        kind = self.operation.change
        return kind is not None and (kind is not ChangeKind.SETTINGS or bool(self.names))

    @property
    def about(self) -> str:
        """What is changed, in the words of ``wire.changes.Change``."""
        if self.operation in (Operation.TRACE, Operation.LOG):
            return ":".join((self.operation.name.lower(), self.model or "", ",".join(sorted(self.names))))
        return self.region if self.operation.shares_memory else self.model or ""
