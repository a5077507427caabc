"""Time of collectives on a mesh, against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nostall.parallel.cluster import parse_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, default_shapes
from nostall.parallel.sharding.placements import Collective

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


@pytest.mark.parametrize(
    ("kind", "shape", "mesh_dim", "full_bytes"),
    [
        # Bytes that the port of a server sends, and receives, of tensors of 8 GB.
        ("all-gather", (2, 4), 0, 4 * 4e9),
        ("all-to-all", (2, 4), 0, 4 * 4e9),
        ("all-to-all", (8,), 0, 4 * 4 * 1e9),
        ("all-gather", (8,), 0, 7 * 1e9),
        ("all-reduce", (8,), 0, 14 * 1e9),
    ],
)
def test_half_duplex_ports_send_and_receive_one_after_the_other(
    kind: Collective, shape: tuple[int, ...], mesh_dim: int, full_bytes: float
) -> None:
    half_duplex = ClusterMesh(replace(TWO_BY_FOUR, duplex="half"), shape)
    full_duplex = ClusterMesh(TWO_BY_FOUR, shape)
    starts = [mesh.seconds(kind, mesh_dim, 0) for mesh in (half_duplex, full_duplex)]
    assert starts[0] == starts[1] > 0
    sent = [mesh.seconds(kind, mesh_dim, 8e9) - starts[0] for mesh in (half_duplex, full_duplex)]
    assert sent == pytest.approx([2 * full_bytes / 10e9, full_bytes / 10e9])


def test_an_all_to_all_is_as_slow_as_the_gpu_with_the_slowest_links() -> None:
    """GPU 0 sends a quarter of 4 GB to each other GPU, over links of 1, 2 and 4 GB/s."""
    links = "".join(
        f"[[links]]\ngpus = [0, {gpu}]\nbandwidth_gbytes = {speed}\nlatency_us = {speed}\n"
        for gpu, speed in ((1, 1), (2, 2), (3, 4))
    )
    cluster = parse_cluster(
        'name = "star"\n[[servers]]\ngpus = 4\nmemory_gib = 1\n'
        f"link = {{ bandwidth_gbytes = 100, latency_us = 1 }}\n{links}"
    )
    mesh = ClusterMesh(cluster, (4,))
    assert mesh.seconds("all-to-all", 0, 4e9) == pytest.approx(3 * 4e-6 + 1 + 0.5 + 0.25)


def test_a_mesh_has_one_device_for_each_gpu() -> None:
    assert default_shapes(TWO_BY_FOUR) == [(8,), (2, 4)]
    for shape in ((4,), (2, 2, 2), (0, 8)):
        with pytest.raises(BadPlan, match="product is 8"):
            ClusterMesh(TWO_BY_FOUR, shape)
