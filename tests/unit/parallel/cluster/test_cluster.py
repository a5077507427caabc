"""Clusters: example files, paths of GPUs without a link, all-reduces, routes, rejected input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nostall.parallel.cluster import load_cluster, parse_cluster
from nostall.parallel.cluster.route import route
from nostall.parallel.errors import BadCluster
from tests.unit.parallel.cases import servers

EXAMPLES = sorted((Path(__file__).parents[4] / "examples" / "clusters").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_files_load(path: Path) -> None:
    cluster = load_cluster(path)
    count, _, gpus = path.stem.rpartition("-")[2].partition("x")
    assert len(cluster) == int(count) * int(gpus or 1)


def test_pairs_without_a_link_get_the_widest_path() -> None:
    cluster = parse_cluster(
        'name = "row"\n[[servers]]\ngpus = 3\nmemory_gib = 1\n'
        "[[links]]\ngpus = [0, 1]\nbandwidth_gbytes = 5\nlatency_us = 1\n"
        "[[links]]\ngpus = [1, 2]\nbandwidth_gbytes = 2\nlatency_us = 3\n"
    )
    assert cluster.bandwidth[0, 2] == 2e9
    assert cluster.latency[0, 2] == pytest.approx(4e-6)
    assert not cluster.is_symmetric
    assert servers(2, 2, inside=5, between=1).is_symmetric


def test_ring_all_reduce_sends_each_byte_nearly_twice() -> None:
    cluster = servers(1, 4, inside=10)
    assert cluster.allreduce_s(range(4), 8e9) == pytest.approx(2 * 3 / 4 * 0.8)
    assert cluster.allreduce_s([2], 8e9) == 0
    assert servers(2, 2, inside=10, between=1).allreduce_s(range(4), 8e9) == pytest.approx(12)


def test_an_all_reduce_has_the_latency_and_the_bandwidth_of_its_slowest_link() -> None:
    """Its links may be slower or faster than those of single messages."""
    cluster = parse_cluster(
        'name = "ring"\n[[servers]]\ngpus = 4\nmemory_gib = 1\n'
        "link = { bandwidth_gbytes = 1, allreduce_gbytes = 8, latency_us = 5 }\n"
        "[[links]]\ngpus = [0, 3]\nbandwidth_gbytes = 9\nallreduce_gbytes = 4\nlatency_us = 7\n"
    )
    steps = 2 * 3
    assert cluster.allreduce_s(range(4), 8e9) == pytest.approx(steps * (7e-6 + 2e9 / 4e9))
    assert cluster.allreduce_s([0, 1, 2], 3e9) == pytest.approx(4 * (5e-6 + 1e9 / 8e9))
    assert cluster.allreduce_s(range(4), 0) == 0


def test_a_route_is_as_slow_as_the_gpu_that_sends_or_receives_most() -> None:
    """The slices of one GPU follow each other; those of several GPUs are sent at once."""
    cluster = servers(1, 6, inside=1)
    assert route(cluster, (0,), (1, 2)).s_per_byte == pytest.approx(1e-9)  # GPU 0 sends two halves
    assert route(cluster, (0, 1), (2,)).s_per_byte == pytest.approx(1e-9)  # GPU 2 receives them
    assert route(cluster, (0, 1), (2, 3)).s_per_byte == pytest.approx(0.5e-9)
    # Of thirds and halves: the middle GPU sends two sixths, the receivers get three sixths each.
    assert route(cluster, (0, 1, 2), (3, 4)).s_per_byte == pytest.approx(0.5e-9)
    # GPU 1 keeps its half, and GPU 0 sends the other half.
    assert route(cluster, (0, 1), (2, 1)).s_per_byte == pytest.approx(0.5e-9)


def test_a_route_has_the_latency_of_its_slowest_link_in_use() -> None:
    cluster = parse_cluster(
        'name = "far"\n[[servers]]\ngpus = 4\nmemory_gib = 1\n'
        "link = { bandwidth_gbytes = 1, latency_us = 5 }\n"
        "[[links]]\ngpus = [0, 3]\nbandwidth_gbytes = 1\nlatency_us = 90\n"
        "[[links]]\ngpus = [0, 2]\nbandwidth_gbytes = 4\nlatency_us = 9\n"
    )
    used = route(cluster, (0, 1), (2, 3))  # 0 sends to 2, and 1 to 3
    assert used.latency_s == pytest.approx(9e-6)
    assert used.s_per_byte == pytest.approx(0.5e-9)  # half over the link of 1 GB/s
    assert route(cluster, (0,), (2,)).s_per_byte == pytest.approx(0.25e-9)


def test_slices_within_a_server_do_not_use_its_port() -> None:
    cluster = servers(2, 4, inside=100, between=1)
    path = route(cluster, (0, 1, 2, 3, 4, 5), (6, 7))
    # Four of six senders are on the first server, and all of their slices cross.
    assert dict(path.sender_ports) == {0: pytest.approx(4 / 6 * 1e-9)}
    assert dict(path.receiver_ports) == {1: pytest.approx(4 / 6 * 1e-9)}
    assert path.s_per_byte == pytest.approx(4 / 6 * 1e-9)
    assert route(cluster, (0, 1), (0, 1)).s_per_byte == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1", "name"),
        ("name = ", "is not TOML"),
        ('name = "x"', "servers"),
        ('name = "x"\nservers = []', "servers"),
        ('name = "x"\n[[servers]]\ngpus = 2\nmemory_gib = 1', "GPU 0 cannot reach GPU 1"),
        ('name = "x"\n[[servers]]\ngpus = 0\nmemory_gib = 1', "gpus"),
        ('name = "x"\n[[servers]]\ngpus = 1\nmemory_gib = -1', "memory_gib"),
        ('name = "x"\n[[servers]]\ngpus = 1\nmemory_gib = inf', "memory_gib"),
        (
            'name = "x"\n[[servers]]\ngpus = 1\nmemory_gib = 1\n'
            "[[links]]\ngpus = [0, 0]\nbandwidth_gbytes = 1",
            "two different GPUs",
        ),
        (
            'name = "x"\n[[servers]]\ngpus = 2\nmemory_gib = 1\nlink = { bandwidth_gbytes = 0 }',
            "bandwidth_gbytes",
        ),
        *(
            (
                'name = "x"\n[[servers]]\ngpus = 2\nmemory_gib = 1\n'
                f"link = {{ bandwidth_gbytes = 1, {key} = {value} }}",
                key,
            )
            for key, value in (
                ("allreduce_gbytes", "1e-320"),
                ("allreduce_gbytes", "1e300"),
                ("latency_us", "1e300"),
            )
        ),
        ('name = "x"\nduplex = "both"\n[[servers]]\ngpus = 1\nmemory_gib = 1', "duplex"),
    ],
)
def test_invalid_clusters_are_rejected_with_the_field(text: str, message: str) -> None:
    with pytest.raises(BadCluster, match=message):
        parse_cluster(text)


def test_a_missing_server_is_reported_rather_than_the_matrices() -> None:
    cluster = load_cluster(EXAMPLES[0])
    with pytest.raises(BadCluster, match="give one server for each GPU"):
        replace(cluster, server=cluster.server[:-1])


def test_many_gpus_need_direct_links() -> None:
    text = 'name = "x"\n[[servers]]\ncount = 2\ngpus = 300\nmemory_gib = 1\n'
    linked = text + "link = { bandwidth_gbytes = 1 }\n"
    with pytest.raises(BadCluster, match="has 600 GPUs, and not every pair of them is linked"):
        parse_cluster(linked + "[[links]]\ngpus = [0, 300]\nbandwidth_gbytes = 1\n")
    assert len(parse_cluster(linked + "[network]\nbandwidth_gbytes = 1\n")) == 600


def test_interchangeable_gpus() -> None:
    """GPU 3 has a link of its own; the other GPUs of a server are interchangeable."""
    text = 'name = "x"\n[[servers]]\ncount = 2\ngpus = 3\nmemory_gib = 1\n'
    text += "link = { bandwidth_gbytes = 9 }\n[network]\nbandwidth_gbytes = 1\n"
    assert parse_cluster(text).representatives == (0, 0, 0, 3, 3, 3)
    text += "[[links]]\ngpus = [0, 3]\nbandwidth_gbytes = 2\n"
    assert parse_cluster(text).representatives == (0, 1, 1, 3, 4, 4)
