"""What a newer binary of a kernel lost against an older one, and why: by static properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nostall.tuning.regress.properties import Properties

RECOVERED = 0.9
"""Part of a loss from which on it counts as recovered."""


@dataclass(frozen=True)
class _Metric:
    """A property of which less is better, and how much more counts as a loss."""

    read: Callable[[Properties, Properties], float]
    """Its value in the first argument; the second one is the older binary."""
    tolerance: float
    """Part of the older value that is no loss."""
    weight: float
    """Weight of its relative growth in :func:`excess`."""


def _per_work(value: float, of: Properties, older: Properties) -> float:
    """A count over the loops of ``of``, as if they were unrolled like those of ``older``."""
    if of.loops.work and older.loops.work:
        return value * older.loops.work / of.loops.work
    return value


METRICS: Mapping[str, _Metric] = {
    "local memory accesses": _Metric(lambda p, _: p.local_accesses, 0.0, 4.0),
    "waits for products": _Metric(
        lambda p, old: _per_work(p.loops.product_waits, p, old), 0.0, 4.0
    ),
    "missing warps": _Metric(lambda p, old: max(0, old.warps_per_sm - p.warps_per_sm), 0.0, 4.0),
    "instructions of loops": _Metric(
        lambda p, old: _per_work(p.loops.instructions, p, old), 0.02, 2.0
    ),
    "issue cycles of loops": _Metric(
        lambda p, old: _per_work(p.loops.issue_cycles, p, old), 0.05, 1.0
    ),
    "instructions": _Metric(lambda p, _: p.instructions, 0.05, 0.5),
}
"""Name -> property.  Tolerances and weights are assumed, not measured."""


@dataclass(frozen=True)
class Loss:
    """A property that is worse in the newer binary."""

    name: str
    """A key of :data:`METRICS`."""
    older: float
    newer: float

    def recovered(self, value: float) -> float:
        """The part of the loss that a binary with this value does not have, 0 to 1."""
        return min(1.0, max(0.0, (self.newer - value) / (self.newer - self.older)))

    def __str__(self) -> str:
        return f"{self.name} {self.older:g} → {self.newer:g}"


def find_losses(older: Properties, newer: Properties) -> tuple[Loss, ...]:
    """The properties that are worse in ``newer``, by more than their tolerance."""
    pairs = {name: (m.read(older, older), m.read(newer, older)) for name, m in METRICS.items()}
    return tuple(
        Loss(name, round(old, 2), round(new, 2))
        for name, (old, new) in pairs.items()
        if new > old * (1 + METRICS[name].tolerance) + 0.5
    )


def shares(losses: tuple[Loss, ...], older: Properties, found: Properties) -> dict[str, float]:
    """The recovered part of each loss in ``found``."""
    return {
        loss.name: round(loss.recovered(METRICS[loss.name].read(found, older)), 4)
        for loss in losses
    }


def is_recovered(losses: tuple[Loss, ...], older: Properties, found: Properties) -> bool:
    """Whether ``found`` recovers :data:`RECOVERED` of each loss, and has no other one instead."""
    lost = {loss.name for loss in losses}
    others = {loss.name for loss in find_losses(older, found)} - lost
    return not others and min(shares(losses, older, found).values(), default=1.0) >= RECOVERED


def excess(older: Properties, found: Properties) -> float:
    """How much worse than the older binary ``found`` is, over all properties; 0 is as good."""
    total = 0.0
    for metric in METRICS.values():
        old, new = metric.read(older, older), metric.read(found, older)
        total += metric.weight * max(0.0, new - old) / max(old, 16.0)
    return total


def name_causes(older: Properties, newer: Properties) -> list[str]:
    """What differs between the binaries, the likeliest reason of another time first."""
    if older.words == newer.words:
        return []
    causes = [
        *_spills(older, newer),
        *_warps(older, newer),
        *_waits(older, newer),
        *_unrolled(older, newer),
        *_opcodes(older, newer),
    ]
    if newer.bank_conflicts > older.bank_conflicts:
        causes.append(f"bank conflicts {older.bank_conflicts} → {newer.bank_conflicts}")
    if older.order != newer.order:
        same = sorted(older.order) == sorted(newer.order)
        what = "the same instructions in another order" if same else "another order"
        before, after = (f"{p.loops.load_distance:.1f}" for p in (older, newer))
        loads = f": loads {before} → {after} instructions before their reader"
        causes.append(what + (loads if before != after else ""))
    else:
        causes.append("the same order with other registers, stall counts or waits")
    return causes


def _spills(older: Properties, newer: Properties) -> list[str]:
    if newer.local_accesses <= older.local_accesses:
        return []
    known = older.spill_bytes is not None and newer.spill_bytes is not None
    spilled = f", spilled bytes {older.spill_bytes} → {newer.spill_bytes}" if known else ""
    return [
        f"accesses of local memory {older.local_accesses} → {newer.local_accesses}{spilled}, with "
        f"{older.registers} → {newer.registers} registers"
    ]


def _warps(older: Properties, newer: Properties) -> list[str]:
    if newer.warps_per_sm >= older.warps_per_sm:
        return []
    return [
        f"registers {older.registers} → {newer.registers}: warps of an SM {older.warps_per_sm} → "
        f"{newer.warps_per_sm}, limited by {newer.limit}"
    ]


def _waits(older: Properties, newer: Properties) -> list[str]:
    before, after = older.loops.product_waits, newer.loops.product_waits
    return [f"waits for asynchronous products {before} → {after}"] if after > before else []


def _unrolled(older: Properties, newer: Properties) -> list[str]:
    before, after = older.loops.work, newer.loops.work
    if before == after or not before or not after:
        return []
    return [f"loops unrolled otherwise: {before} → {after} products or accesses in their bodies"]


_NAMED_OPCODES = 5


def _opcodes(older: Properties, newer: Properties) -> list[str]:
    """The opcodes whose number changed most, if the number of instructions grew."""
    if newer.instructions <= older.instructions:
        return []
    names = older.opcodes.keys() | newer.opcodes.keys()
    changes = {name: newer.opcodes.get(name, 0) - older.opcodes.get(name, 0) for name in names}
    most = sorted(changes, key=lambda name: (-abs(changes[name]), name))[:_NAMED_OPCODES]
    parts = [f"{name} {changes[name]:+d}" for name in most if changes[name]]
    return [f"instructions {older.instructions} → {newer.instructions}: {', '.join(parts)}"]
