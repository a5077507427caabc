"""Autotuning: measure the candidate plans of a kernel, and store which one is fastest.

All candidates are timed in interleaved rounds on the same memory; the default plan is timed twice,
so that it is its own null. The candidate with the largest gain must then be faster than the default
plan in a comparison of just these two, because the best of many samples is partly the luckiest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import triton
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nostall.core.errors import one_line
from nostall.core.launch import StrictModel
from nostall.core.measurement import Kind
from nostall.fusion.codegen.autotune.candidates import (
    candidates,
    fastest_measured,
    most_promising,
    neighbours,
)
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.kernel import StitchedKernel, empty_tensor, load_kernel
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.gpu.clock import Clock, Run
from nostall.gpu.synthetic_inputs import synthetic_inputs
from nostall.store.folder import home
from nostall.store.result_files import write_result_file

MAX_CANDIDATES = 8
"""Modelled best plans that are measured, beside the best one of every scheme."""
MAX_ROUNDS = 3
"""Measurements of one kernel: of the candidates, and then of the winner and its neighbours."""
COMPARISON_SECONDS = 0.2
"""Approximate duration of the comparison that confirms a winner; the one of all candidates before
it takes half of that. In shorter comparisons, a gain of 0.4 % is not significant."""


class TuningRecord(StrictModel):
    """Samples of one measurement of candidates, and the candidate that was selected."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = 1
    plans: tuple[str, ...]
    samples: tuple[tuple[float, ...], ...] = ()
    """Seconds of each plan, interleaved; the last row is the first plan again, the null."""
    confirmation: tuple[tuple[float, ...], ...] = Field(default=(), alias="again")
    """Seconds of the first plan, the most promising one and the null, in a second comparison."""
    winner: int = 0
    """Index of the selected plan in ``plans``."""
    kind: Kind
    clock: str
    failure: str | None = None
    """Why nothing was measured; None if there are samples."""


@dataclass
class Autotuner:
    """Selects plans by measurement; a :data:`~nostall.fusion.codegen.generate.PlanChooser`."""

    clock: Clock
    max_candidates: int = MAX_CANDIDATES
    """Modelled best plans of a kernel that are measured, beside the best one of every scheme."""
    seconds: float = COMPARISON_SECONDS
    """Approximate duration of the comparison that confirms a winner."""
    folder: Path | None = None
    """Where records are stored; None for the default store."""
    records: list[TuningRecord] = field(default_factory=list)
    """The records of all measurements so far, new or from the store."""

    def __call__(self, schedule: Schedule) -> PlannedKernel:
        """The fastest measured kernel of a schedule; the default one if something fails.

        The winner of the candidates is measured with its neighbours, which have longer modelled
        times, and so on, in at most :data:`MAX_ROUNDS` measurements.
        """
        kernels = candidates(schedule, self.max_candidates)
        winner, measured = self.fastest_of(kernels), set(kernels)
        for _ in range(1, MAX_ROUNDS):
            near = [kernel for kernel in neighbours(winner) if kernel not in measured]
            faster = self.fastest_of((winner, *near))
            if faster == winner:
                break
            winner, measured = faster, measured | set(near)
        return winner

    def fastest_of(self, kernels: Sequence[PlannedKernel]) -> PlannedKernel:
        """The fastest measured one of kernels with one schedule; the first is the default."""
        if len(kernels) == 1:
            return kernels[0]
        programs = [emit(kernel) for kernel in kernels]
        path = self._record_path(programs)
        record = _read_record(path)
        if record is None or record.plans != tuple(str(kernel.plan) for kernel in kernels):
            record = self._compare(programs)
            write_result_file(path, record.model_dump_json(indent=1, by_alias=True).encode())
        self.records.append(record)
        return kernels[record.winner]

    def _compare(self, programs: Sequence[Program]) -> TuningRecord:
        plans = tuple(str(program.plan) for program in programs)
        record = TuningRecord(plans=plans, kind=self.clock.kind, clock=self.clock.name)
        try:
            # The caller may be a compiler that has a fake tensor mode active.
            with _disable_current_modes(), torch.no_grad():
                return self._measure(programs, record)
        except Exception as error:  # out of memory, compiler errors: the default plan is valid
            return record.model_copy(update={"failure": one_line(error)})

    def _measure(self, programs: Sequence[Program], record: TuningRecord) -> TuningRecord:
        name = programs[0].key
        runs = _make_runs([load_kernel(program, self.folder) for program in programs])
        samples = self.clock.samples(name, [*runs, runs[0]], self.seconds / 2)
        winner = most_promising(samples)
        confirmation: list[list[float]] = []
        if winner:
            confirmation = self.clock.samples(name, [runs[0], runs[winner], runs[0]], self.seconds)
            winner = winner if fastest_measured(confirmation, record.kind) else 0
        update = {
            "samples": tuple(map(tuple, samples)),
            "confirmation": tuple(map(tuple, confirmation)),
            "winner": winner,
        }
        return record.model_copy(update=update)

    def _record_path(self, programs: Sequence[Program]) -> Path:
        """Path of the record: a hash of all candidates, the Triton version and the GPU."""
        lines = [triton.__version__, _device_name()]
        lines += [f"{program.key} {_launches_text(program)}" for program in programs]
        key = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return (self.folder or home() / "fusion") / "races" / f"{key}.json"


def _launches_text(program: Program) -> str:
    """The launches of a program as text. Keys of stored records depend on this text."""
    return str(program.launches).replace("specializes_counts=", "specialised=")


def _read_record(path: Path) -> TuningRecord | None:
    try:
        return TuningRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _make_runs(kernels: Sequence[StitchedKernel]) -> list[Run]:
    """Launches of kernels that compute the same, on common memory; they allocate nothing."""
    graph = kernels[0].program.graph
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    empty = [empty_tensor(graph[i], torch.device("meta")) for i in kernels[0].program.inputs]
    inputs = synthetic_inputs([(x.shape, x.stride(), x.dtype) for x in empty], device)
    outputs = [empty_tensor(graph[i], device) for i in kernels[0].program.outputs]
    return [_make_run(kernel, inputs, outputs, device) for kernel in kernels]


def _make_run(
    kernel: StitchedKernel, inputs: list[Tensor], outputs: list[Tensor], device: torch.device
) -> Callable[[], object]:
    workspaces = {
        space.name: torch.empty(space.elements, dtype=getattr(torch, space.dtype), device=device)
        for space in kernel.program.workspaces
    }
    return lambda: kernel.launch(inputs, outputs, workspaces)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
