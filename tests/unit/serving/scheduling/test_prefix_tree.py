"""The prefix tree against a slow model: places of blocks, counts, contents, longest matches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from nostall.serving.errors import BadSchedule
from nostall.serving.scheduling import Lease, Node, PrefixTree


def nodes(node: Node, before: tuple[int, ...] = ()) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """All nodes below one, with the symbols from the root to their end."""
    for child in node.children.values():
        symbols = (*before, child.symbol)
        yield child, symbols
        yield from nodes(child, symbols)


class Engine:
    """Runs sequences on a tree and keeps what each block contains."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.tree = PrefixTree(blocks)
        self.content: dict[int, int] = {}
        self.running: list[tuple[Lease, tuple[int, ...]]] = []

    def start(self, prompt: tuple[int, ...], most: int) -> None:
        """Admit a prompt, as a scheduler does: match, lease, reserve, compute, publish."""
        tree, available = self.tree, self.tree.available
        match = tree.match(prompt)
        assert len(match) == self.longest_match(prompt)
        lease = tree.begin(match[:most])
        assert len(lease.path) == min(len(match), most)
        missing = len(prompt) - len(lease.blocks)
        could = missing <= tree.available
        assert tree.reserve(lease, missing) == could
        if not could:
            tree.end(lease)
            assert tree.available == available
            return
        self.running.append((lease, prompt))
        self.compute(lease, prompt)
        tree.publish(lease, prompt)

    def grow(self, place: int, symbols: tuple[int, ...]) -> None:
        """Append generated symbols to a running sequence."""
        lease, sequence = self.running[place]
        longer = sequence + symbols
        if self.tree.reserve(lease, len(longer) - len(lease.blocks)):
            self.running[place] = (lease, longer)
            self.compute(lease, longer)

    def compute(self, lease: Lease, sequence: tuple[int, ...]) -> None:
        """Write the sequence into its own blocks; a shared block is never written."""
        for place in range(len(lease.path), len(lease.blocks)):
            self.content[lease.blocks[place]] = sequence[place]

    def finish(self, place: int) -> None:
        lease, sequence = self.running.pop(place)
        self.tree.end(lease, sequence)

    def longest_match(self, sequence: tuple[int, ...]) -> int:
        """Longest prefix of a sequence that starts any path of the tree."""
        longest = 0
        for _, symbols in nodes(self.tree.root):
            shared = 0
            while shared < min(len(symbols), len(sequence)) and (
                symbols[shared] == sequence[shared]
            ):
                shared += 1
            longest = max(longest, shared)
        return longest

    def check(self) -> None:
        tree = self.tree
        shared = list(nodes(tree.root))
        own = [block for lease, _ in self.running for block in lease.own]
        places = Counter([*tree._free, *(node.block for node, _ in shared), *own])
        assert places == Counter(range(self.blocks))
        held = Counter(id(node) for lease, _ in self.running for node in lease.path)
        for node, symbols in shared:
            assert node.holders == held[id(node)]
            assert self.content[node.block] == node.symbol == symbols[-1]
        idle = sum(not node.holders for node, _ in shared)
        assert tree.available == len(tree._free) + idle
        for lease, sequence in self.running:
            assert tuple(self.content[block] for block in lease.blocks) == sequence


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
operations = st.one_of(
    st.tuples(st.just("start"), prompts, st.integers(0, 14)),
    st.tuples(st.just("grow"), st.integers(0, 9), prompts),
    st.tuples(st.just("finish"), st.integers(0, 9), st.none()),
)


@given(st.integers(1, 24), st.lists(operations, max_size=40))
@limits(max_examples=200)
def test_blocks_counts_and_contents_stay_right(
    blocks: int, steps: list[tuple[object, ...]]
) -> None:
    engine = Engine(blocks)
    for kind, first, second in steps:
        if kind == "start":
            engine.start(first, second)
        elif engine.running:
            place = int(first) % len(engine.running)
            if kind == "grow":
                engine.grow(place, second)
            else:
                engine.finish(place)
        engine.check()
    while engine.running:
        engine.finish(0)
        engine.check()
    assert engine.tree.available == blocks


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    tree = PrefixTree(3)

    def run(symbol: int) -> None:
        lease = tree.begin(tree.match((symbol,)))
        assert lease.path or tree.reserve(lease, 1)
        tree.end(lease, (symbol,))

    for symbol in (1, 2, 3, 1, 4):
        run(symbol)
    assert [len(tree.match((symbol,))) for symbol in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_a_stale_match_and_an_empty_pool_are_refused() -> None:
    tree = PrefixTree(1)
    lease = tree.begin(tree.match((1,)))
    assert tree.reserve(lease, 1)
    tree.end(lease, (1,))
    match = tree.match((1,))
    other = tree.begin(tree.match((3,)))
    assert tree.reserve(other, 1)
    with pytest.raises(BadSchedule, match="evicted after the match"):
        tree.begin(match)
    with pytest.raises(BadSchedule, match="0 blocks; allowed"):
        PrefixTree(0)
