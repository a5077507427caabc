"""Time of collectives on a mesh, against values computed by hand."""

from __future__ import annotations

import pytest

from nostall.parallel.cluster import parse_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, default_shapes

TWO_BY_FOUR = parse_cluster(
    'name = "2 x 4"\n[[servers]]\ncount = 2\ngpus = 4\nmemory_gib = 1\n'
    "link = { bandwidth_gbytes = 100, latency_us = 2 }\n"
    "[network]\nbandwidth_gbytes = 10\nlatency_us = 5\n"
)


def test_collectives_inside_a_server() -> None:
    mesh = ClusterMesh(TWO_BY_FOUR, (2, 4))
    assert mesh.groups(1) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # 3 steps of a quarter of 4 GB at 100 GB/s
    assert mesh.seconds("all-gather", 1, 4e9) == pytest.approx(3 * (2e-6 + 1e9 / 100e9))
    assert mesh.seconds("reduce-scatter", 1, 4e9) == pytest.approx(3 * (2e-6 + 1e9 / 100e9))
    assert mesh.seconds("all-reduce", 1, 4e9) == pytest.approx(6 * (2e-6 + 1e9 / 100e9))
    assert mesh.seconds("all-to-all", 1, 4e9) == pytest.approx(3 * (2e-6 + 1e9 / 100e9))


def test_four_rings_between_two_servers_share_their_ports() -> None:
    mesh = ClusterMesh(TWO_BY_FOUR, (2, 4))
    assert mesh.groups(0) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    # One step of half the bytes; 4 rings send through a port of 10 GB/s at once.
    assert mesh.seconds("all-gather", 0, 1e9) == pytest.approx(5e-6 + 4 * 0.5e9 / 10e9)
    # Each of 4 GPUs sends half of its tensor through the port.
    assert mesh.seconds("all-to-all", 0, 1e9) == pytest.approx(5e-6 + 4 * 0.5e9 / 10e9)


def test_one_ring_over_all_gpus_crosses_a_port_once() -> None:
    mesh = ClusterMesh(TWO_BY_FOUR, (8,))
    assert mesh.seconds("all-reduce", 0, 8e9) == pytest.approx(14 * (5e-6 + 1e9 / 10e9))
    assert mesh.seconds("all-reduce", 0, 8e9) == pytest.approx(
        TWO_BY_FOUR.allreduce_s(range(8), 8e9)
    )
    # 4 GPUs of a server send half of their 8 GB, in parts for 4 others, through the port.
    assert mesh.seconds("all-to-all", 0, 8e9) == pytest.approx(7 * 5e-6 + 16e9 / 10e9)


def test_a_mesh_has_one_device_for_each_gpu() -> None:
    assert default_shapes(TWO_BY_FOUR) == [(8,), (2, 4)]
    for shape in ((4,), (2, 2, 2), (0, 8)):
        with pytest.raises(BadPlan, match="product is 8"):
            ClusterMesh(TWO_BY_FOUR, shape)
