"""Which steps of vLLM nostall's attention kernel serves, decided from lengths on the host.

A step that is replayed from a full CUDA graph runs the kernels of its capture. vLLM captures full
graphs of steps whose sequences all have the same number of query tokens, so the kind of such a step
must follow from that number alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadInput
from nostall.core.suggest import unknown
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.plan import AttentionPlan, default_kernel
from nostall.serving.attention.rules import PLANS, Kind

MAX_VERIFY = 32
"""Most query tokens of a sequence that counts as speculative verification, not as prefill."""

VARIABLE = "NOSTALL_VLLM_ATTENTION"
"""Environment variable that names the steps to serve; see :data:`CHOICES`."""


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


_PLAN_KINDS: Mapping[StepKind, Kind] = {
    StepKind.DECODE: "decode",
    StepKind.VERIFY: "decode and verify",
    StepKind.PREFILL: "prefill",
    StepKind.MIXED: "mixed",
}


@dataclass(frozen=True)
class Choice:
    """Steps that nostall serves."""

    kinds: frozenset[StepKind]
    least_sequences: int = 1
    """Fewest sequences of a step, padded ones included: vLLM captures a full graph for each such
    number, so it may decide, too."""


CHOICES: Mapping[str, Choice] = {
    "measured": Choice(frozenset((StepKind.DECODE,)), 64),
    "all": Choice(frozenset((StepKind.DECODE, StepKind.VERIFY, StepKind.PREFILL, StepKind.MIXED))),
    "none": Choice(frozenset()),
}
"""Choices by the value of the environment variable.  ``measured``: the kernel was faster than
FlashAttention-3 alone, and vLLM was not slower with it."""


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


def find_choice(name: str) -> Choice:
    """The choice of a name. Raises :class:`BadInput` for an unknown one."""
    if name not in CHOICES:
        raise BadInput(unknown(f"value of {VARIABLE}", name, CHOICES))
    return CHOICES[name]


def plan_of(kind: StepKind, shape: AttentionShape) -> AttentionPlan:
    """The plan of attention for a kind of step, measured for heads of up to 128."""
    if shape.padded_head_dim > 128:
        return AttentionPlan(default_kernel(shape))
    return PLANS[_PLAN_KINDS[kind]]
