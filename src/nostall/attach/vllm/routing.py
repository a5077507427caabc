"""Which steps of vLLM nostall's attention kernel serves, decided from lengths on the host.

A step that is replayed from a full CUDA graph runs the kernels of its capture. The builder of the
back end tells vLLM to capture full graphs only of steps whose sequences all have the same number of
query tokens (``UNIFORM_BATCH``; vLLM then runs mixed steps without one, also if ``FULL`` is asked
for), so the kind of such a step must follow from that number alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadInput
from nostall.core.text.suggest import unknown
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.rules import (
    MEASURED_GPU,
    BatchKind,
    Kind,
    is_faster_than_fa3,
    plan_for,
)
from nostall.serving.attention.winners.plan_store import PlanKey, find_plan
from nostall.serving.tables.settings import DEVICE_ORDERS

_log = logging.getLogger("nostall")
MAX_VERIFY = 32
"""Most query tokens of a sequence that counts as speculative verification, not as prefill."""

VARIABLE = "NOSTALL_VLLM_ATTENTION"
"""Environment variable that names the steps to serve; see :data:`CHOICES`."""
DEFAULT = "auto"


class StepKind(StrEnum):
    """What the sequences of a step do."""

    EMPTY = "empty"
    DECODE = "decode"
    """Each sequence has one query token."""
    VERIFY = "verify"
    """No sequence has more than :data:`MAX_VERIFY` query tokens, and some have more than one."""
    PREFILL = "prefill"
    """Each sequence has more than :data:`MAX_VERIFY` query tokens."""
    MIXED = "mixed"
    """Prefill beside decode or verify."""


_BATCHES: Mapping[StepKind, BatchKind] = {
    StepKind.DECODE: BatchKind(has_decodes=True, max_query=1),
    StepKind.VERIFY: BatchKind(has_decodes=True, max_query=MAX_VERIFY),
    StepKind.PREFILL: BatchKind(has_decodes=False, max_query=MAX_VERIFY + 1),
    StepKind.MIXED: BatchKind(has_decodes=True, max_query=MAX_VERIFY + 1),
}
"""Kind of step -> what decides the plan of attention."""


@dataclass(frozen=True)
class Choice:
    """Which kinds of steps nostall's attention kernel serves."""

    kinds: frozenset[StepKind]
    only_faster: bool = False
    """Whether it serves only steps on which it was faster than FlashAttention-3."""
    reads_once: bool = False
    """Whether decodes that share a prefix read it once."""

    def kinds_of(self, speculates: bool) -> frozenset[StepKind]:
        """The kinds of steps that it serves in an engine with or without speculation.

        With speculation vLLM captures full graphs of verifies, too, whose kernel must not depend on
        the decodes among them.
        """
        is_by_decodes = self.only_faster and speculates
        return self.kinds & {StepKind.DECODE} if is_by_decodes else self.kinds

    def is_cut(self, kind: StepKind) -> bool:
        """Whether only the first, short sequences of a step of this kind are served.

        The number of decodes among them then decides whether they are.
        """
        return self.only_faster and kind is not StepKind.DECODE


CHOICES: Mapping[str, Choice] = {
    "auto": Choice(
        frozenset((StepKind.DECODE, StepKind.VERIFY, StepKind.MIXED)),
        only_faster=True,
        reads_once=True,
    ),
    "all": Choice(
        frozenset((StepKind.DECODE, StepKind.VERIFY, StepKind.PREFILL, StepKind.MIXED)),
        reads_once=True,
    ),
    "none": Choice(frozenset()),
}
"""Choices by the value of the environment variable. ``auto``: decode steps of so many sequences
that the kernel alone, without shared prefixes, was faster than FlashAttention-3. Graphs are
captured by the number of sequences, so that this number decides; sharing is found by the tables of
each step, and the same kernel serves steps with and without it. Without speculation, also the
decodes and short chunks of prompts at the front of a step that has at least so many decodes;
FlashAttention computes the longer chunks behind them, in the same step."""


def step_kind(query_lengths: NDArray[np.int32]) -> StepKind:
    """The kind of a step; sequences without query tokens (padding) do not count."""
    lengths = query_lengths[query_lengths > 0]
    if not len(lengths):
        return StepKind.EMPTY
    least, most = int(lengths.min()), int(lengths.max())
    if most == 1:
        return StepKind.DECODE
    if most <= MAX_VERIFY:
        return StepKind.VERIFY
    return StepKind.PREFILL if least > MAX_VERIFY else StepKind.MIXED


_FORMER_NAMES: Mapping[str, str] = {"measured": "auto"}
"""Values of the environment variable that version 0.1 had, which jobs may still set."""


def find_choice(name: str) -> Choice:
    """The choice of a name. Raises :class:`BadInput` for an unknown one."""
    name = _FORMER_NAMES.get(name, name)
    if name not in CHOICES:
        raise BadInput(unknown(f"value of {VARIABLE}", name, CHOICES))
    return CHOICES[name]


def reads_once(
    choice: Choice, kind: StepKind, shape: AttentionShape, speculates: bool = False
) -> bool:
    """Whether steps of a kind read shared prefixes once: those of short sequences alone.

    They are decodes, verifies of speculation, and steps that are cut (:meth:`Choice.is_cut`).
    Layers with a window do not.
    """
    is_short = kind is StepKind.DECODE or (speculates and kind is StepKind.VERIFY)
    return choice.reads_once and (is_short or choice.is_cut(kind)) and not shape.window


def plan_of(kind: StepKind, shape: AttentionShape, has_gluon: bool = False) -> AttentionPlan:
    """The plan of attention for a kind of step; its launch fits into a CUDA graph.

    ``has_gluon``: whether the device runs the Gluon kernel for prefills.
    """
    return plan_for(shape, _BATCHES[kind], has_gluon=has_gluon)


def stored_plan(
    kind: StepKind, shape: AttentionShape, dtype: str, gpu: str
) -> AttentionPlan | None:
    """The winner of ``nostall serving search`` for a kind of step, if this GPU has one.

    A damaged file is logged, and the rule's plan is used; so it is for a plan that no graph holds,
    and with shared prefixes for one whose order the device builder does not know.
    """
    batch = _BATCHES[kind].kind(shape.group)
    try:
        plan = find_plan(PlanKey.of(shape, dtype, batch, gpu))
    except BadInput as error:
        _log.warning("nostall: %s", error)
        return None
    if plan is None or plan.kernel.schedule == "unit":
        return None
    return plan if plan.order in DEVICE_ORDERS or not shape.has_prefixes else None


def plan_kinds(shape: AttentionShape) -> frozenset[Kind]:
    """The kinds of batches whose stored plans the plug-in looks up.

    *verify* is not one of them: a step with speculation may hold decodes, so the plan of *decode
    and verify* serves it.
    """
    return frozenset(batch.kind(shape.group) for batch in _BATCHES.values())


def serves(
    choice: Choice,
    kind: StepKind,
    shape: AttentionShape,
    sequences: int,
    sms: int,
    gpu: str = MEASURED_GPU,
) -> bool:
    """Whether nostall serves a step of so many sequences.

    Of decodes, padded ones included: vLLM captures a full CUDA graph for each number of them, so it
    may decide. Of a step that is cut, the decodes in the part that nostall would serve.
    ``gpu``: the name of the GPU, as PyTorch gives it; the default is the one of the measurements.
    """
    if kind not in choice.kinds:
        return False
    if not choice.only_faster:
        return True
    batch = _BATCHES[StepKind.VERIFY if choice.is_cut(kind) else kind]
    return is_faster_than_fa3(shape, batch, sequences, sms, gpu)
