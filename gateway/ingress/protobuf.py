"""The few bytes of protobuf that routing needs: a string field of a message, without decoding the rest.

Tensors are never looked at. In every request message of the protocol that names a model, the name is field 1.
"""

from collections.abc import Collection, Iterator

_LENGTH_DELIMITED = 2
_LONGEST_VARINT = 10
#: Bytes that a field of each fixed-size wire type takes.
_FIXED_BYTES = {1: 8, 5: 4}
#: What the ends of a group, a form that is not written any more, add to how deep the reader is in groups.
_GROUP = {3: 1, 4: -1}


def first_string(message: bytes, number: int) -> str | None:
    """The string in field ``number``, read from the front of ``message``; None if it is not there before the first
    thing that cannot be read. As in any protobuf reader the last one wins, as far as fields come in order."""
    return strings_in_prefix(message, (number,))[0].get(number)


def strings_in_prefix(message: bytes, numbers: Collection[int]) -> tuple[dict[int, str], bool]:
    """The strings in fields ``numbers``, read from the front of a message that may not be all there; and whether more
    of it would change nothing: all were found and a later field has been seen, or something that cannot be read.

    Encoders write fields in order, so that nothing but tensors follows; but nothing says that they must."""
    found: dict[int, str] = {}
    last = max(numbers)
    at = depth = 0
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            field, wire_type = tag >> 3, tag & 7
            if field > last and len(found) == len(numbers):
                return found, True
            if wire_type == _LENGTH_DELIMITED:
                length, at = _varint(message, at)
                if at + length > len(message):
                    break
                if field in numbers and not depth:
                    found[field] = bytes(message[at : at + length]).decode()
                at += length
            elif wire_type == 0:
                _, at = _varint(message, at)
            elif wire_type in _GROUP:
                depth = max(0, depth + _GROUP[wire_type])
            else:
                at += _FIXED_BYTES[wire_type]
    except IndexError:
        return found, len(message) - at >= _LONGEST_VARINT
    except (KeyError, UnicodeDecodeError):
        return found, True
    return found, False


def messages_in_prefix(message: bytes, number: int) -> tuple[list[bytes], bool]:
    """The embedded messages in field ``number`` of a message that may not be all there; and whether more of it would
    add none: a later field has been seen, as encoders write fields in order, or something that cannot be read. Of what
    is there all is looked at, in whatever order it comes."""
    found: list[bytes] = []
    at = 0
    later = False
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            field, wire_type = tag >> 3, tag & 7
            later = later or field > number
            if wire_type == _LENGTH_DELIMITED:
                length, at = _varint(message, at)
                if at + length > len(message):
                    break
                if field == number:
                    found.append(bytes(message[at : at + length]))
                at += length
            elif wire_type == 0:
                _, at = _varint(message, at)
            else:
                at += _FIXED_BYTES[wire_type]
    except IndexError:
        return found, later or len(message) - at >= _LONGEST_VARINT
    except KeyError:
        return found, True
    return found, later


def scalars(message: bytes) -> dict[int, int | bytes]:
    """The varint and length-delimited fields of a small message, as far as it can be read; the last of each."""
    found: dict[int, int | bytes] = {}
    at = 0
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            if tag & 7 == _LENGTH_DELIMITED:
                length, at = _varint(message, at)
                found[tag >> 3] = message[at : at + length]
                at += length
            elif tag & 7 == 0:
                found[tag >> 3], at = _varint(message, at)
            else:
                at += _FIXED_BYTES[tag & 7]
    except (IndexError, KeyError):
        pass
    return found


def bytes_field(number: int, value: bytes) -> bytes:
    """A string or bytes field."""
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _encode_varint(len(value)) + value


#: An embedded message is encoded as its bytes are.
nested_field = bytes_field


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A varint and the place behind it. Raises IndexError at the end of ``message`` or when it is too long."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a varint has at most ten bytes")


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a whole message, one after another: number and value.

    Raises:
        ValueError: it is no protobuf message.
    """
    at = 0
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            value: int | bytes
            if tag & 7 == 0:
                value, at = _varint(message, at)
            else:
                length, at = _varint(message, at) if tag & 7 == _LENGTH_DELIMITED else (_FIXED_BYTES[tag & 7], at)
                if at + length > len(message):
                    raise IndexError("the message ends within a field")
                value, at = bytes(message[at : at + length]), at + length
            yield tag >> 3, value
    except (IndexError, KeyError):
        raise ValueError("not a protobuf message") from None


def varint_field(number: int, value: int) -> bytes:
    """An integer or bool field."""
    return bytes([number << 3]) + _encode_varint(value)
