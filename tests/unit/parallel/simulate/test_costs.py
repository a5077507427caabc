"""Costs of boundaries and all-reduces: the seconds, and the ports and channels they occupy."""

from __future__ import annotations

from math import inf

import pytest

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.profile.layers import Layer, Profile, Tensor
from nostall.parallel.simulate import costs, simulated_s
from nostall.parallel.simulate.costs import Transfer, exposed_allreduce_s
from tests.unit.parallel.cases import profile, servers, straight

# Two servers have the ports 0 and 2 (sending), 1 and 3 (receiving); the boundary's channels are 4
# (forward) and 5 (backward).
TWO_STAGES = straight([1, 2])


def _two_servers(duplex: str) -> Workload:
    """Two GPUs on two servers at 1 GB/s, which send 2 GB forward and back per micro-batch."""
    work = profile(2, boundary=2e9, parameters=1e9)
    return Workload(work, servers(2, 1, between=1, duplex=duplex), 4)


def test_full_duplex_directions_share_neither_channel_nor_port() -> None:
    planned = costs(_two_servers("full"), TWO_STAGES)
    (forward,), (backward,) = planned.forward_transfers, planned.backward_transfers
    assert dict(forward.loads) == {4: 2.0, 0: 2.0, 3: 2.0}
    assert dict(backward.loads) == {5: 2.0, 2: 2.0, 1: 2.0}
    assert (forward.seconds, backward.seconds, planned.resources) == (2.0, 2.0, 6)


@pytest.mark.parametrize("duplex", ["full", "half"])
def test_boundaries_of_a_server_share_no_channel(duplex: str) -> None:
    """Each boundary has a channel of its own; with full duplex, each direction has one."""
    work = Workload(profile(5, boundary=2e9), servers(1, 5, inside=1, duplex=duplex), 4)
    planned = costs(work, straight([1, 2, 3, 4, 5]))
    channels = []
    for forward, backward in zip(
        planned.forward_transfers, planned.backward_transfers, strict=True
    ):
        there, back = ({r for r, _ in transfer.loads} for transfer in (forward, backward))
        assert there == back if duplex == "half" else not there & back
        channels += sorted(there | back)
    assert len(set(channels)) == len(channels) == (4 if duplex == "half" else 8)
    assert max(channels) < planned.resources


def test_half_duplex_directions_share_the_channel_and_both_ports() -> None:
    planned = costs(_two_servers("half"), TWO_STAGES)
    (forward,), (backward,) = planned.forward_transfers, planned.backward_transfers
    assert dict(forward.loads) == dict(backward.loads) == {4: 2.0, 0: 2.0, 2: 2.0}


def test_only_tensors_with_a_gradient_are_sent_back() -> None:
    """Forward 2 GB over the boundary, of which 0.5 GB have a gradient."""
    layers = (Layer("a", 1, 2), Layer("b", 1, 2))
    tensors = (Tensor(0, 1, 1.5e9, gradient=False), Tensor(0, 1, 0.5e9))
    work = Workload(Profile("ids", layers, tensors, 1), servers(2, 1, between=1), 4)
    planned = costs(work, TWO_STAGES)
    assert planned.forward_transfers[0].seconds == pytest.approx(2.0)
    assert planned.backward_transfers[0].seconds == pytest.approx(0.5)
    none = Profile("ids", layers, (Tensor(0, 1, 1e9, gradient=False),), 1)
    frozen = costs(Workload(none, work.cluster, 4), TWO_STAGES)
    assert frozen.backward_transfers[0] == Transfer(0.0, ())


@pytest.mark.parametrize(("duplex", "seconds"), [("full", 1.0), ("half", 2.0)])
def test_a_server_that_sends_and_receives_shares_a_half_duplex_port(
    duplex: str, seconds: float
) -> None:
    """Both halves of a micro-batch of 2 GB change servers, one in each direction."""
    cluster = servers(2, 2, between=1, duplex=duplex)
    plan = Plan((Stage(0, 1, (0, 2)), Stage(1, 2, (3, 1))))
    (forward,) = costs(Workload(profile(2, boundary=2e9), cluster, 4, 2), plan).forward_transfers
    assert forward.seconds == pytest.approx(2 * seconds)
    ports = {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0} if duplex == "full" else {0: 4.0, 2: 4.0}
    assert {r: s for r, s in forward.loads if r < 4} == pytest.approx(ports)


def _replicas(duplex: str, between: float) -> tuple[Workload, Plan]:
    """Two stages with one replica on each server, and layers of 1 GB of parameters."""
    cluster = servers(2, 2, inside=100, between=between, duplex=duplex)
    plan = Plan((Stage(0, 1, (0, 2)), Stage(1, 2, (1, 3))))
    return Workload(profile(2, parameters=1e9), cluster, 4, 2), plan


@pytest.mark.parametrize(("duplex", "ports"), [("full", (0, 1, 2, 3)), ("half", (0, 2))])
def test_an_all_reduce_occupies_the_ports_of_its_servers(
    duplex: str, ports: tuple[int, ...]
) -> None:
    work, plan = _replicas(duplex, between=1)
    for reduce in costs(work, plan).allreduce:
        assert reduce.seconds == pytest.approx(1.0)  # each of 2 GPUs sends half of 1 GB, twice
        assert dict(reduce.loads) == pytest.approx(dict.fromkeys(ports, 1.0))


def test_an_all_reduce_inside_a_server_occupies_no_port() -> None:
    work, _ = _replicas("full", between=1)
    inside = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))))
    assert [reduce.loads for reduce in costs(work, inside).allreduce] == [(), ()]
    assert costs(work, inside).allreduce[0].seconds == pytest.approx(1 / 100)


def test_all_reduces_of_two_stages_wait_for_their_common_port() -> None:
    """Both stages end within 1 s of each other, and each all-reduce takes the port for 1 s."""
    work, plan = _replicas("full", between=1)
    assert all(port < inf for port in work.cluster.ports)
    free = Workload(profile(2), work.cluster, 4, 2)
    apart = simulated_s(work, plan) - simulated_s(free, plan)
    assert apart == pytest.approx(1.0)  # the last stage's all-reduce is over when the first begins
    heavy = Workload(profile(2, forward=0.1, backward=0.2, parameters=9e9), work.cluster, 4, 2)
    light = Workload(profile(2, forward=0.1, backward=0.2), work.cluster, 4, 2)
    # The last stage's 9 s end 0.2 s of computation earlier; the first stage's 9 s follow them.
    assert simulated_s(heavy, plan) - simulated_s(light, plan) == pytest.approx(18 - 0.2)


def _row(duplex: str = "full", latency_us: float = 0.0) -> Cluster:
    return parse_cluster(
        f'name = "two"\nduplex = "{duplex}"\n[[servers]]\ngpus = 2\nmemory_gib = 1\n'
        f"link = {{ bandwidth_gbytes = 1, latency_us = {latency_us} }}\n"
    )


def test_latency_adds_to_the_seconds_and_occupies_nothing() -> None:
    planned = costs(Workload(profile(2, boundary=1e9), _row(latency_us=5e5), 4), TWO_STAGES)
    assert planned.forward_transfers[0].seconds == pytest.approx(1.5)
    assert dict(planned.forward_transfers[0].loads) == pytest.approx({2: 1.0})
    nothing = costs(Workload(profile(2), _row(latency_us=5e5), 4), TWO_STAGES)
    assert nothing.forward_transfers[0].seconds == 0.0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("policy", ["1f1b", "zero-bubble"])
def test_seconds_of_a_stage(policy: str, recompute: bool) -> None:
    """Half of the backward pass is weight gradients, which only zero-bubble delays."""
    work = Workload(profile(3, forward=1, backward=4, parameters=1.0), servers(1, 2), 4)
    planned = costs(work, straight([2, 3], policy, recompute=recompute))  # type: ignore[arg-type]
    repeated = 1.0 if recompute else 0.0
    delayed = 2.0 if policy == "zero-bubble" else 0.0
    assert planned.forward == (2.0, 1.0)
    assert planned.backward == (2 * (4 - delayed + repeated), 4 - delayed + repeated)
    assert planned.weight_gradient == (2 * delayed, delayed)


def test_one_stage_hides_the_all_reduce_behind_the_rest_of_the_backward_pass() -> None:
    """Gradients of the last layer go first; the link is busy from then on, 2 s per layer."""
    even = Workload(profile(3, backward=1, parameters=2e9), servers(1, 2, inside=1), 2)
    # Ready after 1, 2 and 3 s; sent until 3, 5 and 7 s; the backward pass ends after 3 s.
    assert exposed_allreduce_s(even, (0, 1)) == pytest.approx(4)
    plan = Plan((Stage(0, 3, (0, 1)),))
    assert costs(even, plan).allreduce[0].seconds == pytest.approx(4)
    slow = Workload(profile(3, backward=5, parameters=2e9), servers(1, 2, inside=1), 2)
    assert exposed_allreduce_s(slow, (0, 1)) == pytest.approx(2)  # only the first layer's
