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
