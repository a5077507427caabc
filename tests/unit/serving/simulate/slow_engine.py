"""The simulated engine in plain Python: one request at a time, one step at a time, no hashes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nostall.serving.scheduling import POLICIES, Queues
from nostall.serving.simulate.engine import BLOCK, EngineSettings
from nostall.serving.simulate.step_costs import StepContent, StepCosts
from nostall.serving.traces import Request


@dataclass
class Job:
    """A request and what it has received."""

    request: Request
    token_times: list[float] = field(default_factory=list[float])
    computed: int = 0
    """Tokens whose keys are in the cache."""
    prefilled_to: int = 0
    """Tokens to compute before the next one is generated."""
    blocks: int = 0
    skipped: int = 0

    @property
    def prompt_left(self) -> int:
        return max(self.prefilled_to - self.computed, 0)

    @property
    def is_done(self) -> bool:
        return len(self.token_times) == self.request.output


@dataclass
class Result:
    jobs: list[Job]
    steps: int = 0
    step_tokens: list[int] = field(default_factory=list[int])
    preemptions: int = 0
    busy_s: float = 0.0


def run(requests: list[Request], costs: StepCosts, settings: EngineSettings) -> Result:
    """Simulate; the KV cache holds each request by itself."""
    result = Result([Job(request) for request in requests])
    arriving, waiting, running = list(result.jobs), list[Job](), list[Job]()
    free, now = (settings.kv_tokens or 0) // BLOCK, 0.0
    while arriving or waiting or running:
        while arriving and arriving[0].request.arrival_s <= now:
            waiting.append(arriving.pop(0))
        if not waiting and not running:
            now = arriving[0].request.arrival_s
            continue
        for job in waiting:
            job.prefilled_to = job.request.prompt + len(job.token_times)
        plan = POLICIES[settings.policy](
            Queues(
                np.array([job.prompt_left or 1 for job in running], np.int64),
                np.array([job.prompt_left > 0 for job in running], np.bool_),
                np.array([job.skipped for job in running], np.int64),
                np.array([job.prefilled_to for job in waiting], np.int64),
            ),
            settings.limits,
        )
        tokens = plan.running.tolist()
        place, was_short = 0, False
        while place < len(running):
            job = running[place]
            missing = max(-(-(job.computed + tokens[place]) // BLOCK) - job.blocks, 0)
            if missing <= free:
                free, job.blocks, place = free - missing, job.blocks + missing, place + 1
                continue
            was_short = True
            victim = running.pop()
            free += victim.blocks
            victim.blocks = victim.computed = victim.skipped = 0
            waiting.insert(0, victim)
            result.preemptions += 1
        tokens = tokens[: len(running)]
        for planned in [] if was_short else plan.admitted.tolist():
            needed = -(-planned // BLOCK)
            if needed > free:
                break
            job = waiting.pop(0)
            free, job.blocks = free - needed, needed
            running.append(job)
            tokens.append(planned)
        now = _compute(running, tokens, now, costs, result)
        for job in [job for job in running if job.is_done]:
            free += job.blocks
            running.remove(job)
    return result


def _compute(
    running: list[Job], tokens: list[int], now: float, costs: StepCosts, result: Result
) -> float:
    prefill = pairs = decode = keys = 0
    for job, count in zip(running, tokens, strict=True):
        if job.prompt_left:
            prefill += count
            pairs += sum(job.computed + i + 1 for i in range(count))
        elif count:
            decode += 1
            keys += job.computed + 1
    seconds = costs.seconds(StepContent(prefill, pairs, decode, keys))
    result.steps += 1
    result.step_tokens.append(sum(tokens))
    result.busy_s += seconds
    now += seconds
    for job, count in zip(running, tokens, strict=True):
        job.skipped = 0 if count else job.skipped + 1
        was_decode = not job.prompt_left
        job.computed += count
        if count and (was_decode or not job.prompt_left):
            job.token_times.append(now)
    return now
