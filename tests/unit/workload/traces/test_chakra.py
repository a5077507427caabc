"""Reading of Chakra traces that are built byte by byte in the protobuf wire format."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.workload.traces.chakra import read_chakra
from nostall.workload.traces.protobuf import read_varint
from nostall.workload.traces.work_kinds import WorkKind


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def attribute(name: str, number: int, value: int | str) -> bytes:
    return field(10, field(1, name) + field(number, value))


def node(name: str, type_: int, microseconds: int, cpu: bool = False, **numbers: int) -> bytes:
    fields = field(1, 7) + field(2, name) + field(3, type_) + field(4, b"\x01\x02")
    fields += field(7, microseconds) + attribute("is_cpu_op", 27, int(cpu))
    return fields + b"".join(attribute(k, 9, v) for k, v in numbers.items())


METADATA = field(2, field(1, "schema") + field(29, "1.0.1"))
NODES = [
    node("aten::mm", 4, 100, cpu=True),
    node("ampere_sgemm_128x64_nn", 4, 300, num_ops=1000),
    node("vectorized_elementwise_kernel", 4, 200),
    node("ncclKernel_AllReduce", 7, 50, comm_type=0, comm_size=4096),
    node("ncclKernel_Broadcast", 7, 25, comm_type=5, comm_size=1024),
]


def stream(*messages: bytes) -> bytes:
    return b"".join(varint(len(m)) + m for m in messages)


def test_sums_by_kind_of_work(tmp_path: Path) -> None:
    path = tmp_path / "t.et"
    path.write_bytes(stream(METADATA, *NODES))
    chakra = read_chakra(path)
    assert (chakra.version, chakra.nodes, chakra.gpu_nodes, chakra.damage) == ("1.0.1", 5, 4, None)
    assert chakra.seconds[WorkKind.COMPUTE] == pytest.approx(300e-6)
    assert chakra.seconds[WorkKind.MEMORY] == pytest.approx(200e-6)
    assert chakra.seconds[WorkKind.COMMUNICATION] == pytest.approx(75e-6)
    assert chakra.host_seconds == pytest.approx(100e-6)
    assert chakra.moved_bytes == {"all-reduce": 4096, "broadcast": 1024}
    assert chakra.flops == 1000


def test_the_complete_nodes_of_a_truncated_file_are_read(tmp_path: Path) -> None:
    path, complete_file = tmp_path / "t.et", stream(METADATA, *NODES)
    ends = [len(stream(METADATA, *NODES[:n])) for n in range(len(NODES) + 1)]
    for length in range(len(complete_file)):
        path.write_bytes(complete_file[:length])
        complete_nodes = sum(end <= length for end in ends[1:])
        if complete_nodes == 0:
            with pytest.raises(BadTrace, match=r"t\.et"):
                read_chakra(path)
            continue
        chakra = read_chakra(path)
        assert chakra.nodes == complete_nodes
        assert (chakra.damage is None) == (length in ends)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_a_trace_or_an_error_with_the_path(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("c") / "t.et"
    path.write_bytes(data)
    try:
        assert read_chakra(path).nodes > 0
    except BadTrace as error:
        assert str(path) in str(error)


@given(st.integers(0, 2**63 - 1))
def test_varints(value) -> None:
    assert read_varint(varint(value), 0) == (value, len(varint(value)))
