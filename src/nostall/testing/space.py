"""Does a space keep its contract?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from nostall.core import IllegalMove, Space, Tags
from nostall.core.space import M, S
from nostall.testing.claim import attempt, broken, claim

_UNIFORM_MOVES = 100
_UNIFORM_DRAWS = 40
_NO_SUCH_TAG: Tags = frozenset({"no move of any space carries this tag"})


def check_space(space: Space[S, M], *, seed: int = 0, steps: int = 50) -> None:
    """Walk ``steps`` random moves through ``space`` and check every promise on the way.

    Checked are: pure ``apply``, keys and dumps that are equal exactly for equal states, moves
    without duplicates and in a fixed order, ``draw`` and ``propose`` that offer legal moves only,
    honour tags, depend on nothing but their generator and are uniform (where the start state has
    at most 100 moves), and :class:`~nostall.core.IllegalMove` for what is illegal.  Raises
    :class:`~nostall.core.ContractBroken` at the first promise that is not kept.
    """
    rng = np.random.default_rng(seed)
    state = space.start()
    _check_start(space, state)
    texts: dict[bytes, str] = {}
    met: dict[M, None] = {}
    for _ in range(steps):
        _check_identity(space, state, texts)
        legal = _check_moves(space, state)
        _check_illegal(space, state, legal, met)
        met |= dict.fromkeys(legal[:16])
        _check_offers(space, state, legal, rng)
        if not legal:
            break
        move = legal[int(rng.integers(len(legal)))]
        state = _check_apply(space, state, move)
    _check_uniform(space, rng)


def _check_start(space: Space[S, M], state: S) -> None:
    claim(
        space.key(space.start()) == space.key(state),
        "start() gives another state at each call",
        "two different keys",
        "the same start state each time",
        "draw random starts in the constructor, from a seed",
    )


def _check_identity(space: Space[S, M], state: S, texts: dict[bytes, str]) -> None:
    key, text = space.key(state), space.dump(state)
    claim(
        isinstance(key, bytes),
        "key() does not return bytes",
        key,
        "bytes",
        "encode the key, e.g. dump(state).encode()",
    )
    claim(
        isinstance(text, str) and len(text.splitlines()) == 1,
        "dump() does not return one line of text",
        text,
        "a str without line breaks, not empty",
        "join the parts with another separator",
    )
    loaded = attempt(
        lambda: space.load(text),
        f"load() fails on dump()'s text {text[:60]!r}",
        "a state",
        "make load() the inverse of dump()",
    )
    claim(
        (space.key(loaded), space.dump(loaded)) == (key, text),
        "load(dump(state)) is another state",
        (space.dump(loaded), text),
        "a state with the same key and dump",
        "make load() the inverse of dump()",
    )
    claim(
        texts.setdefault(key, text) == text,
        "two different states have one key, or one state has two dumps",
        (texts[key], text),
        "one key for each state and one dump for each key",
        "put all that tells states apart into key(), and nothing else into dump()",
    )


def _check_moves(space: Space[S, M], state: S) -> list[M]:
    legal = list(space.moves(state))
    claim(
        list(space.moves(state)) == legal,
        "moves() gives another list at the second call",
        f"{len(legal)} moves the first time",
        "equal moves in the same order",
        "enumerate in a fixed order and compare moves by value (a frozen dataclass does)",
    )
    distinct = attempt(
        lambda: set(legal),
        "moves cannot be told apart",
        "hashable values",
        "make the move a frozen dataclass",
    )
    claim(
        len(distinct) == len(legal),
        "moves() offers a move twice",
        f"{len(legal)} moves, {len(distinct)} different ones",
        "each legal move exactly once",
        "drop the duplicates from the enumeration",
    )
    for move in legal:
        tags = move.tags
        claim(
            isinstance(tags, frozenset) and all(isinstance(tag, str) for tag in tags),
            f"move {move} has tags of the wrong type",
            tags,
            "a frozenset of str",
            "return frozenset({...}) from `tags`",
        )
    return legal


def _check_apply(space: Space[S, M], state: S, move: M) -> S:
    before = (space.key(state), space.dump(state))
    legal = "a new state for each legal move"
    todo = "keep moves() and apply() in agreement"
    after = attempt(
        lambda: space.apply(state, move), f"apply() refuses {move} of moves()", legal, todo
    )
    claim(
        (space.key(state), space.dump(state)) == before,
        f"apply() changed the state that {move} was applied to",
        space.dump(state),
        "the state as it was",
        "build a new state; states are immutable",
    )
    again = attempt(lambda: space.apply(state, move), f"apply() refuses {move} twice", legal, todo)
    copied = attempt(
        lambda: space.apply(space.load(before[1]), move),
        f"apply() refuses {move} on the loaded state",
        legal,
        "dump all that apply() reads",
    )
    keys = (space.key(after), space.key(again), space.key(copied))
    claim(
        len(set(keys)) == 1,
        f"{move} leads to different states when applied again or to the loaded state",
        keys,
        "one and the same key",
        "let apply() depend on the state and the move only",
    )
    return after


def _check_illegal(space: Space[S, M], state: S, legal: list[M], met: Iterable[M]) -> None:
    allowed_here = set(legal)
    for move in met:
        if move in allowed_here:
            continue
        what = f"apply() took {move}, which moves() does not offer here"
        allowed, todo = "IllegalMove", "check the pre-condition in apply() and raise IllegalMove"
        try:
            space.apply(state, move)
        except IllegalMove:
            continue
        except Exception as error:
            raise broken(what, error, allowed, todo) from error
        raise broken(what, "no error", allowed, todo)


def _check_offers(space: Space[S, M], state: S, legal: list[M], rng: np.random.Generator) -> None:
    offered = set(legal)
    for wanted in _filters(legal):
        fitting = [move for move in legal if wanted <= move.tags]
        seed = int(rng.integers(2**32))
        offers = []
        for number, method in enumerate((space.draw, space.propose) * 3):
            move = method(state, np.random.default_rng(seed + number // 2), wanted)
            offers.append(move)
            name = "propose" if number % 2 else "draw"
            claim(
                move is None or move in offered,
                f"{name}() offers a move that moves() does not",
                move,
                f"one of the {len(legal)} legal moves",
                "check legality in draw(), and compare moves by value",
            )
            claim(
                move is None or wanted <= move.tags,
                f"{name}() ignores the wanted tags {sorted(wanted)}",
                move,
                "a move that carries them all, or None",
                "draw among the moves with these tags only",
            )
        claim(
            all((move is None) == (not fitting) for move in offers[1::2]),
            f"propose() answers None for the wanted tags {sorted(wanted)} at the wrong time",
            offers[1::2],
            "None when there is no such move, and only then",
            "fall back to moves() when draw() finds nothing",
        )
        repeated = [
            method(state, np.random.default_rng(seed + number // 2), wanted)
            for number, method in enumerate((space.draw, space.propose) * 3)
        ]
        claim(
            repeated == offers,
            "draw() or propose() differs for the same generator state",
            repeated,
            f"{offers} again",
            "take randomness from the given generator only",
        )


def _filters(legal: list[M]) -> Iterator[Tags]:
    """No filter, one that nothing passes, each whole tag set and each single tag."""
    yield frozenset()
    yield _NO_SUCH_TAG
    sets = sorted({tuple(sorted(move.tags)) for move in legal})[:4]
    yield from (frozenset(tags) for tags in sets if tags)
    yield from (frozenset({tag}) for tag in sorted({tag for tags in sets for tag in tags})[:8])


def _check_uniform(space: Space[S, M], rng: np.random.Generator) -> None:
    state = space.start()
    legal = list(space.moves(state))
    if len(legal) > _UNIFORM_MOVES:
        return
    for wanted in _filters(legal):
        fitting = [move for move in legal if wanted <= move.tags]
        if len(fitting) < 2:
            continue
        counts = [0] * len(fitting)
        for _ in range(_UNIFORM_DRAWS * len(fitting)):
            move = space.propose(state, rng, wanted)
            if move is not None:
                counts[fitting.index(move)] += 1
        square = sum((count - _UNIFORM_DRAWS) ** 2 / _UNIFORM_DRAWS for count in counts)
        claim(
            square <= _chi_square_bound(len(fitting) - 1),
            f"propose() is not uniform over the moves with tags {sorted(wanted)}",
            counts,
            f"about {_UNIFORM_DRAWS} of each",
            "draw each conceivable move with the same probability and reject the illegal ones",
        )


def _chi_square_bound(freedom: int) -> float:
    """Exceeded by chance once in about 3 million (Wilson-Hilferty approximation at 5 sigma)."""
    spread = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - spread + 5.0 * math.sqrt(spread)) ** 3)
