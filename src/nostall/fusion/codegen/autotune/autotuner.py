"""A race of a kernel's plans on a GPU: measured once, kept in the store, the same ever after.

All candidates run in turns on the same memory, with the modelled first choice a second time as the
null.  The plan that gained most has to be faster beside the first choice alone, in a comparison of
their own: the best of several is partly the luckiest.
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
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.gpu.clock import Clock, Run
from nostall.store.folder import home
from nostall.store.result_files import write_result_file

MAX_CANDIDATES = 8
"""Modelled best plans that race, beside the best of every scheme (docs/results/fusion-cost-model.md
says what fewer or more would be worth)."""
MAX_ROUNDS = 3
"""Races of one kernel: of the candidates, and of a winner with its neighbours."""
COMPARISON_SECONDS = 0.2
"""About how long the comparison takes that confirms a winner, and half of it the one before, of all
of them.  With fewer rounds what is 0.4 % faster was not taken."""


class TuningRecord(StrictModel):
    """Seconds of each of ``plans``, taken in turns; the last row of samples is the first plan once
    more.  ``confirmation``: the first choice, the likeliest plan and the null in a second comparison."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = 1
    plans: tuple[str, ...]
    samples: tuple[tuple[float, ...], ...] = ()
    confirmation: tuple[tuple[float, ...], ...] = Field(default=(), alias="again")
    winner: int = 0
    kind: Kind
    clock: str
    failure: str | None = None


@dataclass
class Autotuner:
    """A choice of plans (:data:`~nostall.fusion.codegen.generate.PlanChooser`) by measurement.

    ``max_candidates`` of the modelled best plans of each kernel race beside the best of every scheme; the
    comparison that confirms a winner takes about ``seconds``.  Records lie in ``folder``, by
    default that of the store; ``records`` grows with every race.
    """

    clock: Clock
    max_candidates: int = MAX_CANDIDATES
    seconds: float = COMPARISON_SECONDS
    folder: Path | None = None
    records: list[TuningRecord] = field(default_factory=list)

    def __call__(self, schedule: Schedule) -> KernelPlan:
        """The plan that runs.  Whatever fails leaves the modelled first choice.

        The winner meets its neighbours, which the model thought less of, and so on: at most
        :data:`MAX_ROUNDS` times in all.
        """
        every = candidates(schedule, self.max_candidates)
        winner, met = self.fastest_of(schedule, every), set(every)
        for _ in range(1, MAX_ROUNDS):
            near = [plan for plan in neighbours(schedule, winner) if plan not in met]
            faster = self.fastest_of(schedule, (winner, *near))
            if faster == winner:
                break
            winner, met = faster, met | set(near)
        return winner

    def fastest_of(self, schedule: Schedule, every: Sequence[KernelPlan]) -> KernelPlan:
        """The same, where the candidates are known."""
        if len(every) == 1:
            return every[0]
        programs = [emit(schedule, plan) for plan in every]
        place = self._record_path(programs)
        found = _read_record(place)
        if found is None or found.plans != tuple(map(str, every)):
            found = self._compare(programs)
            write_result_file(place, found.model_dump_json(indent=1, by_alias=True).encode())
        self.records.append(found)
        return every[found.winner]

    def _compare(self, programs: Sequence[Program]) -> TuningRecord:
        plans = tuple(str(program.plan) for program in programs)
        record = TuningRecord(plans=plans, kind=self.clock.kind, clock=self.clock.name)
        try:
            # Whoever compiles may have fake tensors about.
            with _disable_current_modes(), torch.no_grad():
                return self._measure(programs, record)
        except Exception as error:  # memory, a compiler: a race is worth no failure
            reason = (str(error).strip().splitlines() or [""])[0]
            return record.model_copy(update={"failure": f"{type(error).__name__}: {reason[:200]}"})

    def _measure(self, programs: Sequence[Program], record: TuningRecord) -> TuningRecord:
        name = programs[0].key
        runs = _make_runs([load_kernel(program, self.folder) for program in programs])
        samples = self.clock.samples(name, [*runs, runs[0]], self.seconds / 2)
        winner = most_promising(samples)
        again: list[list[float]] = []
        if winner:
            again = self.clock.samples(name, [runs[0], runs[winner], runs[0]], self.seconds)
            winner = winner if fastest_measured(again, record.kind) else 0
        update = {
            "samples": tuple(map(tuple, samples)),
            "confirmation": tuple(map(tuple, again)),
            "winner": winner,
        }
        return record.model_copy(update=update)

    def _record_path(self, programs: Sequence[Program]) -> Path:
        """Where the answer is kept: by the content of all candidates and by who runs them."""
        lines = [triton.__version__, _device_name()]
        lines += [f"{program.key} {_launches_text(program)}" for program in programs]
        key = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return (self.folder or home() / "fusion") / "races" / f"{key}.json"


def _launches_text(program: Program) -> str:
    """The launches of a program as text. Stored records are found by it, so it must not change."""
    return str(program.launches).replace("specializes_counts=", "specialised=")


def _read_record(place: Path) -> TuningRecord | None:
    try:
        return TuningRecord.model_validate_json(place.read_bytes())
    except (OSError, ValidationError):
        return None


def _make_runs(kernels: Sequence[StitchedKernel]) -> list[Run]:
    """Launches of kernels that do the same, on common memory; they allocate nothing."""
    graph = kernels[0].program.graph
    device = torch.device(_device())
    # The program's own random numbers go on as if nothing had been run.
    draw = torch.Generator(device).manual_seed(0)
    inputs = [fill_tensor(empty_tensor(graph[i], device), draw) for i in kernels[0].program.inputs]
    outputs = [empty_tensor(graph[i], device) for i in kernels[0].program.outputs]
    return [_make_run(kernel, inputs, outputs, device) for kernel in kernels]


def _make_run(
    kernel: StitchedKernel, inputs: list[Tensor], outputs: list[Tensor], device: torch.device
) -> Callable[[], object]:
    spaces = {
        space.name: torch.empty(space.elements, dtype=getattr(torch, space.dtype), device=device)
        for space in kernel.program.workspaces
    }
    return lambda: kernel.launch(inputs, outputs, spaces)


def fill_tensor(value: Tensor, draw: torch.Generator) -> Tensor:
    """Numbers as they come in programs; those of integers are small, as places in a row."""
    if not value.is_floating_point():
        return value.random_(0, 2, generator=draw)
    return value.copy_(torch.randn(value.shape, device=value.device, generator=draw))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
