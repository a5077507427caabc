"""Fusing a function as one readable story: plan, generate, compile, verify, measure, tune, keep.

Ctrl-C ends the stage that it meets; what was found until then is kept, and says so.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from nostall import __version__
from nostall.core import Observer, Run
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.evaluate import H200
from nostall.fusion.graph.regions import regions
from nostall.sass.binary import toolchain
from nostall.tuning.fusing.compiled import Compiled, compiled, tuned
from nostall.tuning.fusing.document import FILE, Document, Pass, TunedBinary
from nostall.tuning.fusing.measured import Measure, timed
from nostall.tuning.fusing.planned import PlannedRegion, check_strategy, pass_of, planned
from nostall.tuning.fusing.target import Asked, Traced
from nostall.tuning.job import Settings

Progress = Callable[[float, str], None]
"""How much is done (0 to 1), and what is being done."""


@dataclass(frozen=True, kw_only=True)
class Fusing:
    """How to fuse; ``tuning`` is how the SASS of every kernel is searched, ``measure`` who times
    it; None: nobody does."""

    strategy: str = "explore"
    arch: str = "sm_90"
    tuning: Settings | None = None
    measure: Measure | None = None
    observers: Sequence[Observer] = field(default=())

    def __post_init__(self) -> None:
        check_strategy(self.strategy)

    def described(self, asked: Asked) -> dict[str, Any]:
        """The settings as they go into ``run.json``."""
        return {
            "target": asked.target,
            "inputs": asked.inputs,
            "dtype": asked.dtype,
            "backward": asked.backward,
            "strategy": self.strategy,
            "arch": self.arch,
            "measure": self.measure is not None,
            "tune_sass": self.tuning is not None,
            "evaluations": self.tuning.evaluations if self.tuning else None,
            "seed": self.tuning.seed if self.tuning else None,
        }


def fuse(asked: Asked, found: Traced, how: Fusing, run: Run, progress: Progress) -> Document:
    """Fuse what was traced; everything goes into the run directory, :data:`FILE` first of all.

    Raises :class:`MissingPart` where Triton is not there.
    """
    story = _Story(found, how, run, progress)
    try:
        story.plan()
        story.compile()
        story.measure()
        story.tune()
    except KeyboardInterrupt:
        story.interrupted = True
    except Exception:
        run.finish("failed", {})
        raise
    document = story.document(asked)
    run.write(FILE, (document.model_dump_json(indent=1) + "\n").encode())
    run.finish("interrupted" if story.interrupted else "done", _result(document))
    return document


class _Story:
    """What was found so far."""

    def __init__(self, found: Traced, how: Fusing, run: Run, progress: Progress) -> None:
        self.found, self.how, self.run, self.progress = found, how, run, progress
        self.regions: dict[str, list[PlannedRegion]] = {name: [] for name in found.passes}
        self.binaries: dict[str, Compiled] = {}
        self.tuned: list[TunedBinary] = []
        self.interrupted = False
        self.measured_on = ""
        self.share = 1 / (2 + (how.measure is not None) + 2 * (how.tuning is not None))

    def plan(self) -> None:
        """Plans and source text, region by region."""
        total = sum(len(regions(captured.graph)) for captured in self.found.passes.values())
        done = 0
        with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
            for name, captured in self.found.passes.items():
                self.progress(0.0, f"planning {name}")
                for region in planned(captured, self.how.strategy, Path(folder)):
                    self.regions[name].append(region)
                    done += 1
                    told = f"planning {name}: region {done} of {total}"
                    self.progress(self.share * done / total, told)

    @property
    def programs(self) -> list[Program]:
        """Different programs; equal ones have equal names."""
        every = (p for found in self.regions.values() for region in found for p in region.programs)
        return list({program.key: program for program in every}.values())

    def compile(self) -> None:
        """Every program for the architecture, and what the verifier says of it."""
        programs = self.programs
        for at, program in enumerate(programs):
            told = f"compiling {at + 1} of {len(programs)}"
            self.progress(self.share * (1 + at / len(programs)), told)
            for made in compiled(program, self.run, self.how.arch):
                self.binaries[made.binary.name] = made

    def measure(self) -> None:
        """Time every kernel that was compiled."""
        if self.how.measure is None:
            return
        every = [made for made in self.binaries.values() if made.source is not None]
        for at, made in enumerate(every):
            told = f"measuring {at + 1} of {len(every)}"
            self.progress(self.share * (2 + at / len(every)), told)
            known, said = timed(made, self.how.measure)
            self.binaries[made.binary.name] = known
            self.measured_on = self.measured_on if known.binary.measured is None else said

    def tune(self) -> None:
        """Search the instructions of every kernel on the model, one after the other."""
        if self.how.tuning is None:
            return
        for at, made in enumerate(self.binaries.values()):
            done = 1 - 2 * self.share * (1 - at / len(self.binaries))
            self.progress(done, f"tuning {at + 1} of {len(self.binaries)}")
            said, stopped = tuned(
                made, self.run, self.how.tuning, self.run.record.command, self.how.observers
            )
            self.tuned.append(said)
            if stopped:
                raise KeyboardInterrupt

    def document(self, asked: Asked) -> Document:
        """All of it; regions that were not reached count as left to PyTorch."""
        passes: list[Pass] = [
            pass_of(name, captured, self.regions[name])
            for name, captured in self.found.passes.items()
        ]
        return Document(
            target=asked.target,
            inputs=self.found.inputs,
            strategy=self.how.strategy,
            arch=self.how.arch,
            hardware=H200.name,
            traced_on=self.found.device,
            status="interrupted" if self.interrupted else "done",
            versions=_versions(),
            passes=tuple(passes),
            binaries=tuple(made.binary for made in self.binaries.values()),
            tuned=tuple(self.tuned),
            measured_on=self.measured_on,
        )


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "triton")}
    return {
        "nostall": __version__,
        "python": platform.python_version(),
        **packages,
        "nvdisasm": toolchain.version("nvdisasm"),
    }


def _result(document: Document) -> dict[str, Any]:
    """The short form that ``run.json`` has."""
    return {
        "kind": "modelled",
        "unit": "s",
        "passes": {
            found.name: {
                "operators": found.operators,
                "launches": found.launches,
                "unfused": found.seconds_unfused,
                "fused": found.seconds,
            }
            for found in document.passes
        },
        "binaries": len(document.binaries),
        "failed": len(document.failed),
        "unknown": len(document.unknown),
        "improved": sum(each.improved for each in document.tuned),
    }
