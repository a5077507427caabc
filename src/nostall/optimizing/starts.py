"""Changes that a program takes only when it starts: starts with and without them take turns.

Each start measures blocks of its steps, with what is kept inside of it.  The interval resamples
starts before blocks, and the null compares starts of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from nostall.attach.program.changing.loader import KIND
from nostall.attach.program.shadow import CLASSES
from nostall.optimizing.diagnosis import Level
from nostall.optimizing.program import SCRATCH, ProgramEnded
from nostall.optimizing.proof import prove_starts
from nostall.optimizing.recording import Recorder, RecordingEnds, Replayed
from nostall.optimizing.result import Attempt, Result, outcome_of

if TYPE_CHECKING:
    from nostall.optimizing.job import Options

STARTS = 2
"""Starts with a change, and as many without."""
BLOCKS = 12
"""Blocks of steps in a start."""
BLOCK_SECONDS, LEAST_STEPS = 0.25, 4
WARM: Mapping[str, Any] = {"limit_steps": 400, "limit_seconds": 180.0}
Open = Callable[[Mapping[str, Any]], AbstractContextManager[Recorder | Replayed]]
"""Starts the program with settings; what answers."""


def needs_start(level: Level) -> bool:
    """Whether a level's change is made when the program starts."""
    return level.change is not None and level.change["kind"] == KIND


def obstacle(options: Options, command: Sequence[str], files: Sequence[str]) -> str:
    """Why the program is not started again; empty if it may be."""
    if options.run_to_end:
        return "with --run-to-end the first start goes on"
    if files and not (options.again or any(SCRATCH in word for word in command)):
        return f"the program writes files, such as {files[0]}: give --again, or {SCRATCH} in it"
    return ""


class Starts:
    """Measures one change after the other, each on top of what is kept."""

    def __init__(
        self, result: Result, changes: Sequence[Mapping[str, str]], step_seconds: float,
        seed: int, open_start: Open, until: float,
    ) -> None:  # fmt: skip
        """``changes``: those that the kept attempts made in the program."""
        self.result, self.changes, self.seed = result, changes, seed
        self.steps = max(LEAST_STEPS, round(BLOCK_SECONDS / step_seconds))
        self.open, self.until = open_start, until
        self.arm = [a.level.name for a in result.kept if not needs_start(a.level)]

    def attempt(self, level: Level) -> Attempt:
        """Measure ``level``; if it is kept, also all changes beside the original."""
        assert level.change is not None
        try:
            runs = [(self._start(""), self._start(level.change["value"])) for _ in range(STARTS)]
        except (ProgramEnded, RecordingEnds) as end:
            return Attempt(level, "refused", f"a start to measure it: {end}", CLASSES[0])
        before, after = ([run[at]["arm"] for run in runs] for at in (0, 1))
        proof = prove_starts(before, after, self.seed)
        result_class, batches = _batches([run[0]["batches"] for run in runs],
                                         [run[1]["batches"] for run in runs])  # fmt: skip
        outcome, reason = outcome_of(proof)
        if outcome != "kept":
            return Attempt(level, outcome, reason, result_class, proof)
        self.result.together = prove_starts([run[0]["original"] for run in runs], after, self.seed)
        return Attempt(level, outcome, f"{reason}; {batches}", result_class, proof)

    def _start(self, value: str) -> dict[str, Any]:
        """Seconds of a step in the blocks of a start, with the kept changes and without."""
        settings = {KIND: value} if value else {}
        with self.open(settings) as program:
            watched = program.wait_watched(self.until, settings)
            arms: list[list[str]] = [self.arm, []] if self.arm else [[]]
            if self.arm:
                self._ask(program, do="warm", arm=self.arm, **WARM)
            events = self._ask(
                program, do="blocks", arms=arms, blocks=[*range(len(arms))] * BLOCKS,
                steps=self.steps, each=False,
            )  # fmt: skip
        blocks = [event for event in events if event["event"] == "block"]
        if failures := [f for event in events for f in event.get("failures", ())]:
            raise ProgramEnded(f"a kept change fails in it: {failures[0]}")
        found = [[b["seconds"] / self.steps for b in blocks if b["arm"] == arm] for arm in (0, 1)]
        return {"arm": found[0], "original": found[1] or found[0],
                "batches": watched["loader"].get("batches", [])}  # fmt: skip

    def _ask(self, program: Recorder | Replayed, **order: Any) -> list[Mapping[str, Any]]:
        return program.ask(self.until, changes=self.changes, **order)


def _batches(originals: Sequence[Any], changed: Sequence[Any]) -> tuple[str, str]:
    """What a change does to the batches: its class, and what was seen."""
    if any(batches != originals[0] for batches in originals):
        return CLASSES[2], "the original's first batches differ from start to start"
    if any(batches != originals[0] for batches in changed):
        return CLASSES[2], "its first batches are others: random numbers of the workers"
    return CLASSES[0], "its first batches are the original's"
