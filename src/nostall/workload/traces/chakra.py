"""Reader for Chakra execution traces (mlcommons/chakra, et_def.proto): sums by kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from nostall.core.errors import BadTrace
from nostall.workload.traces.protobuf import Value, read_fields, read_varint
from nostall.workload.traces.work_kinds import WorkKind, kernel_work_kind

MAX_NODE = 64 << 20
"""Size limit of a node in bytes; a file with a larger length is not a Chakra trace."""

_DURATION_UNIT = 1e-6
"""Seconds per unit of ``duration_micros``."""
_COMMUNICATION_TYPES = (5, 6, 7)  # COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE
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
    damage: str | None
    """Why reading stopped before the end of the file; None: the file is complete."""


def read_chakra(path: Path) -> ChakraTrace:
    """Read a ``.et`` file; nodes after the first damaged one are skipped.

    Raises :class:`~nostall.core.errors.BadTrace` if no node can be read.
    """
    sums = _Sums()
    version, damage, is_first = "unknown", None, True
    try:
        with path.open("rb") as file:
            for offset, message in _messages(file):
                try:
                    if is_first:
                        version = _schema_version(message)
                        is_first = False
                    else:
                        sums.add(_parse_node(message))
                except (BadTrace, IndexError, UnicodeDecodeError) as error:
                    damage = f"the node at byte {offset} cannot be read ({error})"
                    break
    except BadTrace as error:
        damage = str(error)
    except OSError as error:
        raise BadTrace(f"cannot read {path}: {error.strerror or error}") from error
    if not sums.nodes:
        raise BadTrace(
            f"{path}: no Chakra nodes: {damage or 'the file is empty'}; give a Chakra .et file"
        )
    return ChakraTrace(
        path=path,
        version=version,
        nodes=sums.nodes,
        gpu_nodes=sums.gpu_nodes,
        seconds=dict(sums.seconds),
        host_seconds=sums.host_seconds,
        moved_bytes=dict(sums.moved_bytes),
        flops=sums.flops,
        damage=damage,
    )


def _messages(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset, message) of each length-delimited message of a file."""
    offset = 0
    while prefix := file.read(10):
        try:
            size, prefix_size = read_varint(prefix, 0)
        except IndexError as error:
            raise BadTrace(f"the file stops inside a length at byte {offset}") from error
        if size > MAX_NODE:
            raise BadTrace(f"the length {size} at byte {offset} is greater than {MAX_NODE}")
        file.seek(offset + prefix_size)
        message = file.read(size)
        if len(message) < size:
            raise BadTrace(f"the file stops at byte {offset + prefix_size + len(message)}")
        yield offset, message
        offset += prefix_size + size


def _schema_version(message: bytes) -> str:
    """The schema version in the metadata message, which is the first of a file."""
    for number, value in read_fields(message):
        if number == 1 and isinstance(value, bytes):
            return value.decode()
        if number == 2 and isinstance(value, bytes):
            name, attribute = _parse_attribute(value)
            if name == "schema" and isinstance(attribute, bytes):
                return attribute.decode()
    return "unknown"


def _parse_attribute(message: bytes) -> tuple[str, Value | None]:
    """(name, value) of an ``AttributeProto``."""
    name, value = "", None
    for number, field_value in read_fields(message):
        if number == 1 and isinstance(field_value, bytes):
            name = field_value.decode()
        elif number >= 3:
            value = field_value
    return name, value


@dataclass
class _Node:
    """The fields of a node that are summed."""

    name: str = ""
    type: int = 0
    duration: int = 0
    """Microseconds."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Integer attributes."""


def _parse_node(message: bytes) -> _Node:
    node = _Node()
    for number, value in read_fields(message):
        if number == 2 and isinstance(value, bytes):
            node.name = value.decode()
        elif number == 3 and isinstance(value, int):
            node.type = value
        elif number == 7 and isinstance(value, int):
            node.duration = value
        elif number == 10 and isinstance(value, bytes):
            name, attribute = _parse_attribute(value)
            if isinstance(attribute, int):
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
        self.flops += numbers.get("num_ops", 0)
        if numbers.get("is_cpu_op", 0):
            self.host_seconds += node.duration * _DURATION_UNIT
            return
        self.gpu_nodes += 1
        is_communication = node.type in _COMMUNICATION_TYPES
        kind = WorkKind.COMMUNICATION if is_communication else kernel_work_kind(node.name)
        self.seconds[kind] += node.duration * _DURATION_UNIT
        if "comm_size" in numbers:
            index = numbers.get("comm_type", -1)
            is_collective = 0 <= index < len(COLLECTIVES)
            collective = COLLECTIVES[index] if is_collective else "point-to-point"
            moved_bytes = self.moved_bytes.get(collective, 0.0) + numbers["comm_size"]
            self.moved_bytes[collective] = moved_bytes
