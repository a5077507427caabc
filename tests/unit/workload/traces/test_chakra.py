"""Chakra traces, built byte by byte as the protobuf wire format says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.workload.traces.chakra import read_chakra
from nostall.workload.traces.kinds import Kind
from nostall.workload.traces.protobuf import varint


def number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(at: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return number(at << 3) + number(value)
    data = value.encode() if isinstance(value, str) else value
    return number(at << 3 | 2) + number(len(data)) + data


def attribute(name: str, at: int, value: int | str) -> bytes:
    return field(10, field(1, name) + field(at, value))


def node(name: str, type_: int, microseconds: int, cpu: bool = False, **numbers: int) -> bytes:
    own = field(1, 7) + field(2, name) + field(3, type_) + field(4, b"\x01\x02")
    own += field(7, microseconds) + attribute("is_cpu_op", 27, int(cpu))
    return own + b"".join(attribute(k, 9, v) for k, v in numbers.items())


META = field(2, field(1, "schema") + field(29, "1.0.1"))
NODES = [
    node("aten::mm", 4, 100, cpu=True),
    node("ampere_sgemm_128x64_nn", 4, 300, num_ops=1000),
    node("vectorized_elementwise_kernel", 4, 200),
    node("ncclKernel_AllReduce", 7, 50, comm_type=0, comm_size=4096),
    node("ncclKernel_Broadcast", 7, 25, comm_type=5, comm_size=1024),
]


def stream(*messages: bytes) -> bytes:
    return b"".join(number(len(m)) + m for m in messages)


def test_sums_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "t.et"
    path.write_bytes(stream(META, *NODES))
    found = read_chakra(path)
    assert (found.version, found.nodes, found.gpu_nodes, found.damage) == ("1.0.1", 5, 4, None)
    assert found.seconds[Kind.COMPUTE] == pytest.approx(300e-6)
    assert found.seconds[Kind.MEMORY] == pytest.approx(200e-6)
    assert found.seconds[Kind.COMMUNICATION] == pytest.approx(75e-6)
    assert found.host_seconds == pytest.approx(100e-6)
    assert found.moved == {"all-reduce": 4096, "broadcast": 1024}
    assert found.flops == 1000


def test_truncation_at_every_byte_keeps_the_whole_nodes_before(tmp_path: Path) -> None:
    path, whole = tmp_path / "t.et", stream(META, *NODES)
    ends = [len(stream(META, *NODES[:n])) for n in range(len(NODES) + 1)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        complete = sum(end <= length for end in ends[1:])
        if complete == 0:
            with pytest.raises(BadTrace, match=r"t\.et"):
                read_chakra(path)
            continue
        found = read_chakra(path)
        assert found.nodes == complete
        assert (found.damage is None) == (length in ends)


@given(st.binary(max_size=300))
def test_no_bytes_crash_it(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("c") / "t.et"
    path.write_bytes(data)
    try:
        assert read_chakra(path).nodes > 0
    except BadTrace as error:
        assert str(path) in str(error)


@given(st.integers(0, 2**63 - 1))
def test_varints(value) -> None:
    assert varint(number(value), 0) == (value, len(number(value)))
