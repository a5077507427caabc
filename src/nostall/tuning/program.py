"""All kernels of a recorded program: their shares of its time, one budget, searches of each.

A kernel's part of the budget follows its share of the time and the mean gain that was measured for
its kind (:mod:`nostall.tuning.room`).  If the program's autotuner chose the kernel's configuration,
others of its list are starts of searches too, and the fastest pair of configuration and binary
is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nostall.core import BadInput
from nostall.core.errors import Interrupted, MissingPart, NostallError
from nostall.core.measurement import Kind
from nostall.sass import Program
from nostall.sass.binary.code_hash import code_sha256
from nostall.tuning.job import TuningResult
from nostall.tuning.launches.recorded import Configuration, RecordedLaunch
from nostall.tuning.room import Kind as KernelKind
from nostall.tuning.room import Search, kind_of, load_gains
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import compile_triton

MIN_SECONDS = 5.0
"""Shortest search that a kernel gets, unless the whole budget is shorter.  Assumed."""
TimeLaunch = Callable[[Source], float]
"""Seconds of one launch of a compiled kernel; raises :class:`NostallError` if it has none."""
TuneKernel = Callable[[Source, float], TuningResult]
"""Searches a kernel for so many seconds."""


@dataclass(frozen=True)
class Start:
    """A compiled kernel from which a search begins."""

    source: Source
    seconds: float
    """Time of one launch."""
    configuration: Configuration | None
    """The one of the program's autotuner; None without one."""

    @property
    def is_own(self) -> bool:
        """Whether the program launches this configuration."""
        return self.configuration is None or self.configuration.chosen

    def __str__(self) -> str:
        return str(self.configuration) if self.configuration is not None else "as launched"


@dataclass(frozen=True)
class ProgramKernel:
    """A kernel of a program, with all launches of the same binary."""

    own: Start
    """As the program launches it; of several launches the one that takes most time."""
    launch: RecordedLaunch
    """The launch of :attr:`own`."""
    launches: int
    total: float
    """Seconds of all launches."""
    kind: KernelKind

    @property
    def name(self) -> str:
        return self.launch.kernel


@dataclass
class KernelResult:
    """What the searches of a kernel found."""

    kernel: ProgramKernel
    share: float
    """Part of the time of all kernels."""
    budget: float
    """Seconds of its searches; 0 if it gets none."""
    found: list[tuple[Start, TuningResult]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Starts and searches that failed, with the reason."""

    @property
    def best(self) -> tuple[Start, TuningResult] | None:
        """The pair with the shortest time that is faster than the program's own binary."""
        pairs = [pair for pair in self.found if _after(pair) < self.kernel.own.seconds]
        return min(pairs, key=_after, default=None)

    @property
    def ratio(self) -> float:
        """Time of the program's own binary / time of the best pair."""
        return self.kernel.own.seconds / _after(self.best) if self.best is not None else 1.0


def _after(pair: tuple[Start, TuningResult]) -> float:
    start, result = pair
    return start.seconds / result.ratio


@dataclass(frozen=True)
class ProgramResult:
    """Results of all kernels, the largest part of the budget first."""

    kernels: tuple[KernelResult, ...]
    refused: tuple[tuple[str, str], ...]
    """(kernel, why it is no part of the searches)."""
    kind: Kind
    """Whether times are modelled or measured."""
    interrupted: bool = False

    @property
    def ratio(self) -> float:
        """Time of all launches of the kernels before / after."""
        after = sum(result.share / result.ratio for result in self.kernels)
        return 1.0 / after if after else 1.0

    def to_json(self) -> dict[str, Any]:
        """The results as a JSON document."""
        return {
            "kind": self.kind,
            "ratio": self.ratio,
            "interrupted": self.interrupted,
            "kernels": [_kernel_record(result) for result in self.kernels],
            "refused": [{"kernel": name, "reason": reason} for name, reason in self.refused],
        }


def _kernel_record(result: KernelResult) -> dict[str, Any]:
    kernel = result.kernel
    best = result.best
    return {
        "kernel": kernel.name,
        "target": kernel.launch.target,
        "kind": kernel.kind,
        "launches": kernel.launches,
        "us": round(1e6 * kernel.own.seconds, 4),
        "share": round(result.share, 6),
        "budget_s": round(result.budget, 3),
        "ratio": result.ratio,
        "configuration": str(best[0]) if best is not None else None,
        "searches": [
            {
                "configuration": str(start),
                "own": start.is_own,
                "us": round(1e6 * start.seconds, 4),
                "ratio": found.ratio,
                "stopped": found.search.stopped,
            }
            for start, found in result.found
        ],
        "notes": result.notes,
    }


def load_kernels(
    launches: Iterable[RecordedLaunch], arch: str, time: TimeLaunch
) -> tuple[list[ProgramKernel], list[tuple[str, str]]]:
    """Compile and time the kernels of a program.

    Launches with the same binary are one kernel.  Also returned: (kernel, reason) of launches that
    cannot be compiled or timed.  Raises :class:`MissingPart` without a GPU or Triton.
    """
    kernels: dict[str, ProgramKernel] = {}
    refused: list[tuple[str, str]] = []
    for launch in launches:
        try:
            start = _compile(launch, launch.own, arch, time)
        except MissingPart:  # such as a GPU: no kernel can be timed
            raise
        except NostallError as error:
            refused.append((launch.kernel, str(error)))
            continue
        program = Program.of_kernel(start.source.cubin, start.source.kernel)
        kind = kind_of(program.kernel(start.source.kernel))
        total = launch.count * start.seconds
        key = code_sha256(start.source.cubin)
        kernel = ProgramKernel(start, launch, launch.count, total, kind)
        if (before := kernels.get(key)) is not None:
            longest = max(before, kernel, key=lambda k: k.launch.count * k.own.seconds)
            count, total = before.launches + launch.count, before.total + total
            kernel = ProgramKernel(longest.own, longest.launch, count, total, kind)
        kernels[key] = kernel
    return list(kernels.values()), refused


def _compile(
    launch: RecordedLaunch, configuration: Configuration | None, arch: str, time: TimeLaunch
) -> Start:
    if launch.file is None:
        raise BadInput(
            "it was launched through the driver, and the file of its binary is not known; give it "
            "alone: nostall tune FILE.cubin"
        )
    given = launch.launch if configuration is None else launch.launch_with(configuration)
    options = launch.options if configuration is None else configuration.compile_options
    source = compile_triton(Path(launch.file), launch.kernel, given, arch, options=options)
    return Start(source, time(source), configuration)


def divide(seconds: float, kernels: Sequence[ProgramKernel], search: Search) -> list[KernelResult]:
    """Divide a budget among kernels: the largest part first, 0 seconds for those with too little.

    A kernel's weight is its share of the time, multiplied by the part of its time that the mean
    measured gain of its kind saves.
    """
    gains, total = load_gains(), sum(kernel.total for kernel in kernels)
    weights = [k.total * (1.0 - 1.0 / gains.mean(search, k.kind)) for k in kernels]
    if not sum(weights):
        weights = [kernel.total for kernel in kernels]
    order = sorted(range(len(kernels)), key=lambda n: (-weights[n], kernels[n].name))
    searched = len(order)
    least = min(MIN_SECONDS, seconds)
    while searched > 1:
        part = weights[order[searched - 1]] / sum(weights[n] for n in order[:searched])
        if seconds * part >= least:
            break
        searched -= 1
    whole = sum(weights[n] for n in order[:searched])
    return [
        KernelResult(
            kernels[n],
            kernels[n].total / total,
            seconds * weights[n] / whole if place < searched else 0.0,
        )
        for place, n in enumerate(order)
    ]


def find_starts(result: KernelResult, arch: str, time: TimeLaunch, search: Search) -> list[Start]:
    """The configurations from which searches begin, the fastest first.

    A configuration that is slower than the fastest one by more than the largest gain that was
    measured for this kind of kernel is left out.  What does not compile or run is noted.
    """
    kernel = result.kernel
    starts = [kernel.own]
    for configuration in kernel.launch.configurations:
        if configuration.chosen:
            continue
        try:
            starts.append(_compile(kernel.launch, configuration, arch, time))
        except NostallError as error:
            result.notes.append(f"{configuration}: {error}")
    starts.sort(key=lambda start: (start.seconds, not start.is_own))
    limit = starts[0].seconds * load_gains().largest(search, kernel.kind)
    count = max(1, math.floor(result.budget / MIN_SECONDS))
    return [start for start in starts if start.seconds <= limit][:count]


def search_kernels(
    results: Sequence[KernelResult],
    starts: Callable[[KernelResult], Sequence[Start]],
    tune: TuneKernel,
) -> Iterator[KernelResult]:
    """Search the kernels that have a part of the budget, one after the other.

    The starts of a kernel share its part equally.  Raises :class:`KeyboardInterrupt` after an
    interrupted search; ``results`` keep what was found.
    """
    for result in results:
        if not result.budget:
            continue
        found = starts(result)
        for start in found:
            try:
                pair = (start, tune(start.source, result.budget / len(found)))
            except Interrupted as error:
                result.notes.append(f"{start}: {error}")
                raise KeyboardInterrupt from error
            except NostallError as error:
                result.notes.append(f"{start}: {error}")
                continue
            result.found.append(pair)
            if pair[1].search.stopped == "interrupted":
                raise KeyboardInterrupt
        yield result
