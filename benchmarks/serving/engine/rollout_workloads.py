"""Workloads of the rollout benchmark, their turns, and the ratios of their records.

Beyond samples of prompts: prompts that grow from history to history, numbers of generated tokens of
a trace, and requests of a trace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nostall.attach.rollouts.job import Pair, Row
from nostall.attach.rollouts.job import compare as compare_turns
from nostall.attach.rollouts.turns import PREPARE_S, SLACK, Asked, TurnPlan
from nostall.attach.rollouts.workload import OWN, REPEATS, Requests, Rollout, Words
from nostall.core.errors import BadInput
from nostall.core.measurement import Comparison
from nostall.serving.traces import HASH_BLOCK, Request, load_requests

LONGEST = 16_384
"""Most tokens of a request of a trace: longer prompts are cut."""
MOST_OUTPUT = 1024
"""Most generated tokens of a request of a trace."""
HISTORIES = 4
"""Histories of a workload that grows."""
WARM_STEPS = 8
PROFILED_STEPS = 8
MOST_TURNS = 200
"""Most turns of a generation whose requests end at different steps."""
RESAMPLES = 2000
_ROLLOUT = re.compile(r"(\d+)x(\d+)@(\d+)\+(\d+|[\w.-]+\.csv)(?:/(\d+))?(?:~(\d+))?")
_TRACE = re.compile(r"(\d+)@([\w.-]+\.jsonl)/(\d+)\+(\d+)")
GRAMMAR = "PROMPTSxSAMPLES@SHARED+NEW[/SYSTEM][~GROWTH], or REQUESTS@TRACE.jsonl/PARTS+NEW"


class Workload(Protocol):
    """Requests that start at once, in one or more generations."""

    @property
    def text(self) -> str:
        """The text that :func:`parse_workload` reads."""
        ...

    @property
    def name(self) -> str:
        """The name for people."""
        ...

    @property
    def new(self) -> int | None:
        """Tokens that each request generates; None if they differ."""
        ...

    @property
    def shares(self) -> bool:
        """Whether most of a prompt is in several requests."""
        ...

    @property
    def histories(self) -> int:
        """Numbers of shared tokens that follow each other, :data:`REPEATS` generations each."""
        ...

    def requests(self, generation: int = 0) -> Requests:
        """The requests of a generation; equal for each call."""
        ...


@dataclass(frozen=True)
class GrowingRollout(Rollout):
    """Samples of prompts whose shared part may grow, with numbers of tokens of a trace or equal."""

    new: int | None  # type: ignore[assignment]
    """Tokens that each request generates; None: as the requests of a trace."""
    growth: int = 0
    """Tokens by which the shared part grows from history to history."""
    trace: Path | None = None
    """Trace whose first requests give the numbers of generated tokens."""

    @property
    def longest(self) -> int:
        return self._shared(self.histories - 1) + OWN + (self.new or MOST_OUTPUT)

    @property
    def shares(self) -> bool:
        return self.samples > 1

    @property
    def histories(self) -> int:
        return HISTORIES if self.growth else 1

    @property
    def text(self) -> str:
        new = self.trace.name if self.trace else self.new
        growth = f"~{self.growth}" if self.growth else ""
        system = f"/{self.system}" if self.system else ""
        return f"{self.prompts}x{self.samples}@{self.shared}+{new}{system}{growth}"

    @property
    def name(self) -> str:
        system = f" ({self.system} of all)" if self.system else ""
        growth = f" to {self._shared(self.histories - 1)}" if self.growth else ""
        new = self.new or "lengths of a trace"
        return f"{self.prompts} x {self.samples}, {self.shared}{growth}{system} + {new}"

    def _shared(self, history: int) -> int:
        return self.shared + self.growth * history

    def requests(self, generation: int = 0) -> Requests:
        words = Words(self.text)
        common = words(self.system)
        most = self._shared(self.histories - 1)
        shared = self._shared(generation // REPEATS % self.histories)
        bases = [(common + words(most - self.system))[:shared] for _ in range(self.prompts)]
        prompts = [base + words(OWN) for base in bases for _ in range(self.samples)]
        return Requests(bases, prompts, self._outputs(len(prompts)))

    def _outputs(self, count: int) -> list[int]:
        if self.trace is None:
            return [self.new or 1] * count
        found = _first_requests(self.trace, count)
        return [min(request.output, MOST_OUTPUT) for request in found]


@dataclass(frozen=True)
class TraceRequests:
    """Requests that follow each other in a trace with prefix hashes, all of the same output."""

    count: int
    trace: Path
    parts: int
    """A block of 512 prompt tokens of the trace has so many times fewer, so that they fit."""
    new: int

    @property
    def shares(self) -> bool:
        return False

    @property
    def histories(self) -> int:
        return 1

    @property
    def text(self) -> str:
        return f"{self.count}@{self.trace.name}/{self.parts}+{self.new}"

    @property
    def name(self) -> str:
        return f"{self.count} neighbours of {self.trace.stem}, 1/{self.parts} + {self.new}"

    def requests(self, generation: int = 0) -> Requests:
        found = _first_requests(self.trace, self.count)
        if not all(request.hashes for request in found):
            raise BadInput(f"trace {self.trace} has requests without hashes; give one with them")
        words = Words(self.text)
        most = LONGEST - OWN - self.new
        cached = []
        for request in found:
            blocks = [
                token
                for block in request.hashes
                for token in Words(f"{self.text} {block}")(HASH_BLOCK // self.parts)
            ]
            cached.append(blocks[: min(most, max(1, request.prompt // self.parts))])
        prompts = [prompt + words(OWN) for prompt in cached]
        return Requests(cached, prompts, [self.new] * self.count)


def parse_workload(text: str, traces: Path | None = None) -> Workload:
    """The workload of a text; ``traces``: folder of the traces that it names.

    Raises :class:`BadInput` for a text that is not a workload. Traces are read by ``requests``.
    """
    rollout, requests = _ROLLOUT.fullmatch(text), _TRACE.fullmatch(text)
    if rollout is None and requests is None:
        raise BadInput(f"workload {text!r}; allowed is {GRAMMAR}")
    folder = traces or Path()
    if requests is not None:
        count, name, parts, each = requests.groups()
        return TraceRequests(int(count), folder / name, max(1, int(parts)), int(each))
    assert rollout is not None
    prompts, samples, shared, new, system, growth = rollout.groups()
    trace = None if new.isdigit() else folder / new
    sizes = (int(prompts), int(samples), int(shared), int(new) if trace is None else None)
    return GrowingRollout(*sizes, int(system or 0), int(growth or 0), trace)


def _first_requests(trace: Path, count: int) -> list[Request]:
    """The first requests of a trace; raises :class:`BadInput` if it has fewer."""
    if not trace.is_file():
        raise BadInput(f"trace {trace} is missing; give the folder that has it with --traces")
    found = load_requests(trace, count)
    if len(found) < count:
        raise BadInput(f"trace {trace} has {len(found)} requests; {count} are needed")
    return found


def plan_of(workload: Workload, rounds: int, steps: int) -> TurnPlan:
    """As :meth:`TurnPlan.of`; requests that end at different steps are decoded to their end."""
    repeats = REPEATS * workload.histories
    if workload.new is None:
        return TurnPlan(repeats, MOST_TURNS, steps)
    plan = TurnPlan.of(workload, rounds, steps)  # type: ignore[arg-type]
    return replace(plan, generations=max(repeats, plan.generations))


def compare(ours: Row, base: Row, *, is_ragged: bool = False) -> Comparison:
    """Token rate of ``ours`` over that of ``base``.

    The ratio is the median of the turns' pairs, or of all tokens over all seconds if the requests
    end at different steps (``is_ragged``): such turns differ.
    """
    return compare_turns(ours, base, _ratio_of_all if is_ragged else None)


def _ratio_of_all(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """The ratio of all tokens over all seconds, and the ends of its 95 % bootstrap interval."""
    sides = [[[turn[key] for turn in pair] for pair in pairs] for key in ("tokens", "seconds")]
    tokens, seconds = (np.asarray(side, np.float64) for side in sides)
    every = np.arange(len(pairs))
    draws = np.random.default_rng(0).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.quantile(_ratio_of_sums(tokens, seconds, draws), [0.025, 0.975])
    return float(_ratio_of_sums(tokens, seconds, every[None])[0]), float(low), float(high)


def _ratio_of_sums(tokens: Any, seconds: Any, draws: Any) -> Any:
    """Our rate over the base's, for each row of drawn pairs."""
    totals = tokens[draws].sum(axis=1) / seconds[draws].sum(axis=1)
    return totals[:, 0] / totals[:, 1]


def profile(workload: Workload, engines: Sequence[Asked]) -> None:
    """Add what the GPU runs in a step at the start of a workload to its row in each record."""
    tokens = WARM_STEPS + PROFILED_STEPS + SLACK
    last = REPEATS * (workload.histories - 1)
    prepare = {
        "do": "prepare", "workload": workload.text, "generation": last, "most": tokens,
    }  # fmt: skip
    for engine in engines:
        row = next((r for r in engine.record["rounds"] if r["workload"] == workload.text), None)
        if engine.problem or row is None:
            continue
        about = engine.ask(prepare, PREPARE_S)
        warm = engine.ask({"do": "decode", "steps": WARM_STEPS})
        found = engine.ask({"do": "profile", "steps": PROFILED_STEPS})
        if found is not None:
            generated = about["requests"] * (1 + WARM_STEPS + PROFILED_STEPS // 2)
            row["profile"] = {
                "warm_step_ms": warm["step_p50_ms"],
                "distinct_keys": about["distinct_tokens"] + generated,
                **found,
            }
        engine.ask({"do": "finish"})
