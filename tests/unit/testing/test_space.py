"""check_space accepts what keeps its contract and refuses each kind of breach."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core import (
    BadInput,
    ContractBroken,
    IllegalMove,
)
from nostall.core.space import NO_TAGS
from nostall.testing import (
    Disorder,
    Permutations,
    Slide,
    check_objective,
    check_space,
)


@pytest.mark.parametrize(("size", "reach"), [(1, 1), (2, 1), (5, 2), (12, 4)])
def test_the_reference_space_and_objective_keep_the_contract(size, reach):
    for seed in range(3):
        check_space(Permutations(size, reach), seed=seed, steps=20)
    check_objective(Disorder(), Permutations(size, reach))


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.integers(0, 1000))
def test_the_reference_space_moves_and_comes_back(order, seed):
    space, state = Permutations(6, 3), tuple(order)
    assert space.load(space.dump(state)) == state
    move = space.propose(state, np.random.default_rng(seed))
    after = space.apply(state, move)
    assert after != state
    assert space.apply(after, Slide(move.at + move.by, -move.by)) == state


def test_the_reference_optimum_is_the_only_one():
    states = list(itertools.permutations(range(5)))
    values = [each.value for each in Disorder().evaluate(states)]
    assert [s for s, v in zip(states, values, strict=True) if v <= Disorder.optimum] == [
        (0, 1, 2, 3, 4)
    ]


@pytest.mark.parametrize("text", ["", "0 1 2", "0 1 2 3 3", "a b c d e", "0 1 2 3 9"])
def test_the_reference_space_loads_orders_only(text):
    with pytest.raises(BadInput, match="no order of 5 numbers"):
        Permutations(5).load(text)


class RandomStart(Permutations):
    calls = 0

    def start(self):
        self.calls += 1
        return tuple(range(self.size)) if self.calls % 2 else super().start()


class TextKey(Permutations):
    def key(self, state):
        return self.dump(state)


class CoarseKey(Permutations):
    def key(self, state):
        return bytes([state[0]])


class FineKey(Permutations):
    """Another key for each look at the same state."""

    looks = 0

    def key(self, state):
        self.looks += 1
        return f"{state} {self.looks}".encode()


class TwoLines(Permutations):
    def dump(self, state):
        return "\n".join(map(str, state))


class LostDump(Permutations):
    def load(self, text):
        return self.start()


class NoLoad(Permutations):
    def load(self, text):
        raise NotImplementedError


class ImpureApply(Permutations):
    """States are lists, and moves change them in place."""

    def start(self):
        return list(super().start())

    def load(self, text):
        return list(super().load(text))

    def apply(self, state, move):
        state[:] = super().apply(tuple(state), move)
        return state


class MoodyApply(Permutations):
    calls = 0

    def apply(self, state, move):
        self.calls += 1
        after = super().apply(state, move)
        return after if self.calls % 2 else (*after[1:], after[0])


class RefusingApply(Permutations):
    def apply(self, state, move):
        if move.at == 1:
            raise IllegalMove("not this one")
        return super().apply(state, move)


class Fenced(Permutations):
    """Number 0 must not pass number 1: what is legal depends on the state."""

    def _legal(self, state, move):
        to = move.at + move.by
        if not 0 <= to < self.size:
            return False
        after = super().apply(state, move)
        return after.index(1) < after.index(0)

    def draw(self, state, rng, wanted=NO_TAGS):
        move = super().draw(state, rng, wanted)
        return move if move is not None and self._legal(state, move) else None

    def moves(self, state):
        return (move for move in super().moves(state) if self._legal(state, move))

    def apply(self, state, move):
        if not self._legal(state, move):
            raise IllegalMove(f"{move} passes the fence")
        return super().apply(state, move)


class AllowsIllegal(Fenced):
    def apply(self, state, move):
        return Permutations.apply(self, state, move)


class WrongErrorForIllegal(Fenced):
    def apply(self, state, move):
        if not self._legal(state, move):
            raise ValueError(move)
        return Permutations.apply(self, state, move)


class OffersIllegal(Fenced):
    def draw(self, state, rng, wanted=NO_TAGS):
        return Permutations.draw(self, state, rng, wanted)


class ProposesIllegal(Fenced):
    def propose(self, state, rng, wanted=NO_TAGS):
        return Permutations(self.size, self.reach).propose(state, rng, wanted)


class TwiceListed(Permutations):
    def moves(self, state):
        yield from super().moves(state)
        yield Slide(0, 1)


class ShuffledMoves(Permutations):
    calls = 0

    def moves(self, state):
        self.calls += 1
        moves = list(super().moves(state))
        return iter(moves[:: 1 if self.calls % 2 else -1])


class IgnoresTags(Permutations):
    def draw(self, state, rng, wanted=NO_TAGS):
        return super().draw(state, rng)


class NeverNone(Permutations):
    """Gives up too early: None although legal moves exist."""

    def propose(self, state, rng, wanted=NO_TAGS):
        return self.draw(state, rng, wanted)


class OwnRandomness(Permutations):
    own = np.random.default_rng(0)

    def draw(self, state, rng, wanted=NO_TAGS):
        return super().draw(state, self.own, wanted)


class Biased(Permutations):
    def draw(self, state, rng, wanted=NO_TAGS):
        move = super().draw(state, rng, wanted)
        return super().draw(state, rng, wanted) if move is None or move.at == 0 else move


class BiasedByTag(Permutations):
    """Uniform without a filter only."""

    def draw(self, state, rng, wanted=NO_TAGS):
        if not wanted:
            return super().draw(state, rng)
        moves = [move for move in self.moves(state) if wanted <= move.tags]
        return moves[int(rng.integers(len(moves))) // 2] if moves else None


@dataclass
class Unhashable:
    at: int
    by: int
    tags = frozenset({"slide"})


@dataclass(frozen=True)
class ListTags:
    at: int
    by: int
    tags = ("slide",)


def with_moves(cls):
    class Other(Permutations):
        def moves(self, state):
            return (cls(move.at, move.by) for move in super().moves(state))

    return Other


BROKEN_SPACES = [
    (RandomStart, "start() gives another state"),
    (TextKey, "key() does not return bytes"),
    (CoarseKey, "two different states have one key"),
    (FineKey, "another state"),
    (TwoLines, "one line of text"),
    (LostDump, "load(dump(state)) is another state"),
    (NoLoad, "load() fails"),
    (ImpureApply, "changed the state"),
    (MoodyApply, "different states"),
    (RefusingApply, "apply() refuses"),
    (AllowsIllegal, "got 'no error'"),
    (WrongErrorForIllegal, "allowed is IllegalMove"),
    (OffersIllegal, "draw() offers a move that moves() does not"),
    (ProposesIllegal, "propose() offers a move that moves() does not"),
    (TwiceListed, "offers a move twice"),
    (ShuffledMoves, "another list"),
    (IgnoresTags, "ignores the wanted tags"),
    (NeverNone, "answers None"),
    (OwnRandomness, "differs for the same generator"),
    (Biased, "not uniform"),
    (BiasedByTag, "not uniform over the moves with tags"),
    (with_moves(Unhashable), "cannot be told apart"),
    (with_moves(ListTags), "tags of the wrong type"),
]


@pytest.mark.parametrize(
    ("cls", "said"), BROKEN_SPACES, ids=lambda value: getattr(value, "__name__", "")
)
def test_broken_spaces_are_refused(cls, said):
    with pytest.raises(ContractBroken) as caught:
        check_space(cls(5, 2), steps=40)
    assert said in str(caught.value)
    assert "; allowed is " in str(caught.value)


def test_a_space_whose_legality_depends_on_the_state_is_accepted():
    check_space(Fenced(5, 2))
