"""Ablation of a result of the assembler search: what each of its changes is worth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from nostall.core import Measurement
from nostall.ptx.program.blocks import Unit
from nostall.ptx.schedule.state import PtxState
from nostall.tuning.assembler.description import describe_levers
from nostall.tuning.assembler.space import AssemblerSpace

MAX_PAIRS = 24
"""Pairs of instructions that are measured: those in blocks whose order matters most."""
_REPEATS = 3
"""Evaluations of one state; the median counts."""
_MAX_TEXT = 60
"""Characters of an instruction in a description."""


class Evaluates(Protocol):
    """The part of an objective that an ablation needs."""

    def prepare(self, states: Sequence[PtxState]) -> object:
        """Build states in parallel."""

    def evaluate(self, states: Sequence[PtxState]) -> list[Measurement]: ...


@dataclass(frozen=True)
class Effect:
    """One change of the result, undone alone."""

    change: str
    """The change in words."""
    block: int | None
    """Number of the block; None for a setting."""
    loss_percent: float | None
    """Slowdown without this change, in per cent of the result's time; None if the state without it
    could not be measured.  The values need not add up, because changes depend on each other."""


@dataclass(frozen=True)
class Ablation:
    """The effects of all settings and blocks, and of single pairs of instructions."""

    effects: tuple[Effect, ...]
    """Settings and orders of whole blocks, largest loss first."""
    pairs: tuple[Effect, ...]
    """Neighbours in the order of the result that the original has the other way round."""
    num_pairs: int
    """Such neighbours in all; at most :data:`MAX_PAIRS` were measured."""
    noise_percent: float
    """Difference of two measurements of the result itself."""

    def to_json(self) -> dict[str, Any]:
        """The field ``ablation`` of the result."""

        def rows(effects: Sequence[Effect]) -> list[dict[str, Any]]:
            return [
                {"change": e.change, "block": e.block, "lost_percent": e.loss_percent}
                for e in effects
            ]

        return {
            "effects": rows(self.effects),
            "pairs": rows(self.pairs),
            "num_pairs": self.num_pairs,
            "noise_percent": self.noise_percent,
        }


def ablate(space: AssemblerSpace, objective: Evaluates, best: PtxState) -> Ablation | None:
    """Undo each change of ``best`` alone and measure the loss; None if ``best`` has no time."""
    first, second = _value(objective, best), _value(objective, best)
    if first is None or second is None:
        return None
    value = (first + second) / 2
    effects = _measure(objective, [*_settings(space, best), *_blocks(space, best)], value)
    losses = {e.block: e.loss_percent or 0.0 for e in effects if e.block is not None}
    pairs = sorted(_pairs(space, best), key=lambda pair: -losses[pair[1]])
    measured = _measure(objective, pairs[:MAX_PAIRS], value)
    noise = 100.0 * abs(first - second) / value
    return Ablation(tuple(effects), tuple(measured), len(pairs), noise)


_Undone = tuple[str, int | None, PtxState]
"""A change in words, its block, and the state without it."""


def _settings(space: AssemblerSpace, best: PtxState) -> Iterator[_Undone]:
    """The result without one of its settings."""
    start = space.start()
    for field in fields(PtxState):
        kept = getattr(start, field.name)
        if field.name == "orders" or getattr(best, field.name) == kept:
            continue
        alone = replace(start, **{field.name: getattr(best, field.name)})
        undone = replace(best, **{field.name: kept})
        yield "; ".join(describe_levers(alone)), None, undone


def _blocks(space: AssemblerSpace, best: PtxState) -> Iterator[_Undone]:
    """The result with the original order of one block."""
    for number, order in enumerate(best.orders):
        if order:
            moved = sum(unit != at for at, unit in enumerate(order))
            text = f"order of block {number}, {moved} of {len(order)} instructions moved"
            yield text, number, space.ptx.with_orders(best, {number: tuple(range(len(order)))})


def _pairs(space: AssemblerSpace, best: PtxState) -> Iterator[tuple[str, int, PtxState]]:
    """The result with two neighbours the way round that they have in the original."""
    for number, order in enumerate(best.orders):
        units = space.ptx.blocks[number].units
        for at in range(len(order) - 1):
            first, second = order[at], order[at + 1]
            swapped = (*order[:at], second, first, *order[at + 2 :])
            if first > second and space.ptx.graphs[number].is_legal(swapped):
                text = f"{_text(space, units[first])} before {_text(space, units[second])}"
                yield text, number, space.ptx.with_orders(best, {number: swapped})


def _text(space: AssemblerSpace, unit: Unit) -> str:
    """The text of a unit, in one line."""
    words = " ".join(space.ptx.module.text[unit.start : unit.end].split())
    words = words.partition("//")[0].rstrip("; ")
    return words if len(words) <= _MAX_TEXT else words[: _MAX_TEXT - 1] + "…"


def _measure(
    objective: Evaluates, changes: Sequence[tuple[str, int | None, PtxState]], value: float
) -> list[Effect]:
    """The effects of the changes, largest loss first."""
    objective.prepare([undone for _, _, undone in changes])
    effects = []
    for text, block, undone in changes:
        time = _value(objective, undone)
        loss = None if time is None else 100.0 * (time - value) / value
        effects.append(Effect(text, block, loss))
    return sorted(effects, key=lambda e: (e.loss_percent is None, -(e.loss_percent or 0.0)))


def _value(objective: Evaluates, state: PtxState) -> float | None:
    """The median time of a state, or None if it cannot be measured."""
    measurements = objective.evaluate([state] * _REPEATS)
    if any(measurement.failure is not None for measurement in measurements):
        return None
    return statistics.median(measurement.value for measurement in measurements)
