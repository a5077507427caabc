"""Settings of a tuning run, and the names of files in its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, TypeAdapter, ValidationError

from nostall.core import Budget, Tolerance
from nostall.gpu import MeasurementPlan, TimingMethod

RECIPE_FILE = "recipe.json"
"""File of a run directory that says how its cubin is made again from PTX."""
DEPENDENT_CUBIN_FILE, DEPENDENT_RECIPE_FILE = "dependent.cubin", "dependent_recipe.json"
"""Files of a run directory with the result for dependent launches."""
PTX_FILE = "original.ptx"
"""File of a run directory with the PTX that a recipe starts from."""
UNSAFE_CUBIN_FILE = "refused.cubin"
"""File of a run directory with a result that the verifier rejects."""


ASSEMBLER_TIMING: dict[str, Any] = {"batch_us": 300.0, "rounds": 9}
"""Samples of a candidate of ``assembler``.  Assembling it takes longer than timing it, so the GPU
has time for more samples than for native moves; a result is the sum of many steps of 0.1 %."""


def _file_name(path: Path | None) -> str | None:
    return path.name if path else None


@dataclass(frozen=True)
class Settings:
    """Settings of a tuning run; recorded in ``run.json``."""

    strategy: str = "anneal"
    _: KW_ONLY
    seed: int = 0
    seconds: float | None = None
    """Time limit of the search."""
    evaluations: int | None = None
    """Limit of the search's evaluations."""
    assumed_trips: int = 8
    """Iterations that the SM model assumes for a loop whose trip count is unknown."""
    objective: str = "model"
    """``model``, ``gpu`` or ``recorded``."""
    rounds: int = 200
    """Interleaved samples of the final comparison."""
    checks: int = 16
    """Random inputs of the final comparison."""
    workers: int | None = None
    """Parallel searches, one per GPU."""
    clock: TimingMethod = "graph"
    cold: bool = False
    """Overwrite the L2 cache before each launch."""
    tolerance: Tolerance | None = None
    """Allowed difference of floating-point outputs; None compares bit by bit."""
    sanitizer: bool = False
    """Run the result under compute-sanitizer."""
    policy: Annotated[Path | None, PlainSerializer(_file_name)] = None
    """Policy file that ``ppo`` starts with; a record has its name only."""
    measured_latencies: bool = False
    """Let issue distances measured on a GPU lower mined ones."""
    pdl: str = ""
    """``wait`` or ``trigger``: try dependent launches of the result; empty: do not."""
    anneal_share: float = 0.15
    """Share of the seconds in which ``assembler`` moves native instructions of its winner."""
    native: str = "anneal"
    """Strategy that chooses these moves."""

    @property
    def budget(self) -> Budget:
        """The limits of the search."""
        return Budget(self.seconds, self.evaluations)

    @property
    def measurement_plan(self) -> MeasurementPlan:
        """Settings with which a device checks and times candidates."""
        plan = MeasurementPlan(
            cold=self.cold, clock=self.clock, tolerance=self.tolerance, seed=self.seed
        )
        return replace(plan, **ASSEMBLER_TIMING) if self.strategy == "assembler" else plan

    def record(self) -> dict[str, Any]:
        """The settings as ``run.json`` has them; :func:`settings_of` reads them."""
        recorded: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return recorded


_ADAPTER = TypeAdapter(Settings)
_REQUIRED = ("strategy", "seed", "seconds", "evaluations", "assumed_trips", "objective")
"""Settings that every record has; runs of earlier versions may lack the others."""


def settings_of(record: Mapping[str, Any]) -> Settings:
    """The settings in a record that also has other keys.

    Raises :class:`KeyError` if a required one is missing, and :class:`ValueError` if one has
    another type.
    """
    known = {f.name: record[f.name] for f in fields(Settings) if f.name in record}
    known |= {name: record[name] for name in _REQUIRED}
    try:
        return _ADAPTER.validate_python(known)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
