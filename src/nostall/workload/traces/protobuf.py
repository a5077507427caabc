"""The protobuf wire format, as far as reading Chakra traces needs it."""

from __future__ import annotations

from collections.abc import Iterator

from nostall.core.errors import BadTrace

Value = int | bytes
"""A number (wire types 0, 1, 5: raw bits) or the bytes of a string or a message (type 2)."""


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """(value, position behind it).  Raises :class:`IndexError` where the data end."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise BadTrace(f"a varint before byte {at} has more than 64 bits; the file is no .et")


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) of each field of a message; unknown wire types are refused."""
    at, end = 0, len(data)
    while at < end:
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = varint(data, at)
        if not number or kind not in (1, 2, 5) or at + size > end:
            raise BadTrace(f"field {number} of type {kind} at byte {at} does not fit its message")
        piece = data[at : at + size]
        at += size
        yield number, piece if kind == 2 else int.from_bytes(piece, "little")
