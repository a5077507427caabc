"""The job behind ``nostall serving rollouts``: FLASH_ATTN and nostall on one workload.

Engines of vLLM start at once on one GPU and end together. The token rates of their turns
(:mod:`nostall.attach.rollouts.turns`) are compared beside the ratio of one engine with itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from nostall.attach.rollouts.engine import Engine
from nostall.attach.rollouts.model import GIB, Memory, Model
from nostall.attach.rollouts.turns import Asked, TurnPlan, measure
from nostall.attach.rollouts.workload import PAGE, REPEATS, Rollout, distinct_tokens
from nostall.core.errors import BadInput
from nostall.core.measurement import Comparison

Row = Mapping[str, Any]
"""A workload of one engine."""


class Pair(NamedTuple):
    """Turns of the same steps, by two engines or twice by one."""

    ours: Row
    base: Row


Interval = Callable[[Sequence[Pair]], tuple[float, float, float]]
"""The ratio of pairs, and the ends of its interval."""


def rates(row: Row) -> list[float]:
    """Tokens a second of each turn."""
    return [rate([turn]) for turn in row["turns"]]


def rate(turns: Sequence[Row]) -> float:
    """Tokens a second of several turns together."""
    tokens, seconds = (sum(float(turn[key]) for turn in turns) for key in ("tokens", "seconds"))
    return tokens / seconds


def compare(ours: Row, base: Row, interval: Interval | None = None) -> Comparison:
    """Token rate of ``ours`` over that of ``base``.

    The ratio is the median of the turns' pairs; another ``interval`` gives another ratio of pairs
    and its ends. The null has both engines' turns over their own turns of the equal generation
    before; [1, 1] if there is none.
    """
    pairs = [Pair(a, b) for a, b in zip(ours["turns"], base["turns"], strict=False)]
    of = interval or _interval
    ratio, low, high = of(pairs)
    again = [pair for row in (ours, base) for pair in repeated(row)]
    _, null_low, null_high = of(again) if again else (1.0, 1.0, 1.0)
    return Comparison(ratio, low, high, null_low, null_high, "measured")


def repeated(row: Row) -> Iterator[Pair]:
    """Equal turns of equal generations of one engine."""
    by_generation = {
        number: list(turns)
        for number, turns in groupby(row["turns"], lambda turn: turn.get("generation", 0))
    }
    for number, turns in by_generation.items():
        if number % REPEATS == 0:
            for turn, other in zip(turns, by_generation.get(number + 1, []), strict=False):
                yield Pair(other, turn)


def whole_rate(row: Row, *, with_prompts: bool = False) -> float | None:
    """Tokens a second of all generations, from their first tokens to their last; None: unknown.

    ``with_prompts``: of the first generation, with the time to compute its prompts.
    """
    tokens, seconds = 0.0, 0.0
    for about in row.get("generations", [])[: 1 if with_prompts else None]:
        if "finish_s" not in about:
            return None
        turns = [t for t in row["turns"] if t["generation"] == about["generation"]]
        tokens += float(about["all_tokens"])
        times = [about["first_tokens_s"], about["finish_s"], *(t["seconds"] for t in turns)]
        seconds += sum(map(float, times)) + float(about["cache_prompts_s"]) * with_prompts
    return tokens / seconds if tokens else None


def _interval(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """The ratio of pairs, and the ends of its 95 % bootstrap interval."""
    ours, base = ([rate([turn]) for turn in side] for side in zip(*pairs, strict=True))
    found = Comparison.from_samples(ours, base, kind="measured")
    return found.ratio, found.low, found.high


CHILD = "nostall.attach.rollouts.child"
"""Module of the process that holds one engine."""


@dataclass(frozen=True)
class Settings:
    """What all engines have in common."""

    model: str
    """Content of the model's ``config.json``; its weights are random."""
    cache_gib: float
    """Keys and values of each engine."""
    longest: int
    """Most tokens of a request."""
    sequences: int = 256
    """Requests that run at a time."""


@contextmanager
def started(
    names: Sequence[str],
    settings: Settings,
    start_s: float,
    make: Callable[[str, Path, Settings], Engine] | None = None,
) -> Iterator[list[Engine]]:
    """The engines of these names; one that has not started in time has a problem.

    ``make`` starts the engine of a name in a folder of its own; None: the back end of that name.
    """
    until = monotonic() + start_s
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        engines: list[Engine] = []
        try:
            for name in names:
                engines.append((make or _engine)(name, Path(folder) / name, settings))
            for engine in engines:
                engine.connect(until)
            yield engines
        finally:
            for engine in engines:
                engine.end()


def arguments_of(backend: str, own: Path, settings: Settings) -> list[str]:
    """Write the configuration of the model; the options of the engine's process."""
    model = own / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(settings.model)
    return ["--backend", backend, "--cache-gib", str(settings.cache_gib),
            "--longest", str(settings.longest), "--sequences", str(settings.sequences)]  # fmt: skip


def _engine(name: str, own: Path, settings: Settings) -> Engine:
    return Engine(name, own, [CHILD, *arguments_of(name, own, settings)], {})


RESULT_FILE = "rollouts.json"
"""File of a run directory with what was measured."""
NAMES = ("FLASH_ATTN", "CUSTOM")
"""The baseline, and nostall with its default choice."""
MOST_REQUESTS = 1024
"""Requests that run at a time."""
START_S = 600.0
"""Longest start of the engines: a first start compiles the model."""
SPARE = 1.05
"""Factor on the tokens of the cache, for pages that are not full."""
Start = Callable[[Sequence[str], Settings, float], AbstractContextManager[Sequence[Asked]]]
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class RolloutJob:
    """What is measured; wrong numbers raise :class:`BadInput` when it is made."""

    workload: Rollout
    model: Model
    rounds: int
    steps: int

    def __post_init__(self) -> None:
        workload, most = self.workload, self.model.config.max_position_embeddings or inf
        requests = workload.prompts * workload.samples
        if requests > MOST_REQUESTS:
            raise BadInput(
                f"{workload.prompts} prompts of {workload.samples} samples are {requests} requests "
                f"at a time; allowed are up to {MOST_REQUESTS}; give fewer --prompts"
            )
        if workload.longest > most:
            raise BadInput(
                f"requests of {workload.longest} tokens, and the model takes {most:.0f}; give a "
                "smaller --shared or --new"
            )
        _ = self.plan

    @property
    def plan(self) -> TurnPlan:
        """Generations and turns."""
        return TurnPlan.of(self.workload, self.rounds, self.steps)

    @property
    def memory(self) -> Memory:
        """Memory of an engine."""
        requests = self.workload.requests()
        new = sum(output + PAGE for output in requests.outputs)
        tokens = SPARE * (distinct_tokens(requests.prompts) + new)
        return Memory.of(self.model.config, int(tokens))

    def settings(self) -> dict[str, Any]:
        """What ``run.json`` says of the job."""
        return {
            "target": f"rollouts {self.workload.text}",
            "model": self.model.name,
            "workload": self.workload.text,
            **asdict(self.plan),
        }


def run_job(
    job: RolloutJob, free_bytes: int, progress: Progress, start: Start = started
) -> dict[str, Any]:
    """Measure both engines, in turns if both fit into the GPU's free memory, else one by one.

    Returns the records and their comparison. Raises :class:`BadInput` if an engine does not start
    or does not end its requests.
    """
    memory = job.memory
    together = memory.engines(free_bytes / GIB) == len(NAMES)
    settings = Settings(
        job.model.text,
        memory.cache_gib,
        job.workload.longest,
        sequences=max(Settings.sequences, len(job.workload.requests().prompts)),
    )
    engines: list[Asked] = []
    groups = [NAMES] if together else [(name,) for name in NAMES]
    for number, names in enumerate(groups):
        done = number / len(groups)
        progress(done, f"starting {' and '.join(names)}")
        with start(names, settings, START_S) as found:
            for engine in found:
                _require(engine)

            def report(share: float, done: float = done, names: Sequence[str] = names) -> None:
                progress(done + share / len(groups), f"decoding with {' and '.join(names)}")

            measure(job.workload, found, job.plan, inf, report)
            for engine in found:
                _require(engine)
                engine.record["counts"] = engine.ask({"do": "counts"}, 30.0)
            engines += found
    return document(job, {engine.name: engine.record for engine in engines}, together)


def document(job: RolloutJob, records: dict[str, dict[str, Any]], together: bool) -> dict[str, Any]:
    """The result of a job."""
    base, ours = (records[name]["rounds"][0] for name in NAMES)
    found = compare(ours, base)
    return {
        "kind": "measured",
        "in_turns": together,
        **job.settings(),
        "gpu": records[NAMES[0]].get("gpu"),
        "vllm": records[NAMES[0]].get("vllm"),
        "ratio": found.ratio,
        "comparison": asdict(found),
        "verdict": found.verdict,
        "engines": {name: figures(records[name]["rounds"][0]) for name in NAMES},
        "counts": records[NAMES[1]].get("counts"),
        "records": records,
    }


def figures(row: Row) -> dict[str, float | None]:
    """The figures of an engine: tokens a second of its turns and generations, and a step's time."""
    return {
        "tokens_per_s": median(rates(row)),
        "step_ms": median(turn["step_p50_ms"] for turn in row["turns"]),
        "generation_tokens_per_s": whole_rate(row),
        "with_prompts_tokens_per_s": whole_rate(row, with_prompts=True),
    }


def _require(engine: Asked) -> None:
    """Raise :class:`BadInput` if an engine has a problem."""
    if not engine.problem:
        return
    what, _, log = engine.problem.partition("; ")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line] or lines
    raise BadInput(
        f"{engine.name}: {what}{': ' + errors[-1] if errors else ''}; "
        "try a smaller --prompts or --shared, and that vLLM runs the model: "
        "vllm serve MODEL --load-format dummy"
    )
