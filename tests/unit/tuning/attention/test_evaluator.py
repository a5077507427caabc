"""A candidate is refused for each way in which it can be wrong, and later ones are not affected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.gpu import Kernel, MeasurementPlan
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.rules import PLANS
from nostall.serving.attention.winners import on_gpu
from nostall.serving.attention.winners.on_gpu import exact_token
from nostall.serving.batch import examples
from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import RaggedBatch
from nostall.tuning.attention import evaluator
from nostall.tuning.attention.evaluator import StepEvaluator
from nostall.tuning.attention.sources import AttentionStep

SHAPE = AttentionShape(2, 1, 64)
STEP = AttentionStep(make_batch([1, 1], [30, 50]), SHAPE, PLANS["decode"], "float16", "two decodes")
KERNEL = Kernel(b"original", "meta_attention", LaunchSpec())
PLAN = MeasurementPlan(inputs=2, loads=2)


class Faults:
    """The kernel on the CPU, and the variants of it: a cubin is the name of its fault."""

    fault = ""

    def __init__(self, shape: AttentionShape, *_: object) -> None:
        self.shape = shape

    def __call__(self, query: Any, cache: Any, out: Any, batch: Any, buffers: Any) -> None:
        lengths = np.diff(batch.query_starts.numpy()).astype(np.int32)
        ragged = RaggedBatch(
            lengths, batch.kv_lengths.numpy(), batch.block_table.numpy(), 16, lengths > 99
        )
        for token in range(len(query)):
            out[token] = exact_token(ragged, self.shape, query, cache, token).to(out.dtype)
        if Faults.fault == "value":
            out[0, 0, 0] += 1
        elif Faults.fault == "last bit":
            words = out.view(torch.int16)
            words[0, 0, 0] ^= 1
        elif Faults.fault == "nothing written":
            out[-1] = float("nan")
        elif Faults.fault == "queue":
            buffers.queue[0] = 1
        elif Faults.fault == "inputs":
            query[0, 0, 0] += 1
        elif Faults.fault == "behind the result":
            out._base[len(query)] = 0
        elif Faults.fault == "registers":
            raise RuntimeError("Triton Error [CUDA]: out of resources")
        elif Faults.fault == "address":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FaultyVariants:
    """Variants whose cubin is the name of a fault of :class:`Faults`."""

    loaded = most = 0

    def load(self, cubin: bytes) -> bytes:
        if cubin == b"no image":
            raise RuntimeError("device kernel image is invalid")
        FaultyVariants.loaded += 1
        FaultyVariants.most = max(FaultyVariants.most, FaultyVariants.loaded)
        return cubin

    @contextmanager
    def using(self, variant: bytes) -> Iterator[None]:
        Faults.fault = variant.decode()
        try:
            yield
        finally:
            Faults.fault = ""

    def unload(self, variant: bytes) -> None:
        FaultyVariants.loaded -= 1


def timed(graphs: list[Any], rounds: int) -> list[list[float]]:
    for graph in graphs:
        graph()
    return [[1e-3] * rounds for _ in graphs]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> StepEvaluator:
    monkeypatch.setattr(on_gpu, "MetaAttention", Faults)
    monkeypatch.setattr(evaluator, "interleaved", timed)
    monkeypatch.setattr(examples, "draw_lengths", lambda rng, page: ([1, 3, 0], [20, 9, 0]))
    return new_evaluator()


def new_evaluator() -> StepEvaluator:
    FaultyVariants.loaded = FaultyVariants.most = 0
    cpu = torch.device("cpu")
    return StepEvaluator(STEP, KERNEL, PLAN, FaultyVariants, cpu, 4, {"gpu": "none"})


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("value", "differs from fp64"),
        ("last bit", "differs from the original's"),
        ("nothing written", "differs from fp64"),
        ("queue", "a queue that is not empty"),
        ("inputs", "changed inputs"),
        ("behind the result", "differs from the original's"),
    ],
)
def test_a_wrong_candidate_is_refused(made: StepEvaluator, fault: str, detail: str) -> None:
    for outcome in (made.evaluate(fault.encode()), made.check(fault.encode(), 0, 1)):
        assert outcome.status == "wrong" and detail in outcome.detail
    assert made.evaluate(b"none").status == "timed"  # the same inputs, and an empty queue
    assert made.check(b"none", 3, 1).status == "agrees"
    assert FaultyVariants.loaded == 1  # the original


def test_a_candidate_that_does_not_load_or_start_is_rejected(made: StepEvaluator) -> None:
    assert made.evaluate(b"no image").status == "rejected"
    assert made.compare(b"no image", 4).status == "rejected"
    assert made.evaluate(b"registers").status == "rejected"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.evaluate(b"address")


def test_the_comparison_has_a_null(made: StepEvaluator) -> None:
    outcome = made.compare(b"none", 5)
    assert outcome.timing is not None and outcome.timing.loads == 2
    assert len(outcome.timing.original) == len(outcome.timing.null) == 5
    assert FaultyVariants.most == 1 + 6 and FaultyVariants.loaded == 1  # two loads of each stay
    assert made.info() == {"gpu": "none", "measured": "attention step two decodes"}


def test_a_wrong_original_is_an_error(made: StepEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faults, "fault", "value")
    with pytest.raises(BadInput, match="differs from fp64"):
        new_evaluator()
