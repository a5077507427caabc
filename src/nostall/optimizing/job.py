"""The job of ``nostall optimize``: watch, diagnose, try, prove, measure together."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nostall.core.errors import BadInput, ContractBroken
from nostall.optimizing.diagnosis import (
    CHANGES_NUMBERS,
    GRAPHS,
    INCLUDED,
    NATIVE,
    NO_GAIN,
    NOSTALL,
    SEARCH_SECONDS,
    SEARCH_SHARE,
    Facts,
    Level,
    as_planned,
    bound_over,
    bounds_at,
    certificate,
    diagnose,
    with_bound,
    with_numerics,
)  # fmt: skip
from nostall.optimizing.earlier import Earlier, command_files
from nostall.optimizing.ending import (
    INTERRUPTED,
    explain_end,
    forget_kernels,
    gain_of_kernels,
    note_end,
)  # fmt: skip
from nostall.optimizing.engine import EngineJob
from nostall.optimizing.program import (
    SCRATCH,
    Event,
    Program,
    ProgramEnded,
    TimeIsUp,
    written_files,
)
from nostall.optimizing.proof import Proof, block_order, prove
from nostall.optimizing.recording import (
    Entry,
    NotDerived,
    Recorder,
    Recording,
    RecordingEnds,
    Replayed,
    check_same,
)  # fmt: skip
from nostall.optimizing.result import (
    Attempt,
    Result,
    drop,
    gains,
    interval,
    is_clear,
    one_after_the_other,
    outcome_of,
    same_place,
)
from nostall.optimizing.starts import Open, Starts, needs_start, obstacle

BLOCK_SECONDS = 0.25
MIN_ROUNDS, MAX_ROUNDS = 8, 16
LAUNCH_BOUND = 1.3
"""Gain of CUDA graphs from which launches took much of a step."""
MAX_BLOCK_STEPS = 200
WARM_SECONDS, WARM_STEPS = 180.0, 400
TRACE_SECONDS = 30.0
"""For the traced steps after all attempts."""
DECIDED_SECONDS = 200.0
"""The back end nostall compares versions meanwhile; measured so far were 30 to 186 s (H200)."""
REPLAYED = "replayed from a recording: nothing was run; times are of the recorded device,"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    minutes: float = 10.0
    run_to_end: bool = False
    dry_run: bool = False
    again: bool = False
    allow_numerics: bool = False
    """Try changes of numbers, too."""
    step: str | None = None
    watch_steps: int = 30
    watch_seconds: float = 3.0
    seed: int = 0
    first_look: bool = True
    """Let the first rounds decide where they are clear, and leave out what a kept change includes;
    False for recordings of versions that did neither."""
    stored_only: bool = False
    """Try only what the store has for the program's own kernels, and search nothing."""
    quiet_output: bool = False
    """Print what the program prints on standard error, so that standard output is the result."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the half inside the program."""
        names = ("step", "watch_steps", "watch_seconds")
        # Steps are not measured behind a profile: launches can stay slower.
        given = {name: getattr(self, name) for name in names}
        return {**given, "trace": self.dry_run, "engine": {"runs_on": self.run_to_end}}


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that no process stays behind."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@_terminated_as_interrupted()
def optimize(
    command: Sequence[str],
    options: Options,
    say: Say,
    *,
    save: Callable[[Result], None] = lambda _: None,
    earlier: Earlier | None = None,
    starts: list[list[Entry]] | None = None,
    own: Path | None = None,
) -> Result:
    """Run the program, try changes on its own steps, and return what was proven.

    Ctrl-C ends the program and keeps what was proven by then.  ``say`` gets progress, a line each,
    and ``save`` what is known after each attempt.  What ``earlier`` has tried is not tried again.
    ``starts`` gets what was asked and answered in each start of the program, for a recording.
    ``own``: the folder of ``save``, whose files are not the program's.
    Raises :class:`~nostall.core.errors.BadInput` for a command that cannot be run.
    """
    result = Result(list(command), options.step, command_files=command_files(command))
    starts = [] if starts is None else starts
    with Program(command, options.settings, options.quiet_output) as program:
        events = program.events
        job = _Job(_recorded(program, starts), options, say, result)
        job.save, job.earlier = save, earlier
        job.files = lambda: written_files(program, own)
        job.open = partial(_opened, program, command, options, starts)
        try:
            try:
                job.run()
            except TimeIsUp:
                result.limit = _limit(options)
                result.notes.append(_time_is_up(options))
            program.end(exits=not options.run_to_end)
        except KeyboardInterrupt:  # while it ends, too
            result.interrupted = True
            result.notes.append(INTERRUPTED)
            say("interrupted; the program ends at its next step, or at once with Ctrl-C again")
            program.end(exits=True)
        except ProgramEnded as end:
            explain_end(program, end, result, runs_on=options.run_to_end, step=options.step)
        result.exit_code = program.exit_code
        result.files = written_files(program, own)
        note_end(program, result)
    _settle(result)
    is_again = options.again or any(SCRATCH in word for word in command)
    if is_again and _in_program(result):
        say("second start")
        with Program(command, options.settings, options.quiet_output) as program:
            _confirm(_recorded(program, starts), options, say, result)
            program.end(exits=True)
    forget_kernels(result, events)
    return result


def _in_program(result: Result) -> bool:
    """Whether changes are kept that were measured in one start."""
    has_engine = result.facts is not None and "engine" in result.facts.raw
    return not has_engine and bool(result.kept) and not any(map(needs_start, _kept(result)))


def _kept(result: Result) -> list[Level]:
    return [attempt.level for attempt in result.kept]


@contextmanager
def _opened(
    first: Program, command: Sequence[str], options: Options, starts: list[list[Entry]],
    settings: Mapping[str, Any],
) -> Iterator[Recorder]:  # fmt: skip
    """A new start with other settings; ``first`` leaves the GPU to it."""
    first.end(exits=True)
    with Program(command, {**options.settings, **settings}, options.quiet_output) as program:
        yield _recorded(program, starts)
        program.end(exits=True)


def replay(recording: Recording, say: Say) -> Result:
    """The result that follows from what a recorded program answered; nothing is run.

    Raises :class:`~nostall.core.errors.BadInput` if the recorded result does not follow from it.
    """
    try:
        known = NotDerived.model_validate(recording.result)
        if unknown := recording.options.keys() - asdict(Options()).keys():
            raise ValueError(f"unknown option {min(unknown)}")
        given = {"first_look": False, **recording.options}
        options = TypeAdapter(Options).validate_python(given)
        result = Result(
            known.command, options.step, command_files=known.command_files,
            files=known.files_written_while_watched, exit_code=known.program_exit_code,
        )  # fmt: skip
        first, *others = map(Replayed, recording.starts)
        job = _Job(first, options, say, result)
        levels = recording.result["levels"]
        job.plan = {level["name"]: level["minutes"] for level in levels}
        later = iter(others)
        job.open = lambda settings: nullcontext(next(later, Replayed(())))
        try:
            job.run()
        except TimeIsUp:
            result.limit = _limit(options)
            result.notes.append(_time_is_up(options))
        except (ProgramEnded, RecordingEnds):  # the recorded notes say why
            pass
        _settle(result)
        for start in islice(later, 1) if _in_program(result) else ():
            _confirm(start, options, say, result)
        for start in (first, *others):
            start.check_end()
    except (ArithmeticError, AttributeError, AssertionError, LookupError, TypeError, ValueError,
            ContractBroken) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise BadInput(
            f"--replay: an answer of the recording is not one of a program ({reason}); record the "
            "program again"
        ) from error
    check_same(recording, result)
    result.notes = [*known.notes, f"{REPLAYED} by nostall {recording.nostall}"]
    return result


def _recorded(program: Program, starts: list[list[Entry]]) -> Recorder:
    recorder = Recorder(program)
    starts.append(recorder.entries)
    return recorder


def _time_is_up(options: Options) -> str:
    return f"{_limit(options)} are over: more were to be tried"


def _limit(options: Options) -> str:
    return f"--minutes {options.minutes:g}"


def _settle(result: Result) -> None:
    """The gain of all kept changes, if there was no time to measure them together."""
    if result.kept and result.together is None:
        result.together = one_after_the_other(result)
        result.notes.append("the kept changes were measured one after the other, not together")


class _Job:
    """The stages of the job in one started program."""

    def __init__(
        self, program: Recorder | Replayed, options: Options, say: Say, result: Result
    ) -> None:
        self.program, self.options, self.say, self.result = program, options, say, result
        self.facts: Facts
        self.save: Callable[[Result], None] = lambda _: None
        self.earlier: Earlier | None = None
        self.files: Callable[[], list[str]] = lambda: result.files
        self.open: Open
        """Starts the program with other settings."""
        self.changes: list[Mapping[str, str]] = []
        self.plan: Mapping[str, float] = {}
        """Levels of a recorded run in their order, with the minutes that were expected."""
        self.step_seconds = self.original_seconds = 0.0
        """As last measured: with what is kept, and without any change."""

    def watch(self) -> None:
        """Wait until enough steps were seen."""
        self.facts = self.result.facts = Facts(self.program.wait_watched())
        self.until = self.program.clock() + 60 * self.options.minutes
        raw = self.facts.raw
        self.step_seconds = self.original_seconds = self.facts.step_seconds
        self.say(
            f"watched {len(raw['steps'])} steps of {1e3 * self.facts.step_seconds:.4g} ms on "
            f"{raw['device']}; {', '.join(raw['roots']) or 'no module'}"
        )
        if self.earlier is not None:
            self.earlier.check(self.facts)
        if raw["step_is"]:
            self.result.notes.append(f"no optimiser steps: a step is {raw['step_is']}")
        if not raw["main_thread"]:
            self.result.notes.append("steps run in a thread: only it ends at the last step")

    def run(self) -> None:
        """All stages; then the bounds of what was tried, also if the time is up."""
        try:
            self._stages()
        except TimeIsUp:
            self._bound_afterwards()
            raise
        self._bound_afterwards()
        self._try_starts()

    def _stages(self) -> None:
        self.watch()
        if "engine" in self.facts.raw:
            self._run_engines()
            return
        self.result.levels = diagnose(self.facts)
        if self.options.allow_numerics:
            self.result.levels = with_numerics(self.result.levels, self.facts)
        if self.plan:
            self.result.levels = as_planned(self.result.levels, self.plan)
        self.result.certificate = certificate(self.facts, self.result.levels)
        if self.options.dry_run or self.result.certificate:
            return
        if self.facts.never_repeats:
            self.result.notes.append(
                "no two watched steps had the same shapes, so no change can be compared; pad "
                "batches to a few lengths"
            )
            return
        self._take_earlier()
        for level in self.result.levels:
            if level.change in self.changes or needs_start(level):
                continue
            if self._is_included(level) or (self.options.stored_only and level.name != NATIVE):
                continue
            if level.change and not self._is_settled(level) and self._has_time(level):
                attempt = self._attempt(level)
                self._add(attempt)
                self.say(f"{level.name}: {attempt.outcome}, {attempt.reason}")
        if self.result.kept:
            self._together()
        for attempt in self.result.kept:
            if attempt.result_class == CHANGES_NUMBERS:
                self.result.notes.append(
                    f"{attempt.level.name} changes numbers, as --allow-numerics permits: its "
                    "results were not compared with the original's"
                )

    def _bound_afterwards(self) -> None:
        """Trace the original and bound what was tried; not before, as later steps stay slower."""
        result, raw = self.result, self.facts.raw
        if not raw["cuda"] or self.options.run_to_end or not result.attempts or "engine" in raw:
            return
        try:
            until = self.program.clock() + TRACE_SECONDS
            trace = self.program.ask(until, do="trace", changes=self.changes)[-1]["trace"]
        except (ProgramEnded, TimeIsUp, RecordingEnds):  # recordings of earlier versions end here
            return
        facts = result.facts = Facts({**raw, "trace": trace})
        found = bounds_at(facts, self.original_seconds)
        result.levels = [with_bound(level, found.get(level.name)) for level in result.levels]
        gain = 1.0
        for attempt in result.attempts:
            c = attempt.proof and attempt.proof.comparison
            if attempt.outcome not in ("kept", "replaced") or not attempt.proof or not c:
                continue
            # The host's speed varies: the bound is of the step beside which it was measured.
            found = bounds_at(facts, gain * attempt.proof.seconds[0])
            bound = bound_over(gain, found.get(attempt.level.name, attempt.level).bound)
            if bound is not None and c.low > bound:
                result.notes.append(
                    f"{attempt.level.name} gains {interval(c)}, above its bound {bound:.3f}: one "
                    "of them is wrong, an error of nostall; please report this with result.json"
                )
            gain *= c.ratio

    def _run_engines(self) -> None:
        """The stages of a program around vLLM."""
        self.result.files = self.files()
        engines = EngineJob(
            self.facts, self.result, self.options, self.say, self._start_engine,
            self.program.clock, self.until,
        )  # fmt: skip
        if not self.options.dry_run:
            self._take_earlier()
            engines.run(self.save)

    def _start_engine(self, settings: Mapping[str, Any], until: float) -> Event:
        """What a new start shows with other settings of its engines."""
        with self.open({"engine": settings}) as program:
            return program.wait_watched(until, settings)

    def _try_starts(self) -> None:
        """Attempts that need new starts, once the first one has shown all."""
        levels = [level for level in self.result.levels if needs_start(level)]
        tried = [level.change for level in levels if level.change in self.changes]
        if tried or not levels or self.options.dry_run or self.options.stored_only:
            return
        if self.result.certificate or self.facts.never_repeats:
            return
        self.result.files = self.files()
        if reason := obstacle(self.options, self.result.command, self.result.files):
            self.result.notes.append(f"not tried: {levels[0].name}: it needs new starts; {reason}")
            return
        starts = Starts(
            self.result, self.changes, self.step_seconds, self.options.seed, self.open, self.until
        )
        for level in levels:
            if self._has_time(level):
                self.say(f"{level.name}: starts with and without it take turns")
                attempt = starts.attempt(level)
                self._add(attempt)
                self.say(f"{level.name}: {attempt.outcome}, {attempt.reason}")

    def _take_earlier(self) -> None:
        """Add the attempts of the earlier run; their gains hold where it was measured."""
        if self.earlier is None:
            return
        for level in self.result.levels:
            attempt = self.earlier.attempt(level) if level.change else None
            if attempt is not None and level.change is not None:
                self.changes.append(level.change)
                self.result.attempts.append(attempt)
        names = [attempt.level.name for attempt in self.result.attempts]
        self.say(f"tried in the earlier run: {', '.join(names) or 'nothing'}")

    def _is_settled(self, level: Level) -> bool:
        """Whether an earlier attempt makes this one needless: they set the same option."""
        same = any(same_place(attempt.level, level) for attempt in self.result.kept)
        return same and level.change is not None and level.change["kind"] == "optimizer"

    def _is_included(self, level: Level) -> bool:
        """Whether a kept change makes another compilation needless; a note says so."""
        if not self.options.first_look or not level.change or level.change["kind"] != "compile":
            return False
        for kept in self.result.kept:
            reason = ""
            if level.name in INCLUDED.get(kept.level.name, ()):
                reason = f"{kept.level.name} includes it"
            elif (level.name, kept.level.name) == (NOSTALL, GRAPHS) and gains(kept, LAUNCH_BOUND):
                reason = "it would replace CUDA graphs, with which launches no longer take the time"
            if reason:
                self.result.notes.append(f"not tried: {level.name}, because {reason}")
                return True
        return False

    def _has_time(self, level: Level) -> bool:
        """Whether a quarter of the expected time of a level is left; a note says if not.

        The time to measure all kept changes together is not counted as left.
        """
        left = (self.until - self.program.clock()) / 60
        if self.result.kept and self.options.first_look:
            left -= 1.5 * MIN_ROUNDS * 3 * (BLOCK_SECONDS + self.step_seconds) / 60
        if left < level.minutes / 4:
            self.result.limit = _limit(self.options)
            self.result.notes.append(
                f"not tried in --minutes {self.options.minutes:g}: {level.name}, which takes about "
                f"{level.minutes:g} minutes"
            )
        return left >= level.minutes / 4

    def _attempt(self, level: Level) -> Attempt:
        """Check a change, then measure it beside what is kept so far."""
        change = level.change
        assert change is not None
        self.changes.append(change)
        bound = bound_over(self._gain(), level.bound)
        if bound is not None and bound < 1.0 + (NO_GAIN - 1.0) / 5:
            return Attempt(level, "dropped", "its bound is below 1.01", level.result_class)
        self.say(f"{level.name}: checking results on copies")
        kept = [a.level.name for a in self.result.kept]
        more: dict[str, Any] = {}
        if change["kind"] == "native":  # what kept changes launch is searched
            seconds = min(SEARCH_SECONDS, 60 * SEARCH_SHARE * self.options.minutes)
            more = {"arm": kept, "seconds": 0.0 if self.options.stored_only else seconds}
        *others, done = self._ask(do="check", name=level.name, **more)
        kernels = next((e["kernels"] for e in others if e["event"] == "kernels"), ())
        if done["refusal"]:
            return Attempt(level, "refused", done["refusal"], done["result_class"], kernels=kernels)
        before = [a.level.name for a in self.result.kept if not same_place(a.level, level)]
        begin = self.program.clock()
        failures = self._warm([*before, level.name])
        warm = self.program.clock() - begin
        if failures:
            reason = f"it fails in a step: {failures[0]}"
            return Attempt(level, "refused", reason, done["result_class"], kernels=kernels)
        proof = self._compare(kept, [*before, level.name], bound)
        outcome, reason = outcome_of(proof)
        reason += gain_of_kernels(kernels)
        return Attempt(level, outcome, reason, done["result_class"], proof, warm, kernels)

    def _gain(self) -> float:
        """How much faster the kept changes are, each measured on top of those before."""
        proofs = [attempt.proof for attempt in self.result.kept]
        return math.prod(p.comparison.ratio for p in proofs if p and p.comparison)

    def _together(self) -> None:
        """Measure all kept changes beside the original; keep them only if they still gain."""
        names = [attempt.level.name for attempt in self.result.kept]
        self.say(f"together: {', '.join(names)}")
        self._warm(names)
        self.result.together = proof = self._compare([], names, None)
        if not proof.faster:
            drop(self.result, f"together: {outcome_of(proof)[1]}")

    def prove_again(self, levels: Sequence[Level]) -> Proof:
        """In a second start: all of ``levels`` beside the original."""
        self.watch()
        self.changes = [level.change for level in levels if level.change]
        names = [level.name for level in levels]
        self._warm(names)
        return self._compare([], names, None)

    def _warm(self, arm: Sequence[str]) -> list[str]:
        """Run an arm until it compiles no more; the errors of its calls."""
        more = DECIDED_SECONDS if "back end nostall" in arm else 0.0
        order = {"limit_steps": WARM_STEPS, "limit_seconds": more + WARM_SECONDS}
        done = self._ask(do="warm", arm=arm, **order)[-1]
        return list(done["failures"])

    def _compare(
        self, original: Sequence[str], changed: Sequence[str], bound: float | None
    ) -> Proof:
        steps, rounds = self._plan()
        order = block_order(rounds, self.options.seed + self.program.orders)
        first = [MIN_ROUNDS] if self.options.first_look and rounds > MIN_ROUNDS else []
        blocks: list[Mapping[str, Any]] = []
        for begin, end in pairwise([0, *first, rounds]):
            part = order[3 * begin : 3 * end]
            self.say(f"{', '.join(changed)}: {len(part)} interleaved blocks of {steps} steps")
            events = self._ask(
                do="blocks", arms=[original, changed, original], blocks=part, steps=steps,
                each=self.facts.varied,
            )  # fmt: skip
            measured = [event for event in events if event["event"] == "block"]
            if [block["arm"] for block in measured] != part:
                raise ContractBroken("other blocks were measured than those that were ordered")
            blocks += measured
            if failures := events[-1].get("failures"):  # of other ranks, too
                blocks[-1] = {**blocks[-1], "failures": failures}
            proof = prove(blocks, each=self.facts.varied, bound=bound, seed=self.options.seed)
            if is_clear(proof):
                break
        self.step_seconds = proof.seconds[0] or self.step_seconds
        if not original:
            self.original_seconds = self.step_seconds
        if self.program.ranks_agree() and not self.program.ranks_agree(self.program.orders):
            return replace(proof, refusal="the parameters of the ranks differ since then")
        return proof

    def _plan(self) -> tuple[int, int]:
        """Steps of a block and rounds of three blocks."""
        step = self.step_seconds
        steps = max(1, min(MAX_BLOCK_STEPS, round(BLOCK_SECONDS / step)))
        each_round = 3 * (steps + 1) * step
        rounds = int(12 * self.options.minutes / each_round)  # a fifth of the time
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
        if self.program.clock() + rounds * each_round > self.until:
            raise TimeIsUp
        return steps, rounds

    def _ask(self, **order: Any) -> list[Mapping[str, Any]]:
        return self.program.ask(self.until, changes=self.changes, **order)

    def _add(self, attempt: Attempt) -> None:
        """Add an attempt; a kept attempt replaces an earlier kept one of the same option."""
        if attempt.outcome == "kept":
            self.result.attempts = [
                replace(a, outcome="replaced") if same_place(a.level, attempt.level)
                and a.outcome == "kept" else a
                for a in self.result.attempts
            ]  # fmt: skip
        self.result.attempts.append(attempt)
        self.save(self.result)


def _confirm(program: Recorder | Replayed, options: Options, say: Say, result: Result) -> None:
    """Measure the kept changes in a second start of the program."""
    job = _Job(program, options, say, Result(result.command))
    try:
        result.again = job.prove_again(_kept(result))
    except (ProgramEnded, TimeIsUp, RecordingEnds, KeyboardInterrupt) as end:
        reason = str(end) or ("the time is up" if isinstance(end, TimeIsUp) else "interrupted")
        result.notes.append(f"the second start gave no answer: {reason}")
        return
    if not result.again.faster:
        drop(result, f"second start: {outcome_of(result.again)[1]}")
