"""Conformance check of a search space."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from nostall.core import IllegalMove, Space, Tags
from nostall.core.space import M, S
from nostall.testing.contract import attempt, contract_error, require

_UNIFORM_MOVES = 100
_UNIFORM_DRAWS = 40
_UNUSED_TAG: Tags = frozenset({"no move of any space carries this tag"})


def check_space(space: Space[S, M], *, seed: int = 0, steps: int = 50) -> None:
    """Take ``steps`` random moves through ``space`` and check each state on the way.

    The contract: ``apply`` is pure; keys and dumps are equal for equal states, and for no others;
    ``moves`` gives no duplicates and keeps its order; ``draw`` and ``propose`` offer only legal
    moves with the wanted tags, depend only on their generator and are uniform (checked if the start
    state has at most 100 moves); illegal moves raise :class:`~nostall.core.IllegalMove`. Raises
    :class:`~nostall.core.ContractBroken` at the first violation.
    """
    rng = np.random.default_rng(seed)
    state = space.start()
    _check_start(space, state)
    texts: dict[bytes, str] = {}
    earlier_moves: dict[M, None] = {}
    for _ in range(steps):
        _check_identity(space, state, texts)
        legal = _check_moves(space, state)
        _check_illegal(space, state, legal, earlier_moves)
        earlier_moves |= dict.fromkeys(legal[:16])
        _check_proposals(space, state, legal, rng)
        if not legal:
            break
        move = legal[int(rng.integers(len(legal)))]
        state = _check_apply(space, state, move)
    _check_uniform(space, rng)


def _check_start(space: Space[S, M], state: S) -> None:
    require(
        space.key(space.start()) == space.key(state),
        "start() returns another state at each call",
        "two different keys",
        "the same start state each time",
        "draw random starts in the constructor, from a seed",
    )


def _check_identity(space: Space[S, M], state: S, texts: dict[bytes, str]) -> None:
    key, text = space.key(state), space.dump(state)
    require(
        isinstance(key, bytes),
        "key() does not return bytes",
        key,
        "bytes",
        "encode the key, e.g. dump(state).encode()",
    )
    require(
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
    require(
        (space.key(loaded), space.dump(loaded)) == (key, text),
        "load(dump(state)) is another state",
        (space.dump(loaded), text),
        "a state with the same key and dump",
        "make load() the inverse of dump()",
    )
    require(
        texts.setdefault(key, text) == text,
        "two different states have one key, or one state has two dumps",
        (texts[key], text),
        "one key for each state and one dump for each key",
        "put all that distinguishes states into key(), and nothing else into dump()",
    )


def _check_moves(space: Space[S, M], state: S) -> list[M]:
    legal = list(space.moves(state))
    require(
        list(space.moves(state)) == legal,
        "moves() returns another list at the second call",
        f"{len(legal)} moves the first time",
        "equal moves in the same order",
        "enumerate in a fixed order and compare moves by value, as a frozen dataclass does",
    )
    distinct = attempt(
        lambda: set(legal),
        "moves are not hashable",
        "hashable values",
        "make the move a frozen dataclass",
    )
    require(
        len(distinct) == len(legal),
        "moves() offers a move twice",
        f"{len(legal)} moves, {len(distinct)} different ones",
        "each legal move exactly once",
        "drop the duplicates from the enumeration",
    )
    for move in legal:
        tags = move.tags
        require(
            isinstance(tags, frozenset) and all(isinstance(tag, str) for tag in tags),
            f"move {move} has tags of the wrong type",
            tags,
            "a frozenset of str",
            "return frozenset({...}) from `tags`",
        )
    return legal


def _check_apply(space: Space[S, M], state: S, move: M) -> S:
    before = (space.key(state), space.dump(state))
    allowed = "a new state for each legal move"
    advice = "keep moves() and apply() in agreement"
    after = attempt(
        lambda: space.apply(state, move), f"apply() rejects {move} of moves()", allowed, advice
    )
    require(
        (space.key(state), space.dump(state)) == before,
        f"apply() changed the state that {move} was applied to",
        space.dump(state),
        "an unchanged state",
        "build a new state; states are immutable",
    )
    repeated = attempt(
        lambda: space.apply(state, move), f"apply() rejects {move} twice", allowed, advice
    )
    from_copy = attempt(
        lambda: space.apply(space.load(before[1]), move),
        f"apply() rejects {move} on the loaded state",
        allowed,
        "dump all that apply() reads",
    )
    keys = (space.key(after), space.key(repeated), space.key(from_copy))
    require(
        len(set(keys)) == 1,
        f"{move} leads to different states if applied twice or to the loaded state",
        keys,
        "one and the same key",
        "let apply() depend on the state and the move only",
    )
    return after


def _check_illegal(space: Space[S, M], state: S, legal: list[M], moves: Iterable[M]) -> None:
    """Check that ``apply`` rejects those of ``moves`` that are not legal in ``state``."""
    legal_moves = set(legal)
    for move in moves:
        if move in legal_moves:
            continue
        problem = f"apply() accepts {move}, which moves() does not offer in this state"
        allowed, advice = "IllegalMove", "check the pre-condition in apply() and raise IllegalMove"
        try:
            space.apply(state, move)
        except IllegalMove:
            continue
        except Exception as error:  # any other error than IllegalMove breaks the contract
            raise contract_error(problem, error, allowed, advice) from error
        raise contract_error(problem, "no error", allowed, advice)


def _check_proposals(
    space: Space[S, M], state: S, legal: list[M], rng: np.random.Generator
) -> None:
    """Check legality, tags and repeatability of ``draw`` and ``propose``."""
    legal_moves = set(legal)
    for required_tags in _tag_filters(legal):
        fitting = [move for move in legal if required_tags <= move.tags]
        seed = int(rng.integers(2**32))
        proposals = []
        for number, method in enumerate((space.draw, space.propose) * 3):
            move = method(state, np.random.default_rng(seed + number // 2), required_tags)
            proposals.append(move)
            name = "propose" if number % 2 else "draw"
            require(
                move is None or move in legal_moves,
                f"{name}() offers a move that moves() does not",
                move,
                f"one of the {len(legal)} legal moves",
                "check legality in draw(), and compare moves by value",
            )
            require(
                move is None or required_tags <= move.tags,
                f"{name}() ignores the wanted tags {sorted(required_tags)}",
                move,
                "a move that carries them all, or None",
                "draw only from the moves with these tags",
            )
        require(
            all((move is None) == (not fitting) for move in proposals[1::2]),
            f"propose() returns None for the wanted tags {sorted(required_tags)} at the wrong time",
            proposals[1::2],
            "None if there is no such move, and only then",
            "fall back to moves() if draw() returns None",
        )
        repeated = [
            method(state, np.random.default_rng(seed + number // 2), required_tags)
            for number, method in enumerate((space.draw, space.propose) * 3)
        ]
        require(
            repeated == proposals,
            "draw() or propose() differs for the same generator state",
            repeated,
            f"{proposals} again",
            "use no randomness but that of the generator passed",
        )


def _tag_filters(legal: list[M]) -> Iterator[Tags]:
    """No filter, a filter that no move passes, a few complete tag sets and their single tags."""
    yield frozenset()
    yield _UNUSED_TAG
    sets = sorted({tuple(sorted(move.tags)) for move in legal})[:4]
    yield from (frozenset(tags) for tags in sets if tags)
    yield from (frozenset({tag}) for tag in sorted({tag for tags in sets for tag in tags})[:8])


def _check_uniform(space: Space[S, M], rng: np.random.Generator) -> None:
    """Check with a chi-square test that ``propose`` is uniform over the legal moves."""
    state = space.start()
    legal = list(space.moves(state))
    if len(legal) > _UNIFORM_MOVES:
        return
    for required_tags in _tag_filters(legal):
        fitting = [move for move in legal if required_tags <= move.tags]
        if len(fitting) < 2:
            continue
        counts = [0] * len(fitting)
        for _ in range(_UNIFORM_DRAWS * len(fitting)):
            move = space.propose(state, rng, required_tags)
            if move is not None:
                counts[fitting.index(move)] += 1
        chi_square = sum((count - _UNIFORM_DRAWS) ** 2 / _UNIFORM_DRAWS for count in counts)
        require(
            chi_square <= _chi_square_bound(len(fitting) - 1),
            f"propose() is not uniform over the moves with tags {sorted(required_tags)}",
            counts,
            f"about {_UNIFORM_DRAWS} of each",
            "draw each conceivable move with the same probability and reject illegal ones",
        )


def _chi_square_bound(degrees: int) -> float:
    """Chi-square value that chance exceeds once in about 3 million, by degrees of freedom.

    The Wilson-Hilferty approximation at 5 sigma.
    """
    variance = 2.0 / (9.0 * degrees)
    return float(degrees * (1.0 - variance + 5.0 * math.sqrt(variance)) ** 3)
