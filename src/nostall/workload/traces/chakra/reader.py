"""Reader for Chakra execution traces (mlcommons/chakra, et_def.proto): sums by kind of work.

Messages of a Chakra file: lengths, and the next message behind damaged bytes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from nostall.core.errors import BadTrace
from nostall.core.files.atomic import check_content
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.work_kinds import WorkKind, is_host_to_device, kernel_work_kind

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


MAX_NODE = 64 << 20
"""Size limit of a node in bytes; a file with a larger length is not a Chakra trace."""
_MAX_FOUND = 1 << 20
"""Size limit of a node that is found behind damage."""
_WINDOW = 1 << 16
_OVERLAP = 32
"""Bytes of a window that the next one has, too, because a node can start in them."""
_NODE_START = re.compile(
    rb"(?:\x08[\x80-\xff]{0,9}[\0-\x7f])?\x12(?:[\x01-\x7f]|[\x80-\xff][\x01-\x7f])[ -~]"
)
"""First fields of a node: the id, unless it is 0, and the name with its length."""
_MAX_WORK = 16
"""Bytes that may be parsed in the search for messages, as a multiple of the file's size."""

IsNode = Callable[[bytes], bool]
"""Whether the bytes of a message are those of a node."""


@dataclass(slots=True)
class ChakraFile:
    """A file of length-delimited messages; damaged messages are skipped and counted."""

    path: Path
    is_node: IsNode
    skipped: int = 0
    """Damaged messages; neighbouring ones are counted as one if their lengths are damaged."""
    first_damage: int | None = None
    """Offset of the first one."""
    end_damage: str | None = None
    """Cause if the file stops inside a message; None: it does not."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Damage of the file, a sentence each."""
        remarks = [self.end_damage] if self.end_damage else []
        if self.skipped:
            verb = "is" if self.skipped == 1 else "are"
            remarks.append(
                f"{pluralize(self.skipped, 'node')} {verb} damaged and {verb} skipped, first at "
                f"byte {self.first_damage}"
            )
        return tuple(remarks)

    def messages(self) -> Iterator[bytes]:
        """The first message, which is the metadata, and all messages that are nodes.

        Raises :class:`~nostall.core.errors.BadTrace` if the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(0, 2)
                size = file.tell()
                yield from self._read(file, size)
        except OSError as error:
            raise BadTrace(
                f"cannot read {self.path}: {error.strerror or error}; check the path and its "
                "permissions"
            ) from error

    def _read(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        offset, is_first, work = 0, True, _MAX_WORK * size
        while offset < size:
            end, message = _read_message(file, offset, size)
            if message is not None and (is_first or self.is_node(message)):
                yield message
                offset, is_first = end, False
                continue
            following, used = self._next_node(file, offset + 1, size, work)
            work -= used
            if end > size and following == size:
                self.end_damage = f"the file stops at byte {size}, inside the node at byte {offset}"
                return
            self.skipped += 1
            self.first_damage = offset if self.first_damage is None else self.first_damage
            is_first = False
            # If a node follows, only this one is damaged.
            is_delimited = message is not None and _is_message(file, end, size, self.is_node)
            offset = end if is_delimited else following

    def _next_node(self, file: IO[bytes], offset: int, size: int, work: int) -> tuple[int, int]:
        """(offset of the next message that is a node, bytes parsed to find it)."""
        used = 0
        while offset < size and used < work:
            file.seek(offset)
            window = file.read(_WINDOW)
            used += len(window)
            for match in _NODE_START.finditer(window):
                key = offset + match.start()
                for prefix in (1, 2, 3):
                    start = key - prefix
                    if start < offset:
                        break
                    message = _read_message(file, start, size, _MAX_FOUND, prefix)[1]
                    used += len(message or b"")
                    if message is not None and self.is_node(message):
                        return start, used
                    if used > work:
                        return size, used
            offset += max(len(window) - _OVERLAP, 1)
        return size, used


def _read_message(
    file: IO[bytes], offset: int, size: int, limit: int = MAX_NODE, prefix: int = 0
) -> tuple[int, bytes | None]:
    """(end, bytes) of the message at ``offset``; None if its length is not valid.

    ``prefix`` is the number of bytes that the length must have; 0: any number.
    """
    file.seek(offset)
    head = file.read(10)
    try:
        length, used = read_varint(head, 0)
    except (IndexError, BadTrace):
        return size + 1, None
    end = offset + used + length
    if length == 0 or length > limit or end > size or (prefix and used != prefix):
        return end, None
    file.seek(offset + used)
    return end, file.read(length)


def _is_message(file: IO[bytes], offset: int, size: int, is_node: IsNode) -> bool:
    """Whether a node, or the end of the file, is at ``offset``."""
    if offset == size:
        return True
    message = _read_message(file, offset, size)[1]
    return message is not None and is_node(message)


_DURATION_UNIT = 1e-6
"""Seconds per unit of ``duration_micros``."""
_MAX_DURATION = 86_400_000_000
"""Microseconds of a day; a longer duration is damage."""
_NODE_TYPES = range(1, 8)  # METADATA_NODE to COMM_COLL_NODE
_NUMBER_FIELDS = (1, 3, 6, 7)  # id, type, start_time_micros, duration_micros
_MAX_FIELD = 1000
"""Largest field number of a node; later versions of the schema may add fields."""
_COMMUNICATION_TYPES = (5, 6, 7)  # COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE
_COPY_NAMES = ("Memcpy ", "CopyHostTo", "CopyDeviceTo")
_ZIGZAG = (15, 17)  # sint32_val, sint64_val
_SIGNED = (7, 9)  # int32_val, int64_val
COLLECTIVES = (
    "all-reduce",
    "reduce",
    "all-gather",
    "gather",
    "scatter",
    "broadcast",
    "all-to-all",
    "reduce-scatter",
    "reduce-scatter-block",
    "barrier",
)
"""Names of the values of ``CollectiveCommType``."""


@dataclass(frozen=True)
class ChakraTrace:
    """Measured sums of a Chakra trace."""

    path: Path
    version: str
    """Schema version."""
    nodes: int
    gpu_nodes: int
    seconds: Mapping[WorkKind, float]
    """GPU seconds by kind of work.  Overlap is not subtracted, because start times are optional in
    the format and public traces do not have them."""
    host_seconds: float
    """Seconds of the nodes that ran on the host."""
    moved_bytes: Mapping[str, float]
    """Bytes by collective."""
    flops: float
    """FLOP of the nodes that have the attribute ``num_ops``."""
    remarks: tuple[str, ...]
    """Damage of the file, a sentence each; empty: the file is sound."""


def read_chakra(path: Path) -> ChakraTrace:
    """Read a ``.et`` file; damaged nodes are skipped and counted in the remarks.

    Raises :class:`~nostall.core.errors.BadTrace` if no node can be read.
    """
    check_content(path, BadTrace)
    file = ChakraFile(path, _is_node)
    sums = _Sums()
    version, is_first = "unknown", True
    for message in file.messages():
        if is_first:
            version, is_first = _schema_version(message), False
            if not _is_node(message):
                continue
        sums.add(_parse_node(message))
    if not sums.nodes:
        cause = "; ".join(file.remarks) or "the file is empty"
        raise BadTrace(f"{path}: no Chakra nodes: {cause}; give a Chakra .et file")
    return ChakraTrace(
        path=path,
        version=version,
        nodes=sums.nodes,
        gpu_nodes=sums.gpu_nodes,
        seconds=dict(sums.seconds),
        host_seconds=sums.host_seconds,
        moved_bytes=dict(sums.moved_bytes),
        flops=sums.flops,
        remarks=file.remarks,
    )


def _schema_version(message: bytes) -> str:
    """The schema version in the metadata message, which is the first of a file."""
    try:
        for number, value in read_fields(message):
            if number == 1 and isinstance(value, bytes):
                return _printable(value)
            if number == 2 and isinstance(value, bytes):
                name, attribute = _parse_attribute(value)
                if name == "schema" and isinstance(attribute, bytes):
                    return _printable(attribute)
    except (BadTrace, IndexError, UnicodeDecodeError):
        pass
    return "unknown"


def _printable(text: bytes) -> str:
    decoded = text.decode(errors="replace")[:200]
    return "".join(char if char.isprintable() else "?" for char in decoded)


def _is_node(message: bytes) -> bool:
    """Whether the fields of a message are those of a node, so that no damage is taken for one."""
    try:
        fields = dict(read_fields(message))
        name, duration = fields.get(2), fields.get(7, 0)
        has_types = all(isinstance(fields.get(n, 0), int) for n in _NUMBER_FIELDS)
        if not has_types or fields.get(3) not in _NODE_TYPES or max(fields) > _MAX_FIELD:
            return False
        if not isinstance(name, bytes) or not name.decode().isprintable():
            return False
        for number, value in read_fields(message):
            if number == 10 and isinstance(value, bytes):
                _parse_attribute(value)
    except (BadTrace, IndexError, UnicodeDecodeError):
        return False
    return isinstance(duration, int) and duration <= _MAX_DURATION


def _parse_attribute(message: bytes) -> tuple[str, Value | float | None]:
    """(name, value) of an ``AttributeProto``."""
    name: str = ""
    value: Value | float | None = None
    for number, field_value in read_fields(message):
        if number == 1 and isinstance(field_value, bytes):
            name = field_value.decode()
        elif number >= 3:
            value = _attribute_number(number, field_value)
    return name, value


def _attribute_number(number: int, value: Value) -> Value | float:
    """The value of a field of ``AttributeProto`` from its raw bits."""
    if not isinstance(value, int):
        return value
    if number == 3:
        return float(struct.unpack("<d", value.to_bytes(8, "little"))[0])
    if number == 5 and value < 1 << 32:
        return float(struct.unpack("<f", value.to_bytes(4, "little"))[0])
    if number in _ZIGZAG:
        return (value >> 1) ^ -(value & 1)
    return value - (1 << 64) if number in _SIGNED and value >= 1 << 63 else value


@dataclass
class _Node:
    """The fields of a node that are summed."""

    name: str = ""
    type: int = 0
    duration: int = 0
    """Microseconds."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Attributes that are finite numbers."""


def _parse_node(message: bytes) -> _Node:
    node = _Node()
    for number, value in read_fields(message):
        if number == 2 and isinstance(value, bytes):
            node.name = _printable(value)
        elif number == 3 and isinstance(value, int):
            node.type = value
        elif number == 7 and isinstance(value, int):
            node.duration = value
        elif number == 10 and isinstance(value, bytes):
            name, attribute = _parse_attribute(value)
            if isinstance(attribute, int | float) and math.isfinite(attribute):
                node.numbers[name] = attribute
    return node


class _Sums:
    """Sums over the nodes of a trace."""

    def __init__(self) -> None:
        self.nodes = self.gpu_nodes = 0
        self.seconds: dict[WorkKind, float] = dict.fromkeys(WorkKind, 0.0)
        self.moved_bytes: dict[str, float] = {}
        self.host_seconds = self.flops = 0.0

    def add(self, node: _Node) -> None:
        numbers = node.numbers
        self.nodes += 1
        self.flops += max(numbers.get("num_ops", 0), 0)
        if numbers.get("is_cpu_op", 0):
            self.host_seconds += node.duration * _DURATION_UNIT
            return
        self.gpu_nodes += 1
        kind = _node_kind(node)
        self.seconds[kind] += node.duration * _DURATION_UNIT
        if numbers.get("comm_size", 0) > 0:
            index = int(numbers.get("comm_type", -1))
            is_collective = 0 <= index < len(COLLECTIVES)
            collective = COLLECTIVES[index] if is_collective else "point-to-point"
            moved_bytes = self.moved_bytes.get(collective, 0.0) + numbers["comm_size"]
            self.moved_bytes[collective] = moved_bytes


def _node_kind(node: _Node) -> WorkKind:
    if node.type in _COMMUNICATION_TYPES:
        return WorkKind.COMMUNICATION
    if node.name.startswith(_COPY_NAMES):
        return WorkKind.INPUT if is_host_to_device(node.name) else WorkKind.COPY
    return kernel_work_kind(node.name)
