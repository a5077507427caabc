"""Programs around vLLM: each set of engine arguments is a start of its own, compared by calls.

Starts take turns.  A sample is the seconds of one call of ``generate`` over the tokens that it
generated; the interval resamples starts before calls, and the null compares starts of the original.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from nostall.attach.program.distances import SMALL, SUMMED
from nostall.attach.program.shadow import CLASSES
from nostall.optimizing.diagnosis import Facts, Level
from nostall.optimizing.program import Event, ProgramEnded, TimeIsUp
from nostall.optimizing.proof import Proof, prove_starts
from nostall.optimizing.result import Attempt, Result, drop, interval, outcome_of
from nostall.optimizing.starts import obstacle

if TYPE_CHECKING:
    from nostall.optimizing.job import Options, Say

KIND = "engine"
"""Kind of these changes; their value is ``argument=value``."""
ARGUMENT = re.compile(
    r"(?:attention_backend=CUSTOM|enforce_eager=false|enable_prefix_caching=true|"
    r"async_scheduling=true|(?:max_cudagraph_capture_size|max_num_seqs|max_num_batched_tokens)="
    r"[1-9]\d{0,5})"
)
"""Values of a change."""
STARTS, FINAL_STARTS = 2, 3
"""Starts with and without a change that is kept, and with all kept ones together."""
PROMISING = 1.01
"""Ratio of the first start with a change below which it is dropped."""
OTHER_TOKENS = 0.02
"""Share by which the number of generated tokens may differ."""
MUCH_SHARED = 0.1
"""Share of what decodes read that sequences have in common from which it is read once."""
LARGE_STEP = 16_384
"""Tokens of a step that vLLM takes itself for ``LLM`` on large GPUs."""
MOST_SEQUENCES = 1024
Arm = tuple[str, ...]
"""Names of the changes of a start."""
Engine = Mapping[str, Any]
"""What one start has shown of its engine and calls."""


def argument(value: str) -> tuple[str, Any]:
    """The engine argument of a change's value, such as ``max_num_seqs=512``."""
    name, _, text = value.partition("=")
    found = {"true": True, "false": False}.get(text, text)
    return name, int(text) if text.isdigit() else found


def engine_levels(facts: Facts) -> list[Level]:
    """Changes of engine arguments, those to try first, then those that are not tried and why."""
    engine = facts.raw["engine"]
    seconds = max(20.0, 6 * facts.step_seconds)
    found = [
        Level(
            name=name, touches=touches, share=share, bound=None,
            reason=f"no bound: {why}" if value else why, expected=expected if value else "-",
            result_class=CLASSES[1] if value else "-", minutes=2 * seconds / 60 if value else 0.0,
            change={"name": name, "kind": KIND, "value": value} if value else None,
            line=_line(*argument(value)) if value else "",
        )
        for name, touches, share, value, why, expected in (
            _attention(engine), _eager(engine), _graphs(engine), _prefixes(engine),
            _sequences(engine), _batched(engine), _scheduling(engine),
        )
    ]  # fmt: skip
    return sorted(found, key=lambda level: level.change is None)


_Row = tuple[str, str, float | None, str, str, str]
"""Name, what it touches, share, value (empty: not tried), why, and evidence of a gain."""


def _shared(engine: Engine) -> float:
    return 1 - engine["reads_once"] / engine["reads"] if engine["reads"] else 0.0


def _attention(engine: Engine) -> _Row:
    from nostall.attach.vllm.plugin import RUN_ON_GPU  # lazy: it imports the kernels

    share = _shared(engine)
    why = f"{share:.0%} of the keys and values that decodes read are those of shared prompts"
    known = str(engine["vllm"]).startswith(tuple(f"{version}." for version in RUN_ON_GPU))
    value = "attention_backend=CUSTOM"
    if not engine["cuda"]:
        why, value = f"the back end runs on GPUs; {why}", ""
    elif not known:
        allowed = ", ".join(RUN_ON_GPU)
        why, value = f"vLLM {engine['vllm']}: it was run with {allowed}; {why}", ""
    elif share < MUCH_SHARED:
        why, value = f"too little is shared: {why}", ""
    expected = "1.63 (1.05 to 3.85) on 10 workloads, H200 (docs/results/serving.md)"
    return "nostall attention", "attention of decodes", share, value, why, expected


def _eager(engine: Engine) -> _Row:
    is_usable = engine["eager"] and engine["cuda"]
    why = "the program sets enforce_eager" if engine["eager"] else "vLLM uses them already"
    why += "" if engine["cuda"] or not engine["eager"] else "; graphs are those of GPUs"
    value = "enforce_eager=false" if is_usable else ""
    return "CUDA graphs", "launches", None, value, why, "not measured"


def _at_once(engine: Engine) -> int:
    """Sequences that run at the same time, as far as their number and the cache allow."""
    each = (engine["prompt_tokens"] + engine["output_tokens"]) / engine["sequences"]
    cached = engine["cache_tokens"] / each if engine["cache_tokens"] else math.inf
    return int(min(engine["sequences"], cached))


def _graphs(engine: Engine) -> _Row:
    running = min(_at_once(engine), engine["most_sequences"])
    largest = engine["largest_graph"]
    touches, value = "launches of large batches", ""
    if not engine["cuda"] or not largest:
        why = "the engine captures no graphs"
    elif running <= largest:
        why = f"graphs of up to {largest} sequences hold the {running} that run at once"
    elif engine["given"].get("cudagraph_capture_sizes") or engine["speculates"]:
        why = "the program sets the sizes, or speculates"
    else:
        why = f"{running} sequences run at once, and graphs hold {largest}"
        value = f"max_cudagraph_capture_size={16 * math.ceil(running / 16)}"
    return "larger CUDA graphs", touches, None, value, why, "not measured"


def _prefixes(engine: Engine) -> _Row:
    share = _shared(engine)
    value = ""
    if engine["prefix_caching"]:
        why = "it is on"
    elif not share:
        why = "no page of a prompt is shared"
    else:
        why, value = "it is off, and prompts share pages", "enable_prefix_caching=true"
    return "prefix caching", "prompts", None, value, why, "not measured"


def _sequences(engine: Engine) -> _Row:
    running, most = min(_at_once(engine), MOST_SEQUENCES), engine["most_sequences"]
    value = f"max_num_seqs={running}" if running > most else ""
    why = f"max_num_seqs is {most}; {running} sequences of this call fit"
    return "more sequences", "batches of decodes", None, value, why, "not measured"


def _batched(engine: Engine) -> _Row:
    most, prompts = engine["most_batched"], engine["prompt_tokens"]
    is_small = most < LARGE_STEP // 2 and prompts > 4 * most
    value = f"max_num_batched_tokens={LARGE_STEP}" if is_small else ""
    why = f"steps of up to {most} tokens, and {prompts} tokens of prompts"
    return "larger steps", "prompts", None, value, why, "not measured"


def _scheduling(engine: Engine) -> _Row:
    is_off = engine["given"].get("async_scheduling") is False
    value = "async_scheduling=true" if is_off else ""
    why = ("the program turns it off" if is_off else "it is on" if engine["async_scheduling"]
           else "vLLM itself leaves it off here")  # fmt: skip
    return "asynchronous scheduling", "the host's work", None, value, why, "not measured"


def _line(name: str, value: Any) -> str:
    return f"LLM(..., {name}={value!r})" + ("  # with nostall installed" if value == "CUSTOM" else
                                            "")  # fmt: skip


class EngineJob:
    """Tries changes of engine arguments, one start of the program after the other."""

    def __init__(
        self, facts: Facts, result: Result, options: Options, say: Say,
        start: Callable[[Mapping[str, Any], float], Event], clock: Callable[[], float],
        until: float,
    ) -> None:  # fmt: skip
        """``start`` starts the program with settings of its engines, until a time of ``clock``."""
        self.result, self.options, self.say = result, options, say
        self.start, self.clock, self.until = start, clock, until
        self.first: Engine = facts.raw["engine"]
        self.runs: dict[Arm, list[Engine]] = {(): [self.first]}
        self.start_seconds = 0.0
        # The probabilities are evidence of the run, and too many for its result.
        brief = {key: value for key, value in self.first.items() if key != "check"}
        result.facts = Facts({**facts.raw, "engine": brief})
        result.levels = engine_levels(facts)
        self.changes: dict[str, str] = {
            level.name: level.change["value"] for level in result.levels if level.change
        }

    def run(self, save: Callable[[Result], None]) -> None:
        """All attempts, but for those that an earlier run made."""
        tried = {attempt.level.name for attempt in self.result.attempts}
        if reason := self._obstacle():
            self.result.notes.append(f"nothing is tried: {reason}")
            return
        for level in self.result.levels:
            if level.change and level.name not in tried:
                for attempt in self._attempt(level):
                    others = (a for a in self.result.attempts if a.level is not level)
                    self.result.attempts = [*others, attempt]
                    save(self.result)
                    self.say(f"{level.name}: {attempt.outcome}, {attempt.reason}")
        if self.result.kept:
            self._together()

    def _obstacle(self) -> str:
        has_changes = any(level.change for level in self.result.levels)
        if self.first["problem"]:
            return str(self.first["problem"])
        reason = obstacle(self.options, self.result.command, self.result.files)
        if has_changes and reason:
            return f"engine arguments need new starts, and {reason}"
        return ""

    @property
    def kept(self) -> Arm:
        """Names of the kept changes."""
        return tuple(attempt.level.name for attempt in self.result.kept)

    def _attempt(self, level: Level) -> Iterator[Attempt]:
        """The attempt as its first start shows it, and then as all its starts do."""
        try:
            yield from self._measure(level)
        except ProgramEnded as end:
            yield Attempt(level, "refused", f"no call was measured: {end}", CLASSES[1])

    def _measure(self, level: Level) -> Iterator[Attempt]:
        base, arm = self.kept, (*self.kept, level.name)
        self._have(arm, 1)
        refusal, tokens = self._results(arm)
        if refusal:
            yield Attempt(level, "refused", refusal, CLASSES[3])
            return
        proof = self._prove(base, arm, 1)
        assert proof.comparison is not None
        shown = interval(proof.comparison)
        if proof.comparison.ratio < PROMISING:
            reason = f"not faster in its first start: {shown}"
            yield Attempt(level, "dropped", reason, CLASSES[1], proof)
            return
        reason = f"{shown} times as fast in one start; {STARTS} with and without it decide"
        yield Attempt(level, "undecided", reason, CLASSES[1], proof)
        self._have(base, STARTS)
        self._have(arm, STARTS)
        proof = self._prove(base, arm, STARTS)
        outcome, reason = outcome_of(proof)
        ready = self.runs[arm][-1]["ready_seconds"]
        yield Attempt(level, outcome, f"{reason}; {tokens}", CLASSES[1], proof, ready)

    def _together(self) -> None:
        """Measure all kept changes beside the original, in more starts if time is left."""
        starts = FINAL_STARTS
        for number in range(1, FINAL_STARTS + 1):
            try:
                self._have(self.kept, number)
                self._have((), number)
            except (TimeIsUp, ProgramEnded):
                starts = number - 1
                break
        if starts < STARTS:
            raise TimeIsUp
        self.result.together = proof = self._prove((), self.kept, starts)
        if not proof.faster:
            drop(self.result, f"together: {outcome_of(proof)[1]}")

    def _have(self, arm: Arm, count: int) -> None:
        """Start the program with the changes of ``arm`` until there are so many starts."""
        while len(self.runs.setdefault(arm, [])) < count:
            before = self.clock()
            if before + self.start_seconds > self.until:
                raise TimeIsUp
            self.say(f"start {len(self.runs[arm]) + 1} of {', '.join(arm) or 'the original'}")
            engine = self.start(self._settings(arm), self.until)["engine"]
            self.start_seconds = self.clock() - before
            if engine["problem"]:
                raise ProgramEnded(engine["problem"])
            if engine["prompts"] != self.first["prompts"]:
                raise ProgramEnded("its prompts differ from start to start")
            self.runs[arm].append(engine)

    def _settings(self, arm: Arm) -> dict[str, Any]:
        """Of the next start; probabilities are compared in the first start of an arm alone."""
        return {
            "arguments": dict(argument(self.changes[name]) for name in arm),
            "call": self.first["call"], "repeats": len(self.first["samples"]),
            "batches": 0 if self.runs[arm] else 1,
        }  # fmt: skip

    def _prove(self, base: Arm, arm: Arm, starts: int) -> Proof:
        """Compare the last starts of two arms."""
        originals, changed = ([_samples(e) for e in self.runs[a][-starts:]] for a in (base, arm))
        proof = prove_starts(originals, changed, self.options.seed)
        calls = [median(s for e in self.runs[a][-starts:] for s, _ in e["samples"])
                 for a in (base, arm)]  # fmt: skip
        tokens = [median(t for e in self.runs[a] for _, t in e["samples"]) for a in (base, arm)]
        refusal = proof.refusal
        if abs(tokens[1] / tokens[0] - 1) > OTHER_TOKENS:
            refusal = f"it generates {tokens[1]:.0f} tokens in a call, the original {tokens[0]:.0f}"
        return replace(proof, refusal=refusal, seconds=(calls[0], calls[1]))

    def _results(self, arm: Arm) -> tuple[str, str]:
        """Why the results of a start do not count, and how many tokens are the original's."""
        check, other = self.first["check"], self.runs[arm][0]["check"]
        eps = check["eps"]
        band, size = distance(check["batch"], check["other batch"])
        found, _ = distance(check["batch"], other["batch"])
        allowed = 2 * band + (SUMMED * eps if eps < SMALL else 4 * eps) * size
        if not found <= allowed:  # NaN, too
            return (
                f"logarithms of probabilities are off by {found:.1e}; the original in another "
                f"batch moves them by {band:.1e}"
            ), ""
        equal, own = (_equal(self.first["tokens"], tokens)
                      for tokens in (self.runs[arm][0]["tokens"], check["repeated"]))  # fmt: skip
        count = self.first["sequences"]
        return "", (
            f"tokens of {equal:.0%} of {count} sequences are equal, of the original beside itself "
            f"{own:.0%}; greedy probabilities: {found / (allowed or 1.0):.2f} of the allowed "
            "distance"
        )


def _equal(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of sequences with equal tokens."""
    pairs = [*zip_longest(one, other)]
    return float(sum(a == b for a, b in pairs)) / len(pairs)


def _samples(engine: Engine) -> list[float]:
    """Seconds of a generated token in each call."""
    return [seconds / tokens for seconds, tokens in engine["samples"]]


def distance(one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
    """Root mean square of the difference of logarithms of probabilities, and of their spread.

    Of each sequence: places with a token, and the most probable tokens there.  Places count up to
    the first token that differs.  A token that the other list lacks is less probable there than the
    last one of it, so that its difference is at least that.
    """
    difference = spread = 0.0
    count = values = 0
    for places, others in zip(one, other, strict=True):
        for (token, here), (second, there) in zip(places, others, strict=True):
            mean = sum(here.values()) / len(here)
            for name in here.keys() | there.keys():
                a, b = here.get(name), there.get(name)
                if a is None or b is None:
                    lacking = there if b is None else here
                    off = max(0.0, (b if a is None else a) - min(lacking.values()))
                else:
                    off = a - b
                difference, count = difference + off**2, count + 1
            spread += sum((value - mean) ** 2 for value in here.values())
            values += len(here)
            if token != second:
                break
    return math.sqrt(difference / (count or 1)), math.sqrt(spread / (values or 1))
