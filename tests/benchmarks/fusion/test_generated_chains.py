"""Tests of the generated chains: their split is fixed, and each kind can be fused completely."""

from __future__ import annotations

import hashlib

import pytest

torch = pytest.importorskip("torch")

from benchmarks.fusion.chains.accuracy import AccuracyCheck  # noqa: E402
from benchmarks.fusion.chains.generated import (  # noqa: E402
    GENERATED,
    KINDS,
    SHAPES,
    generated_names,
    split_of,
)
from benchmarks.fusion.chains.programs import CHAINS, Chain  # noqa: E402
from benchmarks.fusion.chains.stitched import chain_graph  # noqa: E402
from benchmarks.fusion.chains.timing import Method  # noqa: E402


def test_there_are_200_chains_in_two_halves_and_the_split_does_not_change() -> None:
    train, test = generated_names("train"), generated_names("test")
    assert len(GENERATED) >= 200 and min(len(train), len(test)) >= 100
    assert not set(train) & set(test) and not set(GENERATED) & set(CHAINS)
    for half in (train, test):
        assert {name.rsplit(" ", 1)[0] for name in half} == set(KINDS)
        assert len({name.rsplit(" ", 1)[1] for name in half}) == len(SHAPES)
    digest = hashlib.sha256("\n".join(sorted(test)).encode()).hexdigest()[:16]
    assert digest == "7ba3c20dc5d0f08e", (
        "the test half is what results are judged on: do not change it"
    )
    assert split_of("a new chain") in ("train", "test")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_captured_completely(kind: str) -> None:
    name = next(name for name in GENERATED if name.rsplit(" ", 1)[0] == kind)
    graph = chain_graph(GENERATED[name])
    assert graph.operators
    assert not [node for node in graph if node.kind == "opaque"]


@pytest.mark.parametrize("kind", KINDS)
def test_eager_pytorch_passes_the_accuracy_check_of_every_kind(kind: str) -> None:
    function, inputs = KINDS[kind]
    chain = Chain(kind, function, inputs(4, 1024))
    accuracy = AccuracyCheck(chain, chain.tensors("cpu"))
    assert accuracy.failure(accuracy.errors(Method(lambda tensors: function(*tensors)))) == ""
