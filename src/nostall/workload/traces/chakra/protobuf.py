"""Decoder for the protobuf wire format, as far as Chakra traces need it."""

from __future__ import annotations

from collections.abc import Iterator

from nostall.core.errors import BadTrace

Value = int | bytes
"""A number (wire types 0, 1 and 5, as raw bits), or the bytes of a string or message (type 2)."""


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """(value, position after it).  Raises :class:`IndexError` if the data end inside the varint."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise BadTrace(
                f"a varint before byte {position} has more than 64 bits; the file is not a Chakra "
                "trace"
            )


def read_fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) of each field of a message.

    Raises :class:`~nostall.core.errors.BadTrace` for an unknown wire type or a field that is longer
    than the message.
    """
    position, end = 0, len(data)
    while position < end:
        key, position = read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        size = {1: 8, 5: 4}.get(wire_type, 0)
        if wire_type == 0:
            value, position = read_varint(data, position)
            yield number, value
            continue
        if wire_type == 2:
            size, position = read_varint(data, position)
        if not number or wire_type not in (1, 2, 5) or position + size > end:
            raise BadTrace(
                f"field {number} of wire type {wire_type} at byte {position} does not fit its "
                "message"
            )
        payload = data[position : position + size]
        position += size
        yield number, payload if wire_type == 2 else int.from_bytes(payload, "little")
