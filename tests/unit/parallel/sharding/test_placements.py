"""Redistributions between placements: their kinds, their order, and what they compute."""

from __future__ import annotations

import itertools

import pytest
from benchmarks.sharding.local_devices import LocalDevices
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.parallel.sharding.placements import (
    is_partial,
    is_sharded,
    local_shape,
    placement_text,
    redistribution,
    step_kind,
)

ALL = ("R", "S0", "S1", "P", "A")


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("R", "S0", "slice"),
        ("S0", "R", "all-gather"),
        ("S0", "S1", "all-to-all"),
        ("P", "R", "all-reduce"),
        ("A", "R", "all-reduce"),
        ("P", "S1", "reduce-scatter"),
        ("R", "P", "zero"),
        ("A", "P", "scale"),
        ("S0", "P", None),
        ("R", "A", None),
    ],
)
def test_kinds_of_steps(source: str, target: str, kind: str | None) -> None:
    assert step_kind(source, target) == kind


def test_an_inner_shard_is_gathered_before_an_outer_one_of_the_same_dimension() -> None:
    steps = redistribution(("S0", "S0"), ("R", "S0"))
    assert steps is not None
    assert [(s.mesh_dim, s.kind) for s in steps] == [
        (1, "all-gather"),
        (0, "all-gather"),
        (1, "slice"),
    ]
    steps = redistribution(("S0", "S1"), ("R", "S1"))
    assert steps is not None
    assert [(s.mesh_dim, s.kind) for s in steps] == [(0, "all-gather")]


def test_local_shapes_are_even() -> None:
    assert local_shape((8, 6), ("S0", "S0"), (2, 4)) == (1, 6)
    assert local_shape((8, 6), ("S1", "R"), (2, 4)) == (8, 3)
    assert local_shape((8, 6), ("R", "S1"), (2, 4)) is None
    assert local_shape((8,), ("S1",), (2,)) is None
    assert placement_text(("S0", "R")) == "S(0) R"


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.sampled_from(ALL)] * 2), st.tuples(*[st.sampled_from(ALL)] * 2))
def test_a_redistribution_computes_the_tensor_of_its_target(
    source: tuple[str, ...], target: tuple[str, ...]
) -> None:
    """Brought to replication, the tensor is the same before and after."""
    torch = pytest.importorskip("torch", reason="needs the extra nostall[torch]")
    from nostall.parallel.sharding.program.devices import redistribute

    mesh = (2, 2)
    devices = LocalDevices(mesh)
    generator = torch.Generator().manual_seed(0)
    shape = local_shape((4, 8), source, mesh)
    values = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]
    for mesh_dim, placement in enumerate(source):
        if placement == "R":  # replicas are equal
            for own, other in itertools.permutations(range(4), 2):
                a, b = devices.coordinates[own], devices.coordinates[other]
                if a[1 - mesh_dim] == b[1 - mesh_dim] and a[mesh_dim] == 0:
                    values[other] = values[own].clone()
    steps = redistribution(source, target)
    if steps is None:
        assert any(is_partial(p) for p in target)
        return
    moved = redistribute(devices, values, source, target)
    whole = ("R", "R")
    expected = redistribute(devices, values, source, whole)
    for got, value in zip(redistribute(devices, moved, target, whole), expected, strict=True):
        assert torch.allclose(got, value, rtol=1e-12, atol=1e-12)


def test_an_output_without_a_tensor_is_not_sharded() -> None:
    assert is_sharded("S0") and not is_sharded("R") and not is_sharded("")
