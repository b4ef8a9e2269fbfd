"""Sequences in gRPC messages: found at any split of the bytes, and each message of a stream sent where it may go."""

import gzip
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.ingress.rpc_messages import FirstMessage, framed
from gateway.ingress.rpc_sequences import StreamSequences, parameters_in, sequence_of
from gateway.routing.sequences import SequencePart
from tests.unit.test_pool import lease, make, virtual
from tests.unit.test_sequences import catalogue


def request(model: str = "segmenter", size: int = 300, **parameters: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id="7", raw_input_contents=[bytes(size)])
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    message.inputs.add(name="INPUT0", datatype="UINT8", shape=[size])
    return message


def raw(model: str = "segmenter", size: int = 300, **parameters: Any) -> bytes:
    return framed(request(model, size, **parameters).SerializeToString())


def test_parameters_agree_with_protobuf() -> None:
    given = {"sequence_id": 2**40, "sequence_start": True, "sequence_end": False, "timeout": -1, "x": "é", "": "y"}
    message = FirstMessage(raw(**given), b"identity", last=True)
    assert parameters_in(message, enough=False) == given | {"timeout": 2**64 - 1}
    unsigned = pb.ModelInferRequest(model_name="m")
    unsigned.parameters["sequence_id"].uint64_param = 2**64 - 1
    assert parameters_in(FirstMessage(framed(unsigned.SerializeToString()), b"identity", last=True), enough=False) == {
        "sequence_id": 2**64 - 1
    }
    assert parameters_in(FirstMessage(framed(b"\x22\x05abc"), b"identity", last=True), enough=False) == {}
    late = pb.ModelInferRequest(raw_input_contents=[bytes(99)]).SerializeToString() + unsigned.SerializeToString()
    assert parameters_in(FirstMessage(framed(late), b"identity", last=True), enough=False) == {"sequence_id": 2**64 - 1}


@pytest.mark.parametrize("encoding", [b"identity", b"gzip"])
def test_a_sequence_is_known_once_its_parameters_are_there(encoding: bytes) -> None:
    data = raw(sequence_id="a", sequence_start=True)
    if encoding == b"gzip":
        packed = gzip.compress(data[5:])
        data = b"\x01" + len(packed).to_bytes(4) + packed
    part = SequencePart("segmenter", "s:a", True, False)
    certain_from = None
    for size in range(len(data) + 1):
        found, certain = sequence_of(data[:size], encoding, "segmenter", last=False)
        if certain:
            certain_from = certain_from or size
            assert found == part
        else:
            assert found is None and certain_from is None
    assert certain_from is not None


def ids(data: bytes) -> list[str]:
    found, at = [], 0
    while at < len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5])
        found.append(pb.ModelInferRequest.FromString(data[at + 5 : end]).parameters["sequence_id"].string_param)
        at = end
    return found


@pytest.mark.parametrize("piece", [1, 2, 5, 6, 13, 100, 1000, 10**6])
def test_messages_of_a_stream_are_sorted_at_any_split(piece: int) -> None:
    @virtual
    async def story() -> None:
        pool, _ = make()
        pool.update([lease("a"), lease("b")])
        pool.sequences.on_catalogue(catalogue())
        pool.sequences.join(SequencePart("segmenter", "s:there", True, False), "b", None)
        data = (
            raw(sequence_id="here", sequence_start=True)
            + raw("classifier", 0, sequence_id="none of ours")
            + raw(sequence_id="there")
            + framed(b"")
            + raw(sequence_id="here", sequence_end=True)
            + raw(sequence_id="there", sequence_end=True)
            + raw(size=0, sequence_id="there", sequence_start=True)
        )
        sorter = StreamSequences(pool.sequences, b"identity", "a")
        passed, dropped, answers, live = b"", 0, [], []
        for at in range(0, len(data), piece):
            passed += sorter.sort(data[at : at + piece], last=at + piece >= len(data))
            dropped += sorter.dropped
            answers += sorter.answers
            live.append(sorter.live())
        assert ids(passed) == ["here", "none of ours", "", "here", "there"]
        assert len(passed) + dropped == len(data)
        for answer in answers:
            told = pb.ModelStreamInferResponse.FromString(answer)
            assert "on another replica" in told.error_message and told.infer_response.id == "7"
        assert len(answers) == 2 and live[-1]
        assert pool.sequences.lives_on(("segmenter", "s:there"), "a")
        assert not pool.sequences.lives_on(("segmenter", "s:here"), "a")

    story()
