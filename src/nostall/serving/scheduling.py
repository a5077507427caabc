"""Scheduling of serving steps: policies for the token budget, and the prefix tree of blocks.

Policies: how many tokens of each request a step computes. Pure functions of the queues.

- ``vllm``: vLLM's scheduler (v1). Running requests come first, in the order of their admission: a
  decode takes its tokens, an unfinished prompt what is left of the budget. Waiting requests follow,
  first come first served.
- ``xy-serve``: token-wise scheduling of XY-Serve (arXiv:2412.18106, section 2.2). Prefills come
  first, for the time to the first token; ``reserved`` tokens of the budget are kept for decodes and
  verifies, to bound the time between tokens. The decodes that waited longest come first.

Both cut long prompts into chunks and compute at most ``budget`` tokens.

Prefix tree of KV blocks: prompts share the blocks of equal prefixes (automatic prefix caching).

A node is one block, named by the hash of its tokens. A sequence holds a *lease*: the path of shared
blocks that its prompt matches, and blocks of its own behind them.

Each block is in one of three places: free, in the tree, or in one lease. A block of the tree counts
the leases that hold it; one that none holds stays until its space is needed, least recently used
first. Matching changes nothing; the other operations change the tree in place, because a tree of a
serving engine has many thousands of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class Node:
    """A block of the tree."""

    block: int
    symbol: int
    """Hash of its tokens."""
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict[int, "Node"])
    """Children by their symbol."""
    holders: int = 0
    """Leases that hold the block."""
    last_used: int = 0


@dataclass(eq=False)
class Lease:
    """Blocks of one running sequence: shared ones, then its own."""

    path: list[Node]
    own: list[int]

    @property
    def blocks(self) -> list[int]:
        """The sequence's blocks in order."""
        return [node.block for node in self.path] + self.own


class PrefixTree:
    """A pool of blocks, and the tree of those that hold a prefix."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise BadSchedule(f"a prefix tree of {blocks} blocks; allowed are 1 or more")
        self.root = Node(-1, -1, None)
        self._blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: list[tuple[int, int, Node]] = []
        """Heap of leaves without holders by last use; entries that no longer hold are skipped."""
        self._evictable = 0
        self._clock = 0
        self._offers = 0

    @property
    def available(self) -> int:
        """Blocks that are free or can be freed."""
        return len(self._free) + self._evictable

    @property
    def held(self) -> int:
        """Blocks in leases; one that several leases share counts once."""
        return self._blocks - self.available

    def match(self, symbols: Sequence[int]) -> list[Node]:
        """The path of the longest cached prefix of a sequence. Changes nothing."""
        path: list[Node] = []
        node = self.root
        for symbol in symbols:
            child = node.children.get(symbol)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def begin(self, path: Sequence[Node]) -> Lease:
        """A lease of matched blocks; the match must be newer than the last eviction."""
        if any(node.parent is None for node in path):
            raise BadSchedule(
                "a block of this match was evicted after the match; match the sequence again"
            )
        for node in path:
            self._hold(node)
        return Lease(list(path), [])

    def reserve(self, lease: Lease, blocks: int) -> bool:
        """Give a lease more own blocks, evicting idle ones; False (and no block) without space."""
        if blocks > self.available:
            return False
        while len(self._free) < blocks:
            self._evict()
        for _ in range(blocks):
            lease.own.append(self._free.pop())
        return True

    def publish(self, lease: Lease, symbols: Sequence[int]) -> None:
        """Share the blocks of a sequence whose first ``symbols`` are computed.

        Own blocks move to the tree. One whose content the tree already has is freed, and the lease
        holds the tree's block instead.
        """
        full = min(len(symbols), len(lease.path) + len(lease.own))
        while len(lease.path) < full:
            lease.path.append(self._adopt(lease, symbols[len(lease.path)]))

    def end(self, lease: Lease, symbols: Sequence[int] = ()) -> None:
        """Give up a lease. The blocks that ``symbols`` name stay cached."""
        self.publish(lease, symbols)
        self._free.extend(reversed(lease.own))
        lease.own.clear()
        for node in reversed(lease.path):
            self._let_go(node)
        lease.path.clear()

    def _adopt(self, lease: Lease, symbol: int) -> Node:
        """Move the lease's first own block below its last node; returns the node, held."""
        parent, block = lease.path[-1] if lease.path else self.root, lease.own.pop(0)
        node = parent.children.get(symbol)
        if node is None:
            node = parent.children[symbol] = Node(block, symbol, parent)
            self._evictable += 1  # until it is held
        else:
            self._free.append(block)
        self._hold(node)
        return node

    def _hold(self, node: Node) -> None:
        self._evictable -= not node.holders
        node.holders += 1

    def _let_go(self, node: Node) -> None:
        node.holders -= 1
        self._clock += 1
        node.last_used = self._clock
        if not node.holders:
            self._evictable += 1
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Make an idle leaf a candidate for eviction."""
        if not node.holders and not node.children and node.parent is not None:
            self._offers += 1
            heapq.heappush(self._idle, (node.last_used, self._offers, node))

    def _evict(self) -> None:
        """Free the least recently used idle leaf."""
        while True:
            used, _, node = heapq.heappop(self._idle)
            parent = node.parent
            if (
                used == node.last_used
                and not node.holders
                and not node.children
                and parent is not None
            ):
                break
        del parent.children[node.symbol]
        node.parent = None
        self._free.append(node.block)
        self._evictable -= 1
        self._offer(parent)
