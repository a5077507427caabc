"""Tasks of a campaign: the minimum distance of a pair, and a witness of an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.sass.distances.microkernels.kernel import STREAMS, framed, replace_code
from benchmarks.sass.distances.microkernels.lines import assemble
from benchmarks.sass.distances.microkernels.pairs import Pair
from benchmarks.sass.distances.microkernels.witnesses import VARIANTS, Case, witness_items
from benchmarks.sass.distances.observe import Blind, Condition
from benchmarks.sass.distances.search import ALIGNMENTS, Prober, measure

LAUNCHES = 100
"""Times that each condition of a witness runs."""
WITNESS_CONDITIONS = (
    Condition(0, 1),
    Condition(0, 4),
    Condition(0, 16),
    *(Condition(0, 4, STREAMS.index(name)) for name in ("LDS", "MUFU", "DFMA")),
    *(Condition(0, 8, STREAMS.index(name)) for name in ("LDS", "MUFU", "HMMA")),
)


@dataclass(frozen=True, slots=True)
class DistanceTask:
    """Find the minimum distance of a pair."""

    pair: Pair
    top: int
    """Largest distance of the first run."""
    first_alignment: int
    """Which alignment comes first; tasks differ in it, so that a small share has all of them."""

    @property
    def name(self) -> str:
        """The name of the pair."""
        return self.pair.name

    def run(self, template: bytes, prober: Prober, share: int) -> dict[str, Any]:
        """The summary of the pair's sightings at ``share`` alignments."""
        at = self.first_alignment % len(ALIGNMENTS)
        order = (ALIGNMENTS[at:] + ALIGNMENTS[:at])[:share]
        return measure(self.pair, self.top, template, prober, order).as_json()


@dataclass(frozen=True, slots=True)
class WitnessTask:
    """Count wrong results of a witness case."""

    case: Case

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    def run(self, template: bytes, prober: Prober, share: int) -> dict[str, Any]:
        """Wrong results of each variant under each condition; ``share`` has no effect."""
        try:
            return self._counted(template, prober)
        except Blind as blind:
            return {"case": self.case.name, "problem": str(blind)}

    def _counted(self, template: bytes, prober: Prober) -> dict[str, Any]:
        cubin = replace_code(template, assemble(framed(witness_items(self.case)))[0])
        reference = VARIANTS.index("reference")
        blind = VARIANTS.index("blind")
        rows: list[dict[str, Any]] = []
        for condition in WITNESS_CONDITIONS:
            row = {"condition": str(condition), "results": 0, "sensitive": 0,
                   "covered_wrong": 0, "uncovered_wrong": 0}  # fmt: skip
            for _ in range(LAUNCHES):
                hashes = prober.run(cubin, self.case, condition).hashes
                expected = hashes[reference]
                row["results"] += expected.size
                row["sensitive"] += int((hashes[blind] != expected).sum())
                for name in ("covered", "uncovered"):
                    wrong = hashes[VARIANTS.index(name)] != expected
                    row[f"{name}_wrong"] += int(wrong.sum())
            rows.append(row)
        totals = {key: sum(row[key] for row in rows) for key in rows[0] if key != "condition"}
        return {
            "case": self.case.name,
            "family": self.case.family,
            "is_control": self.case.is_control,
            "guarded": self.case.guarded,
            **totals,
            "conditions": rows,
        }
