"""The sequences that gRPC requests belong to: read off the front of a message, and followed through a two-way stream.

A stream is on one replica. A sequence that starts on it is on that replica from then on; a request for one that is
elsewhere is answered inside the stream, with an error, and the stream goes on.
"""

from gateway.ingress.protobuf import messages_in_prefix, scalars
from gateway.ingress.rpc_messages import PREFIX_LENGTH, FirstMessage
from gateway.ingress.rpc_routes import PREFIX_LIMIT, stream_error
from gateway.routing.sequences import SEQUENCE_PARAMETERS, SequencePart, Sequences, sequence_part
from wire.errors import ErrorKind, TidegateError

#: Field of ModelInferRequest with the parameters; encoders write it before the tensors.
_PARAMETERS = 4
#: Sequences of one stream that are looked after; of more, those that are over are sorted out.
_FOLLOWED = 1024


def parameters_in(message: FirstMessage, *, enough: bool) -> dict[str, object] | None:
    """The parameters of a ModelInferRequest of which the front is there; None while more of it may hold some,
    unless what is there is ``enough``."""
    found, certain = messages_in_prefix(message.body, _PARAMETERS)
    if not certain and not message.whole and not enough:
        return None
    parameters: dict[str, object] = {}
    for entry in found:
        pair = scalars(entry)
        name, value = pair.get(1), pair.get(2)
        if isinstance(name, bytes) and isinstance(value, bytes):
            parameters[name.decode(errors="replace")] = _value(scalars(value))
    return parameters


def _value(parameter: dict[int, int | bytes]) -> object:
    """The value of an InferParameter; of its kinds the double is of no use here."""
    for kind, value in parameter.items():
        if kind == 1:
            return bool(value)
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return value
    return False


def sequence_of(data: bytes, encoding: bytes, model: str, *, last: bool) -> tuple[SequencePart | None, bool]:
    """The sequence of a request whose framed bytes begin with ``data``; and whether more of them would not matter."""
    parameters = parameters_in(FirstMessage(data, encoding, last=last), enough=len(data) >= PREFIX_LIMIT)
    if parameters is None:
        return None, False
    return sequence_part(model, {name: parameters.get(name) for name in SEQUENCE_PARAMETERS}), True


class StreamSequences:
    """Sorts the messages of one stream to one replica: those that go there, and those that are refused."""

    __slots__ = (
        "_encoding",
        "_front",
        "_keys",
        "_left",
        "_look_at",
        "_refused",
        "_replica",
        "_sequences",
        "answers",
        "dropped",
    )

    def __init__(self, sequences: Sequences, encoding: bytes, replica: str) -> None:
        self._sequences = sequences
        self._encoding = encoding
        self._replica = replica
        self._front = bytearray()  # of a message about which nothing is decided yet
        self._look_at = 0  # its size at which to look again: not at every crumb
        self._left = 0  # of a message that is decided
        self._refused = False
        self._keys: set[tuple[str, str]] = set()
        self.answers: list[bytes] = []
        """Responses to refused requests, to be sent by whoever called :meth:`sort`."""
        self.dropped = 0
        """Bytes of refused requests in what :meth:`sort` was last given."""

    def sort(self, data: bytes, *, last: bool) -> bytes:
        """What of the stream's data, of which ``data`` is the next part, goes to the replica now."""
        passed: list[bytes] = []
        self.answers, self.dropped = [], 0
        while data:
            if not self._left:
                if self._front:
                    self._front += data
                    if len(self._front) < self._look_at and not last:
                        break
                    data, self._front = bytes(self._front), bytearray()
                if not self._decide(data, last=last):
                    self._front += data
                    self._look_at = self._next_look(data)
                    break
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            if self._refused:
                self.dropped += len(piece)
            else:
                passed.append(piece)
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def live(self) -> bool:
        """Whether a sequence that came over this stream still lives on its replica."""
        self._keys = {key for key in self._keys if self._sequences.lives_on(key, self._replica)}
        return bool(self._keys)

    def _next_look(self, data: bytes) -> int:
        """When the message is there, at the latest; before that whenever it has doubled."""
        if len(data) < PREFIX_LENGTH:
            return PREFIX_LENGTH
        return min(2 * len(data), PREFIX_LENGTH + int.from_bytes(data[1:PREFIX_LENGTH]))

    def _decide(self, data: bytes, *, last: bool) -> bool:
        """Look at a message of which ``data`` is the front; False while more of it has to come."""
        if len(data) < PREFIX_LENGTH and not last:
            return False
        message = FirstMessage(data, self._encoding, last=last)
        enough = len(data) >= PREFIX_LIMIT
        names = message.guess(1) if enough else message.strings(1)
        if names is None:
            return False
        model = names.get(1, "")
        self._refused = False
        if model in self._sequences.models:
            part, certain = sequence_of(data, self._encoding, model, last=last)
            if not certain:
                return False
            if part is not None:
                self._follow(part, data)
        self._left = message.end
        return True

    def _follow(self, part: SequencePart, data: bytes) -> None:
        try:
            self._sequences.on_stream(part, self._replica)
        except TidegateError as error:
            self._refused = True
            answer = stream_error(data, self._encoding, error.message)
            self.answers.append(answer or b"")
            return
        key = (part.model, part.id)
        if part.end:
            self._keys.discard(key)
        else:
            self._keys.add(key)
            if len(self._keys) > _FOLLOWED:
                self.live()


def leaving_error() -> TidegateError:
    return TidegateError(ErrorKind.DRAINING, "the replica of this stream is leaving; open a new stream")
