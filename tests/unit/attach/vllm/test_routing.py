"""Kinds of steps and the choice of those that nostall serves."""

from __future__ import annotations

import numpy as np
import pytest

from nostall.attach.vllm.routing import (
    CHOICES,
    MAX_VERIFY,
    StepKind,
    find_choice,
    plan_kinds,
    plan_of,
    serves,
    step_kind,
)
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [
        ([], StepKind.EMPTY),
        ([0, 0], StepKind.EMPTY),
        ([1, 1, 0], StepKind.DECODE),
        ([1, 5, 0], StepKind.VERIFY),
        ([MAX_VERIFY], StepKind.VERIFY),
        ([MAX_VERIFY + 1, 4000], StepKind.PREFILL),
        ([1, 2048], StepKind.MIXED),
        ([8, 2048, 0], StepKind.MIXED),
    ],
)
def test_kind_follows_from_query_lengths(lengths: list[int], kind: StepKind) -> None:
    assert step_kind(np.array(lengths, np.int32)) is kind


def test_steps_of_equal_lengths_have_the_kind_of_the_length() -> None:
    """A full CUDA graph runs the kernels of its capture for any number of such sequences."""
    for length in (1, 2, 8, MAX_VERIFY):
        kinds = {step_kind(np.full(count, length, np.int32)) for count in (1, 3, 256)}
        assert len(kinds) == 1


def test_unknown_choice_names_the_variable_and_the_choices() -> None:
    with pytest.raises(BadInput, match="NOSTALL_VLLM_ATTENTION"):
        find_choice("mesured")
    assert find_choice("none").kinds == frozenset()


def test_each_served_kind_has_a_plan() -> None:
    for choice in CHOICES.values():
        for kind in choice.kinds:
            for head_dim in (64, 128, 256):
                assert plan_of(kind, AttentionShape(head_dim=head_dim)).kernel.tiles


@pytest.mark.parametrize(
    ("choice", "kind", "sequences", "head_dim", "served"),
    [
        ("auto", StepKind.DECODE, 256, 128, True),
        ("auto", StepKind.DECODE, 4, 128, False),
        ("auto", StepKind.DECODE, 256, 64, False),
        ("auto", StepKind.VERIFY, 256, 128, True),
        ("auto", StepKind.MIXED, 33, 128, True),
        ("auto", StepKind.MIXED, 32, 128, False),
        ("auto", StepKind.PREFILL, 256, 128, False),
        ("all", StepKind.MIXED, 1, 64, True),
        ("none", StepKind.DECODE, 256, 128, False),
    ],
)
def test_measured_steps_are_those_that_were_faster(
    choice: str, kind: StepKind, sequences: int, head_dim: int, served: bool
) -> None:
    shape = AttentionShape(head_dim=head_dim)
    assert serves(find_choice(choice), kind, shape, sequences, 132) == served


def test_plans_of_verifies_alone_are_not_looked_up() -> None:
    assert plan_kinds(AttentionShape(32, 8, 128)) == {
        "decode", "decode and verify", "prefill", "mixed",
    }  # fmt: skip
