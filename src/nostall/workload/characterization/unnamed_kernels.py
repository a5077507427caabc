"""Kinds of the kernels that no rule names, learnt from launch parameters and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.workload.traces.launches import KernelLaunches, read_launches
from nostall.workload.traces.work_kinds import matching_rule

if TYPE_CHECKING:
    from nostall.workload.learning.kernels import KernelLabeller

MAX_KERNELS = 10
"""Kernels that are labelled: those with most time."""


@dataclass(frozen=True, slots=True)
class UnnamedKernel:
    """A kernel that no rule names, and its learnt kind."""

    name: str
    seconds: float
    """Of all its launches."""
    kind: str
    probability: float

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.name,
            "seconds": self.seconds,
            "learnt_kind": self.kind,
            "probability": self.probability,
        }


def label_unnamed_kernels(paths: Sequence[Path]) -> tuple[UnnamedKernel, ...]:
    """Label the unnamed kernels with most time of all traces; needs the extra ``learn``.

    A kernel's parameters are those of its launches with most time.  Kernels whose events lack
    launch parameters are left out.
    """
    seconds: dict[str, float] = {}
    longest: dict[str, KernelLaunches] = {}
    for path in paths:
        for launches in read_launches(path):
            if matching_rule(launches.name) is not None:
                continue
            name = launches.name
            seconds[name] = seconds.get(name, 0.0) + launches.seconds
            if name not in longest or launches.seconds > longest[name].seconds:
                longest[name] = launches
    names = sorted(seconds, key=lambda name: -seconds[name])[:MAX_KERNELS]
    if not names:
        return ()
    from nostall.workload.learning.kernels import Launch

    labels = _labeller().label(
        [
            Launch(
                row.grid, row.block, row.registers, row.shared_memory, 1e6 * row.seconds / row.count
            )
            for row in (longest[name] for name in names)
        ]
    )
    return tuple(
        UnnamedKernel(name, seconds[name], label.kind, label.probability)
        for name, label in zip(names, labels, strict=True)
    )


@cache
def _labeller() -> KernelLabeller:
    """The classifier of the labelled kernels that nostall brings."""
    from nostall.workload.learning.kernels import KernelLabeller, read_launches

    with resources.as_file(resources.files("nostall.workload.learning")) as folder:
        return KernelLabeller(read_launches(folder / "kernel_corpus.json.gz"))
