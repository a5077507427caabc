"""Chakra execution traces (mlcommons/chakra, et_def.proto): streamed, summed by kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nostall.core.errors import BadTrace
from nostall.workload.traces.kinds import Kind, kind_of_name
from nostall.workload.traces.protobuf import Value, fields, varint

MOST_NODE = 64 << 20
"""Bytes of the longest node; a larger length says that the file is something else."""

_SECONDS = 1e-6
_COMMUNICATION = (5, 6, 7)  # send, receive, collective
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


@dataclass(frozen=True)
class ChakraTrace:
    """What a Chakra trace measured, summed.

    ``seconds``: of GPU nodes by :class:`Kind`, without regard to overlap: the format's start times
    are optional and the public traces lack them.  ``moved``: bytes by collective.  ``flops``: where
    the nodes give ``num_ops``.  ``host_seconds``: of nodes that ran on the host.
    """

    path: Path
    version: str
    nodes: int
    gpu_nodes: int
    seconds: Mapping[Kind, float]
    host_seconds: float
    moved: Mapping[str, float]
    flops: float
    damage: str | None


def read_chakra(path: Path) -> ChakraTrace:
    """Read a ``.et`` file; what stands behind damage is left out and ``damage`` says where.

    Raises :class:`~nostall.core.errors.BadTrace` where not a single node can be read.
    """
    total = _Sums()
    version, damage, first = "unknown", None, True
    try:
        with path.open("rb") as file:
            for offset, message in _messages(file):
                try:
                    if first:
                        version = _version(message)
                        first = False
                    else:
                        total.add(message)
                except (BadTrace, IndexError, UnicodeDecodeError) as error:
                    damage = f"the node at byte {offset} cannot be read ({error})"
                    break
    except BadTrace as error:
        damage = str(error)
    except OSError as error:
        raise BadTrace(f"cannot read {path}: {error.strerror or error}") from error
    if not total.nodes:
        raise BadTrace(
            f"{path}: no Chakra nodes: {damage or 'the file is empty'}; give an .et file"
        )
    return ChakraTrace(
        path=path,
        version=version,
        nodes=total.nodes,
        gpu_nodes=total.gpu_nodes,
        seconds=dict(total.seconds),
        host_seconds=total.host_seconds,
        moved=dict(total.moved),
        flops=total.flops,
        damage=damage,
    )


def _messages(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset, message) of a stream of length-delimited messages."""
    offset = 0
    while head := file.read(10):
        try:
            size, behind = varint(head, 0)
        except IndexError as error:
            raise BadTrace(f"the file stops inside a length at byte {offset}") from error
        if size > MOST_NODE:
            raise BadTrace(f"the length {size} at byte {offset} is beyond {MOST_NODE}")
        file.seek(offset + behind)
        message = file.read(size)
        if len(message) < size:
            raise BadTrace(f"the file stops at byte {offset + behind + len(message)}")
        yield offset, message
        offset += behind + size


def _version(message: bytes) -> str:
    """The schema version of the metadata that every file begins with."""
    for number, value in fields(message):
        if number == 1 and isinstance(value, bytes):
            return value.decode()
        if number == 2 and isinstance(value, bytes):
            name, found = _attribute(value)
            if name == "schema" and isinstance(found, bytes):
                return found.decode()
    return "unknown"


def _attribute(message: bytes) -> tuple[str, Value | None]:
    name, found = "", None
    for number, value in fields(message):
        if number == 1 and isinstance(value, bytes):
            name = value.decode()
        elif number >= 3:
            found = value
    return name, found


class _Sums:
    """Sums over nodes."""

    def __init__(self) -> None:
        self.nodes = self.gpu_nodes = 0
        self.seconds: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
        self.moved: dict[str, float] = {}
        self.host_seconds = self.flops = 0.0

    def add(self, message: bytes) -> None:
        name, type_, length = "", 0, 0
        numbers: dict[str, int] = {}
        for field, value in fields(message):
            if field == 2 and isinstance(value, bytes):
                name = value.decode()
            elif field == 3 and isinstance(value, int):
                type_ = value
            elif field == 7 and isinstance(value, int):
                length = value
            elif field == 10 and isinstance(value, bytes):
                key, found = _attribute(value)
                if isinstance(found, int):
                    numbers[key] = found
        self.nodes += 1
        self.flops += numbers.get("num_ops", 0)
        if numbers.get("is_cpu_op", 0):
            self.host_seconds += length * _SECONDS
            return
        self.gpu_nodes += 1
        kind = Kind.COMMUNICATION if type_ in _COMMUNICATION else kind_of_name(name)
        self.seconds[kind] += length * _SECONDS
        if "comm_size" in numbers:
            at = numbers.get("comm_type", -1)
            collective = COLLECTIVES[at] if 0 <= at < len(COLLECTIVES) else "point-to-point"
            self.moved[collective] = self.moved.get(collective, 0.0) + numbers["comm_size"]
