"""Reader for Chakra execution traces (mlcommons/chakra, et_def.proto): sums by kind of work."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.core.files.pointers import check_content
from nostall.workload.traces.chakra.messages import ChakraFile
from nostall.workload.traces.chakra.protobuf import Value, read_fields
from nostall.workload.traces.work_kinds import WorkKind, is_host_to_device, kernel_work_kind

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
