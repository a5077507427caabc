"""The job behind ``nostall serving rollouts``: FLASH_ATTN and nostall on one workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from math import inf
from statistics import median
from typing import Any

from nostall.attach.rollouts.model import GIB, Memory, Model
from nostall.attach.rollouts.rates import (
    Row,
    compare,
    rate_with_prompts,
    rates,
    whole_rate,
)
from nostall.attach.rollouts.session import Settings, started
from nostall.attach.rollouts.turns import Asked, TurnPlan, measure
from nostall.attach.rollouts.workload import PAGE, Rollout, distinct_tokens
from nostall.core.errors import BadInput

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
        if self.longest > most:
            raise BadInput(
                f"requests of {self.longest} tokens, and the model takes {most:.0f}; give a "
                "smaller --shared or --new"
            )
        _ = self.plan

    @property
    def plan(self) -> TurnPlan:
        """Generations and turns."""
        return TurnPlan.of(self.workload, self.rounds, self.steps)

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return len(self.workload.requests().prompts[0]) + (self.workload.new or 0)

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
        longest=job.longest,
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
        "with_prompts_tokens_per_s": rate_with_prompts(row),
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
