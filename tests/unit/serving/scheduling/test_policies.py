"""Policies against slow specifications, and what every policy must keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.serving.errors import BadSchedule
from nostall.serving.scheduling import (
    POLICIES,
    Limits,
    Queues,
    StepPlan,
    find_policy,
    schedule_vllm,
    schedule_xy_serve,
)

requests = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 3)), max_size=12)
waiting = st.lists(st.integers(1, 60), max_size=6)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    budget = draw(st.integers(1, 90))
    return Limits(budget, draw(st.integers(1, 14)), draw(st.integers(1, budget)))


def queues(running: list[tuple[bool, int, int]], waits: list[int]) -> Queues:
    return Queues(
        np.array([tokens for _, tokens, _ in running], np.int64),
        np.array([is_prefill for is_prefill, _, _ in running], np.bool_),
        np.array([skipped for _, _, skipped in running], np.int64),
        np.array(waits, np.int64),
    )


def vllm(running: list[tuple[bool, int, int]], waits: list[int], given_limits: Limits) -> list[int]:
    """Tokens of running and admitted requests, as the loops of vLLM's scheduler give them."""
    budget, tokens = given_limits.budget, []
    for _, needed, _ in running:
        tokens.append(min(needed, budget))
        budget -= tokens[-1]
    count = len(running)
    for needed in waits:
        if budget == 0 or count >= given_limits.max_running:
            break
        tokens.append(min(needed, budget))
        budget -= tokens[-1]
        count += 1
    return tokens


def xy_serve(
    running: list[tuple[bool, int, int]], waits: list[int], given_limits: Limits
) -> list[int]:
    """Tokens by the words of the policy."""
    decodes = sum(needed for is_prefill, needed, _ in running if not is_prefill)
    budget = given_limits.budget - min(given_limits.reserved, decodes)
    tokens = [0] * len(running)
    for place, (is_prefill, needed, _) in enumerate(running):
        if is_prefill:
            tokens[place] = min(needed, budget)
            budget -= tokens[place]
    admitted = []
    for needed in waits[: max(given_limits.max_running - len(running), 0)]:
        if budget:
            admitted.append(min(needed, budget))
            budget -= admitted[-1]
    budget = given_limits.budget - sum(tokens) - sum(admitted)
    for place in sorted(range(len(running)), key=lambda place: -running[place][2]):
        is_prefill, needed, _ = running[place]
        if not is_prefill:
            tokens[place] = min(needed, budget)
            budget -= tokens[place]
    return tokens + admitted


@given(requests, waiting, limits())
def test_policies_are_their_specifications(
    running: list[tuple[bool, int, int]], waits: list[int], given_limits: Limits
) -> None:
    for policy, specified in ((schedule_vllm, vllm), (schedule_xy_serve, xy_serve)):
        plan = policy(queues(running, waits), given_limits)
        assert [*plan.running, *plan.admitted] == specified(running, waits, given_limits)


@pytest.mark.parametrize("name", list(POLICIES))
@given(running=requests, waits=waiting, given_limits=limits())
def test_a_policy_keeps_its_limits_and_idles_no_token(
    name: str, running: list[tuple[bool, int, int]], waits: list[int], given_limits: Limits
) -> None:
    queue = queues(running, waits)
    plan: StepPlan = POLICIES[name](queue, given_limits)
    total = int(plan.running.sum() + plan.admitted.sum())
    assert total <= given_limits.budget
    assert ((plan.running >= 0) & (plan.running <= queue.needed)).all()
    admitted = len(plan.admitted)
    assert ((plan.admitted >= 1) & (plan.admitted <= queue.waiting[:admitted])).all()
    assert not admitted or len(running) + admitted <= given_limits.max_running
    places = max(given_limits.max_running - len(running), 0)
    wanted = int(queue.needed.sum() + queue.waiting[:places].sum())
    assert total == min(given_limits.budget, wanted)


@given(requests, waiting, limits())
def test_xy_serve_keeps_reserved_tokens_for_decodes(
    running: list[tuple[bool, int, int]], waits: list[int], given_limits: Limits
) -> None:
    queue = queues(running, waits)
    decodes = schedule_xy_serve(queue, given_limits).running[~queue.is_prefill].sum()
    assert decodes >= min(given_limits.reserved, queue.needed[~queue.is_prefill].sum())


def test_bad_limits_and_policies_are_refused() -> None:
    with pytest.raises(BadSchedule, match="budget of 8 tokens with 9 reserved"):
        Limits(8, 1, 9)
    with pytest.raises(BadSchedule, match="'vlm' is unknown; allowed are vllm, xy-serve; did you"):
        find_policy("vlm")
