"""The job of ``nostall optimize``: watch, diagnose, try, prove, measure together."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nostall.optimizing.diagnosis import (
    GPU_NOT_MEASURED,
    NO_GAIN,
    Facts,
    Level,
    certificate,
    diagnose,
)
from nostall.optimizing.program import (
    SCRATCH,
    Program,
    ProgramEnded,
    TimeIsUp,
    written_files,
)
from nostall.optimizing.proof import Proof, block_order, prove
from nostall.optimizing.result import Attempt, Result, interval

BLOCK_SECONDS = 0.25
MIN_ROUNDS, MAX_ROUNDS = 8, 16
MAX_BLOCK_STEPS = 200
WARM_SECONDS = {"inductor": 180.0, "nostall": 240.0}
"""By back end; the latter compares versions in the background meanwhile."""
WARM_STEPS = 400
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    minutes: float = 10.0
    run_to_end: bool = False
    dry_run: bool = False
    again: bool = False
    allow_numerics: bool = False
    step: str | None = None
    watch_steps: int = 30
    watch_seconds: float = 3.0
    seed: int = 0
    quiet_output: bool = False
    """Print what the program prints on standard error, so that standard output is the result."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the half inside the program."""
        return {
            "step": self.step,
            "watch_steps": self.watch_steps,
            "watch_seconds": self.watch_seconds,
        }


def optimize(command: Sequence[str], options: Options, say: Say) -> Result:
    """Run the program, try changes on its own steps, and return what was proven.

    Ctrl-C ends the program and keeps what was proven by then.  ``say`` gets progress, a line each.
    Raises :class:`~nostall.core.errors.BadInput` for a command that cannot be run.
    """
    result = Result(list(command), options.step)
    with (
        _terminated_as_interrupted(),
        Program(command, options.settings, options.quiet_output) as program,
    ):
        job = _Job(program, options, say, result)
        try:
            job.run()
            program.end(exits=not options.run_to_end)
        except KeyboardInterrupt:
            result.interrupted = True
            result.notes.append("interrupted: what was proven before is kept")
            program.end(exits=True)
        except ProgramEnded as end:
            _explain_end(program, end, options, result)
        except TimeIsUp:
            result.notes.append(
                f"--minutes {options.minutes:g} are over; later levels are not tried"
            )
            program.end(exits=not options.run_to_end)
        result.exit_code = program.exit_code
        result.files = written_files(program)
        _note_end(program, result)
    if options.dry_run or not result.kept:
        return result
    if options.again or any(SCRATCH in word for word in command):
        _confirm(command, options, say, result)
    return result


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that no process stays behind."""
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)


class _Job:
    """The stages of the job in one started program."""

    def __init__(self, program: Program, options: Options, say: Say, result: Result) -> None:
        self.program, self.options, self.say, self.result = program, options, say, result
        self.until = time.monotonic() + 60 * options.minutes
        self.facts: Facts
        self.changes: list[Mapping[str, str]] = []
        self.step_seconds = 0.0
        """Of the original, as last measured."""

    def watch(self) -> None:
        """Wait until enough steps were seen."""
        self.facts = self.result.facts = Facts(self.program.wait_watched())
        raw = self.facts.raw
        self.step_seconds = self.facts.step_seconds
        self.say(
            f"watched {len(raw['steps'])} steps of {1e3 * self.facts.step_seconds:.4g} ms on "
            f"{raw['device']}; {', '.join(raw['roots']) or 'no module'}"
        )
        if raw["cuda"]:
            self.result.notes.append(GPU_NOT_MEASURED)
        if not raw["main_thread"]:
            self.result.notes.append(
                "steps run in a thread: only that thread ends at the last step"
            )

    def run(self) -> None:
        """All stages."""
        self.watch()
        self.result.levels = diagnose(self.facts, allow_numerics=self.options.allow_numerics)
        self.result.certificate = certificate(self.facts, self.result.levels)
        if self.options.dry_run or self.result.certificate:
            return
        if self.facts.never_repeats:
            self.result.notes.append(
                "no two watched steps had the same shapes, so no change can be compared; pad "
                "batches to a few lengths"
            )
            return
        for level in self.result.levels:
            if level.change and not self._is_settled(level):
                self.result.attempts.append(self._attempt(level))
                self._say_attempt()
        if self.result.kept:
            self._together()

    def _is_settled(self, level: Level) -> bool:
        """Whether an earlier attempt makes this one needless: they set the same option."""
        assert level.change is not None
        kind = level.change["kind"]
        return kind == "optimizer" and any(
            attempt.level.change and attempt.level.change["kind"] == kind
            for attempt in self.result.kept
        )

    def _attempt(self, level: Level) -> Attempt:
        """Check a change, then measure it beside what is kept so far."""
        change = level.change
        assert change is not None
        self.changes.append(change)
        if level.bound is not None and level.bound < 1.0 + (NO_GAIN - 1.0) / 5:
            return Attempt(level, "dropped", "its bound is below 1.01", level.result_class)
        self.say(f"{level.name}: checking results on copies")
        done = self._ask(do="check", name=level.name)[-1]
        if done["refusal"]:
            return Attempt(level, "refused", done["refusal"], done["result_class"])
        if done["result_class"] == "changes numbers" and not self.options.allow_numerics:
            return Attempt(
                level, "refused", done["detail"] or "it changes numbers", "changes numbers"
            )
        before = self._arm([a.level for a in self.result.kept if not _same_place(a.level, level)])
        kept = self._arm([a.level for a in self.result.kept])
        begin = time.monotonic()
        self._warm([*before, level.name], WARM_SECONDS.get(change["value"], 30.0))
        warm = time.monotonic() - begin
        proof = self._compare(kept, [*before, level.name], level.bound)
        outcome, reason = _outcome(proof)
        return Attempt(level, outcome, reason, done["result_class"], proof, warm)

    def _together(self) -> None:
        """Measure all kept changes beside the original; keep them only if they still gain."""
        names = self._arm([attempt.level for attempt in self.result.kept])
        self.say(f"together: {', '.join(names)}")
        self._warm(names, 60.0)
        self.result.together = proof = self._compare([], names, None)
        if not proof.faster:
            _drop(self.result, f"together: {_outcome(proof)[1]}")

    def prove_again(self, levels: Sequence[Level]) -> Proof:
        """In a second start: all of ``levels`` beside the original."""
        self.watch()
        self.changes = [level.change for level in levels if level.change]
        names = self._arm(levels)
        self._warm(names, 180.0)
        return self._compare([], names, None)

    def _arm(self, levels: Sequence[Level]) -> list[str]:
        """The names of the changes of an arm; of two at one place the later one holds."""
        last = [
            level for at, level in enumerate(levels)
            if not any(_same_place(level, later) for later in levels[at + 1 :])
        ]  # fmt: skip
        return [level.name for level in last]

    def _warm(self, arm: Sequence[str], seconds: float) -> None:
        self._ask(do="warm", arm=arm, limit_steps=WARM_STEPS, limit_seconds=seconds)

    def _compare(
        self, original: Sequence[str], changed: Sequence[str], bound: float | None
    ) -> Proof:
        steps, rounds = self._plan()
        order = block_order(rounds, self.options.seed + self.program.last_order)
        self.say(f"{', '.join(changed)}: {len(order)} interleaved blocks of {steps} steps")
        events = self._ask(
            do="blocks", arms=[original, changed, original], blocks=order, steps=steps,
            each=self.facts.varied,
        )  # fmt: skip
        blocks = [event for event in events if event["event"] == "block"]
        proof = prove(blocks, each=self.facts.varied, bound=bound, seed=self.options.seed)
        self.step_seconds = proof.seconds[0] or self.step_seconds
        if self.program.ranks_agree() and not self.program.ranks_agree(self.program.last_order):
            return replace(
                proof, refusal="the ranks' parameters differ since: gradients are not reduced"
            )
        return proof

    def _plan(self) -> tuple[int, int]:
        """Steps of a block and rounds of three blocks."""
        step = self.step_seconds
        steps = max(1, min(MAX_BLOCK_STEPS, round(BLOCK_SECONDS / step)))
        each_round = 3 * (steps + 1) * step
        rounds = int(12 * self.options.minutes / each_round)  # a fifth of the time
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
        if time.monotonic() + rounds * each_round > self.until:
            raise TimeIsUp
        return steps, rounds

    def _ask(self, **order: Any) -> list[Mapping[str, Any]]:
        return self.program.ask(self.until, changes=self.changes, **order)

    def _say_attempt(self) -> None:
        attempt = self.result.attempts[-1]
        self.say(f"{attempt.level.name}: {attempt.outcome}, {attempt.reason}")


def _same_place(one: Level, other: Level) -> bool:
    """Whether two changes set the same option, as two back ends do."""
    return bool(one.change and other.change and one.change["kind"] == other.change["kind"])


def _outcome(proof: Proof) -> tuple[Any, str]:
    if proof.refusal:
        return "refused", proof.refusal
    assert proof.comparison is not None
    numbers = interval(proof.comparison)
    if proof.faster:
        return "kept", f"{numbers} times as fast"
    null = f"null [{proof.comparison.null_low:.3f}, {proof.comparison.null_high:.3f}]"
    return "dropped", f"not faster: {numbers}, {null}"


def _drop(result: Result, reason: str) -> None:
    result.attempts = [
        replace(a, outcome="dropped", reason=f"{a.reason}; {reason}") if a.outcome == "kept" else a
        for a in result.attempts
    ]


def _confirm(command: Sequence[str], options: Options, say: Say, result: Result) -> None:
    """Start the program a second time and measure the kept changes there."""
    say("second start")
    levels = [attempt.level for attempt in result.kept]
    with Program(command, options.settings, options.quiet_output) as program:
        job = _Job(program, options, say, Result(list(command)))
        try:
            result.again = job.prove_again(levels)
            program.end(exits=True)
        except (ProgramEnded, TimeIsUp, KeyboardInterrupt) as end:
            result.notes.append(f"the second start gave no answer: {end or type(end).__name__}")
            program.end(exits=True)
            return
    if not result.again.faster:
        _drop(result, f"second start: {_outcome(result.again)[1]}")


def _explain_end(program: Program, end: ProgramEnded, options: Options, result: Result) -> None:
    """Say why there is nothing, or not everything, if the program ended by itself."""
    if program.process.poll() is None:  # nostall's half stopped; the program runs on
        result.notes.append(str(end))
        program.wait() if options.run_to_end else program.end(exits=True)
        return
    events = [event for event in program.events if event["event"] in ("start", "exit", "watched")]
    steps = max((event.get("steps", 0) for event in program.events if event["event"] == "exit"),
                default=0)  # fmt: skip
    if not events:
        reason = (
            "no Python process of the program was watched: it runs no Python, or with -I, -E or "
            "-S, which leave nostall's start-up module out"
        )
    elif result.facts is not None:
        reason = "the program ended before all levels were tried; a longer run shows more"
    elif options.step and not steps:
        reason = (
            f"--step {options.step} was never called: name a module that the program imports and "
            "a function in it; functions of the script itself are not found"
        )
    elif steps:
        reason = f"the program ended after {steps} steps; at least 10 are needed, give it more"
    else:
        reason = (
            "no step was seen: no optimiser of torch.optim stepped; name the function of a step "
            "with --step module:function"
        )
    result.notes.append(reason)
    if program.exit_code:
        result.notes.append(f"the program ended with exit code {program.exit_code}")


def _note_end(program: Program, result: Result) -> None:
    if program.was_killed:
        result.notes.append(
            "the program outlived its last step by 10 s (a thread, a child, `except:` or a compilation), so its "
            "process group was ended"
        )
    elif program.was_ended and program.process.returncode:
        result.notes.append(
            f"the program ended with exit code {program.process.returncode} after its last step"
        )
    if result.files and program.was_ended:
        result.notes.append(
            f"the program wrote files before it was ended, such as {result.files[0]}; they are of "
            "an incomplete run"
        )
