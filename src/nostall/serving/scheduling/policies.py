"""Policies: how many tokens of each request a step computes. Pure functions of the queues.

- ``vllm``: vLLM's scheduler (v1). Running requests come first, in the order of their admission: a
  decode takes its tokens, an unfinished prompt what is left of the budget. Waiting requests follow,
  first come first served.
- ``xy-serve``: token-wise scheduling of XY-Serve (arXiv:2412.18106, section 2.2). Prefills come
  first, for the time to the first token; ``reserved`` tokens of the budget are kept for decodes and
  verifies, to bound the time between tokens. The decodes that waited longest come first.

Both cut long prompts into chunks and compute at most ``budget`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.core.text.suggest import unknown
from nostall.serving.errors import BadSchedule

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Limits:
    """Limits of a step."""

    budget: int = 4096
    """Tokens of a step."""
    max_running: int = 256
    """Requests that are admitted at the same time."""
    reserved: int = 128
    """Tokens that ``xy-serve`` keeps for decodes and verifies, if there are as many. Without any, a
    long prompt that memory does not hold would stop decodes for good."""

    def __post_init__(self) -> None:
        if min(self.budget, self.max_running) < 1 or not 1 <= self.reserved <= self.budget:
            raise BadSchedule(
                f"a budget of {self.budget} tokens with {self.reserved} reserved, and at most "
                f"{self.max_running} running requests; allowed are 1 or more tokens and requests, "
                "and 1 to the budget reserved"
            )


@dataclass(frozen=True, eq=False)
class Queues:
    """What a policy sees: running requests in the order of admission, and waiting ones."""

    needed: Int64s
    """Tokens that each running request can compute in this step, shape (R,): the rest of its
    prompt; or 1, or 1 + the draft's tokens."""
    is_prefill: Bools
    """Whether a running request has prompt tokens left, shape (R,)."""
    skipped: Int64s
    """Steps for which each running request has had no tokens, shape (R,)."""
    waiting: Int64s
    """Prompt tokens of waiting requests that no cache holds, by arrival, shape (W,)."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Tokens of a step."""

    running: Int64s
    """Tokens of each running request, shape (R,)."""
    admitted: Int64s
    """Tokens of the first waiting requests, all of 1 or more; the others stay waiting."""


Policy = Callable[[Queues, Limits], StepPlan]


def schedule_vllm(queues: Queues, limits: Limits) -> StepPlan:
    """Running requests in order, then waiting ones."""
    running = take_in_order(queues.needed, limits.budget)
    left = limits.budget - int(running.sum())
    return StepPlan(running, _admit(queues, limits, left))


def schedule_xy_serve(queues: Queues, limits: Limits) -> StepPlan:
    """Prefills first, except for reserved tokens; then decodes, the longest skipped first."""
    wanted = np.where(queues.is_prefill, 0, queues.needed)
    reserved = min(limits.reserved, int(wanted.sum()))
    prefill_budget = limits.budget - reserved
    running = take_in_order(np.where(queues.is_prefill, queues.needed, 0), prefill_budget)
    admitted = _admit(queues, limits, prefill_budget - int(running.sum()))
    left = limits.budget - int(running.sum()) - int(admitted.sum())
    order = np.argsort(-queues.skipped, kind="stable")
    decodes = np.zeros_like(running)
    decodes[order] = take_in_order(wanted[order], left)
    return StepPlan(running + decodes, admitted)


POLICIES: dict[str, Policy] = {"vllm": schedule_vllm, "xy-serve": schedule_xy_serve}
"""The policies by name."""


def find_policy(name: str) -> Policy:
    """The policy of a name. Raises :class:`BadSchedule` for an unknown one."""
    if name not in POLICIES:
        raise BadSchedule(unknown("policy", name, POLICIES))
    return POLICIES[name]


def take_in_order(needed: Int64s, budget: int) -> Int64s:
    """Give each request, in order, what it needs or what is left of the budget."""
    before = np.cumsum(needed) - needed
    return np.asarray(np.minimum(np.maximum(budget - before, 0), needed), np.int64)


def _admit(queues: Queues, limits: Limits, budget: int) -> Int64s:
    """Tokens of the waiting requests that are admitted."""
    places = max(limits.max_running - len(queues.needed), 0)
    taken = take_in_order(queues.waiting[:places], max(budget, 0))
    return taken[: int(np.count_nonzero(taken))]
