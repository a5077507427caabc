"""Reading of Chakra traces that are built byte by byte in the protobuf wire format."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.workload.traces.chakra.reader import read_chakra, read_varint
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
    node("Memcpy HtoD (Pinned -> Device)", 4, 40),
    node("ncclKernel_AllReduce", 7, 50, comm_type=0, comm_size=4096),
    node("ncclKernel_Broadcast", 7, 25, comm_type=5, comm_size=1024),
]


def stream(*messages: bytes) -> bytes:
    return b"".join(varint(len(m)) + m for m in messages)


def test_sums_by_kind_of_work(tmp_path: Path) -> None:
    path = tmp_path / "t.et"
    path.write_bytes(stream(METADATA, *NODES))
    chakra = read_chakra(path)
    assert (chakra.version, chakra.nodes, chakra.gpu_nodes, chakra.remarks) == ("1.0.1", 6, 5, ())
    assert chakra.seconds[WorkKind.COMPUTE] == pytest.approx(300e-6)
    assert chakra.seconds[WorkKind.MEMORY] == pytest.approx(200e-6)
    assert chakra.seconds[WorkKind.INPUT] == pytest.approx(40e-6)
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
        assert (chakra.remarks == ()) == (length in ends)


def test_a_changed_byte_costs_at_most_one_node(tmp_path: Path) -> None:
    """Also a byte of a length, behind which the next node is found."""
    path, sound = tmp_path / "t.et", stream(METADATA, *NODES * 3)
    rng = random.Random(1)
    for position in range(len(stream(METADATA)), len(sound), 5):
        damaged = bytearray(sound)
        damaged[position] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        chakra = read_chakra(path)
        assert chakra.nodes >= 3 * len(NODES) - 1, position
        assert chakra.nodes == 3 * len(NODES) or chakra.remarks, position
        assert 0 <= chakra.host_seconds <= 86_400 + 1


def test_bytes_cut_out_or_inserted_cost_the_nodes_that_they_touch(tmp_path: Path) -> None:
    path, sound = tmp_path / "t.et", stream(METADATA, *NODES * 3)
    for position in range(len(stream(METADATA)), len(sound) - 9, 7):
        for damaged in (
            sound[:position] + sound[position + 9 :],
            sound[:position] + b"\xff" * 9 + sound[position:],
        ):
            path.write_bytes(damaged)
            chakra = read_chakra(path)
            assert chakra.nodes >= 3 * len(NODES) - 2, position
            assert chakra.remarks, position


@pytest.mark.parametrize("noise", [b"\x08" * 9, b"\x09\x08\x01\x12\x02a", b"\0", bytes(range(256))])
def test_noise_is_searched_in_linear_time(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "t.et"
    path.write_bytes(stream(METADATA, NODES[0]) + noise * (300_000 // len(noise)))
    start = time.process_time()
    assert read_chakra(path).nodes == 1
    assert time.process_time() - start < 3


def test_attributes_of_all_number_types(tmp_path: Path) -> None:
    double, negative = struct.pack("<d", 512.0), (1 << 64) - 5
    gemm = field(2, "gemm") + field(3, 4) + field(7, 10)
    attributes = (
        field(10, field(1, "num_ops") + varint(3 << 3 | 1) + double),
        field(10, field(1, "num_ops") + varint(5 << 3 | 5) + struct.pack("<f", 8.0)),
        field(10, field(1, "num_ops") + field(17, 14)),
        field(10, field(1, "num_ops") + field(9, negative)),
        field(10, field(1, "num_ops") + varint(3 << 3 | 1) + struct.pack("<d", float("nan"))),
    )
    path = tmp_path / "t.et"
    path.write_bytes(stream(METADATA, *(gemm + attribute for attribute in attributes)))
    assert read_chakra(path).flops == 512 + 8 + 7


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
