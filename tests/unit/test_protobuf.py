"""Reading one string field off the front of a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gateway.ingress.protobuf import bytes_field, first_string, nested_field


@given(st.text(max_size=300), st.text(max_size=20), st.binary(max_size=200))
def test_agrees_with_protobuf(name: str, version: str, tensor: bytes) -> None:
    request = pb.ModelInferRequest(model_name=name, model_version=version, id="7", raw_input_contents=[tensor])
    message = request.SerializeToString()
    assert (first_string(message, 1) or "") == name
    assert (first_string(message, 2) or "") == version
    assert first_string(message, 3) == "7"


FIELDS = st.lists(
    st.sampled_from(
        [
            b"\x0a\x05model",
            b"\x12\x011",
            b"\x1a\x02id",
            b"\x3a\x03\x0a\x01n",
            b"\x08\x07",  # a number under the name's number
            # Fields that are not known, one of each wire type.
            b"\xf2\x3f\x03abc",
            b"\xf3\x3f\x0a\x01z\xf4\x3f",
            b"\xf0\x3f\x96\x01",
            b"\xf5\x3f\x01\x02\x03\x04",
            b"\xf1\x3f\x01\x02\x03\x04\x05\x06\x07\x08",
        ]
    ),
    max_size=8,
)


@given(FIELDS)
def test_any_order_of_fields_reads_as_protobuf_reads_it(fields: list[bytes]) -> None:
    """Unless a name comes again behind a later field."""
    message = b"".join(fields)
    read = pb.ModelInferRequest.FromString(message)
    for number, value in ((1, read.model_name), (3, read.id)):
        assert (first_string(message, number) or "") == value


@given(st.binary(max_size=100), st.integers(min_value=1, max_value=3))
def test_whatever_bytes_come_it_answers(message: bytes, number: int) -> None:
    found = first_string(message, number)
    assert found is None or isinstance(found, str)


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (b"", None),
        (b"\x0a\x03abc", "abc"),
        (b"\x0a\x03abc\x0a\x01d", "d"),  # the last one wins
        (b"\x0a\x05abc", None),  # cut short
        (b"\x0a\x01\xff", None),  # not UTF-8
        (b"\x0a" + b"\xff" * 11, None),  # a varint without end
        (b"\x12\x01x\x0a\x01y", "y"),  # out of order
        (b"\xf2\x3f\x03abc\x0a\x01y", "y"),  # behind a field that is not known
        (b"\x0a\x01y\x12\x01x\x0a\x01z", "y"),  # behind a name and a later field, nothing is looked for
        (b"\x08\x05\x0a\x01z", "z"),  # a varint under the same number does not disturb
        (b"\x0b\x0a\x01z", None),  # inside a group
        (b"\x0b\x0a\x01z\x0c\x0a\x01y\x12\x00", "y"),  # behind one
        (b"\x0c\x0c\x0a\x01y", "y"),  # the end of no group
    ],
)
def test_odd_messages(message: bytes, found: str | None) -> None:
    assert first_string(message, 1) == found


def test_written_fields_are_read_by_protobuf() -> None:
    index = b"".join(nested_field(1, bytes_field(1, name) + bytes_field(3, b"READY")) for name in (b"a", b"b" * 200))
    read = pb.RepositoryIndexResponse.FromString(index)
    assert [(model.name, model.state) for model in read.models] == [("a", "READY"), ("b" * 200, "READY")]
