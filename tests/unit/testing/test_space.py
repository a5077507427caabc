"""check_space accepts a correct space and rejects each kind of violation."""

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
def test_the_reference_space_and_objective_meet_the_contract(size, reach):
    for seed in range(3):
        check_space(Permutations(size, reach), seed=seed, steps=20)
    check_objective(Disorder(), Permutations(size, reach))


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.integers(0, 1000))
def test_a_move_of_the_reference_space_is_undone_by_its_inverse(order, seed):
    space, state = Permutations(6, 3), tuple(order)
    assert space.load(space.dump(state)) == state
    move = space.propose(state, np.random.default_rng(seed))
    after = space.apply(state, move)
    assert after != state
    assert space.apply(after, Slide(move.position + move.offset, -move.offset)) == state


def test_the_reference_optimum_is_the_only_one():
    states = list(itertools.permutations(range(5)))
    values = [measurement.value for measurement in Disorder().evaluate(states)]
    assert [s for s, v in zip(states, values, strict=True) if v <= Disorder.optimum] == [
        (0, 1, 2, 3, 4)
    ]


@pytest.mark.parametrize("text", ["", "0 1 2", "0 1 2 3 3", "a b c d e", "0 1 2 3 9"])
def test_the_reference_space_loads_only_permutations(text):
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
    """Another key at each call for the same state."""

    calls = 0

    def key(self, state):
        self.calls += 1
        return f"{state} {self.calls}".encode()


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


class InconsistentApply(Permutations):
    calls = 0

    def apply(self, state, move):
        self.calls += 1
        after = super().apply(state, move)
        return after if self.calls % 2 else (*after[1:], after[0])


class RejectingApply(Permutations):
    def apply(self, state, move):
        if move.position == 1:
            raise IllegalMove("not this one")
        return super().apply(state, move)


class OrderedPair(Permutations):
    """Number 1 must stay before number 0, so legality depends on the state."""

    def _legal(self, state, move):
        to = move.position + move.offset
        if not 0 <= to < self.size:
            return False
        after = super().apply(state, move)
        return after.index(1) < after.index(0)

    def draw(self, state, rng, required_tags=NO_TAGS):
        move = super().draw(state, rng, required_tags)
        return move if move is not None and self._legal(state, move) else None

    def moves(self, state):
        return (move for move in super().moves(state) if self._legal(state, move))

    def apply(self, state, move):
        if not self._legal(state, move):
            raise IllegalMove(f"{move} exchanges 0 and 1")
        return super().apply(state, move)


class AllowsIllegal(OrderedPair):
    def apply(self, state, move):
        return Permutations.apply(self, state, move)


class WrongErrorForIllegal(OrderedPair):
    def apply(self, state, move):
        if not self._legal(state, move):
            raise ValueError(move)
        return Permutations.apply(self, state, move)


class OffersIllegal(OrderedPair):
    def draw(self, state, rng, required_tags=NO_TAGS):
        return Permutations.draw(self, state, rng, required_tags)


class ProposesIllegal(OrderedPair):
    def propose(self, state, rng, required_tags=NO_TAGS):
        return Permutations(self.size, self.reach).propose(state, rng, required_tags)


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
    def draw(self, state, rng, required_tags=NO_TAGS):
        return super().draw(state, rng)


class GivesUpEarly(Permutations):
    """Returns None although legal moves exist."""

    def propose(self, state, rng, required_tags=NO_TAGS):
        return self.draw(state, rng, required_tags)


class OwnRandomness(Permutations):
    own = np.random.default_rng(0)

    def draw(self, state, rng, required_tags=NO_TAGS):
        return super().draw(state, self.own, required_tags)


class Biased(Permutations):
    def draw(self, state, rng, required_tags=NO_TAGS):
        move = super().draw(state, rng, required_tags)
        return (
            super().draw(state, rng, required_tags) if move is None or move.position == 0 else move
        )


class BiasedByTag(Permutations):
    """Uniform only without wanted tags."""

    def draw(self, state, rng, required_tags=NO_TAGS):
        if not required_tags:
            return super().draw(state, rng)
        moves = [move for move in self.moves(state) if required_tags <= move.tags]
        return moves[int(rng.integers(len(moves))) // 2] if moves else None


@dataclass
class Unhashable:
    position: int
    offset: int
    tags = frozenset({"slide"})


@dataclass(frozen=True)
class ListTags:
    position: int
    offset: int
    tags = ("slide",)


def with_moves(cls):
    class Replaced(Permutations):
        def moves(self, state):
            return (cls(move.position, move.offset) for move in super().moves(state))

    return Replaced


BROKEN_SPACES = [
    (RandomStart, "start() returns another state"),
    (TextKey, "key() does not return bytes"),
    (CoarseKey, "two different states have one key"),
    (FineKey, "another state"),
    (TwoLines, "one line of text"),
    (LostDump, "load(dump(state)) is another state"),
    (NoLoad, "load() fails"),
    (ImpureApply, "changed the state"),
    (InconsistentApply, "different states"),
    (RejectingApply, "apply() rejects"),
    (AllowsIllegal, "got 'no error'"),
    (WrongErrorForIllegal, "allowed is IllegalMove"),
    (OffersIllegal, "draw() offers a move that moves() does not"),
    (ProposesIllegal, "propose() offers a move that moves() does not"),
    (TwiceListed, "offers a move twice"),
    (ShuffledMoves, "moves() returns another list"),
    (IgnoresTags, "ignores the wanted tags"),
    (GivesUpEarly, "propose() returns None"),
    (OwnRandomness, "differs for the same generator"),
    (Biased, "not uniform"),
    (BiasedByTag, "not uniform over the moves with tags"),
    (with_moves(Unhashable), "moves are not hashable"),
    (with_moves(ListTags), "tags of the wrong type"),
]


@pytest.mark.parametrize(
    ("cls", "message"), BROKEN_SPACES, ids=lambda value: getattr(value, "__name__", "")
)
def test_broken_spaces_are_rejected(cls, message):
    with pytest.raises(ContractBroken) as caught:
        check_space(cls(5, 2), steps=40)
    assert message in str(caught.value)
    assert "; allowed is " in str(caught.value)


def test_a_space_whose_legality_depends_on_the_state_is_accepted():
    check_space(OrderedPair(5, 2))
