"""One vLLM engine of the checks: sleeps, is stressed, speculates, or repeats requests.

    python -m benchmarks.serving.checks.vllm_checks_child JOB.json

``JOB.json`` has ``do`` (``sleep``, ``stress``, ``ngram`` or ``repeat``), ``engine`` (options of
vLLM's ``LLM``), ``seconds``, ``vocabulary``, and ``out`` (file); to repeat also ``requests``.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.engine.forced_tokens_child import driver

PROMPTS, SAMPLES, SHARED, OWN, NEW = 4, 32, 1536, 16, 48
"""The workload of the sleeping engine."""
KEPT = 64
"""Requests of the stressed engine that are repeated."""
LOGPROBS = 5


def sleep_check(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens before sleep, after sleep of level 1, and after sleep of level 2."""
    draw = random.Random(0)
    sizes = (4, 2, 64, OWN, 8) if job["is_tiny"] else (PROMPTS, SAMPLES, SHARED, OWN, NEW)
    count, samples, shared, own, new = sizes

    def words(length: int) -> list[int]:
        return [draw.randrange(3, job["vocabulary"]) for _ in range(length)]

    bases = [words(shared) for _ in range(count)]
    prompts = [base + words(own) for base in bases for _ in range(samples)]
    phases = {"before": generate(llm, prompts, new)}
    if not job["is_tiny"]:  # vLLM's CPU build does not sleep.
        llm.sleep(level=1)
        llm.wake_up()
    phases["level 1"] = generate(llm, prompts, new)
    if not job["is_tiny"]:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    phases["level 2"] = generate(llm, prompts, new)
    wanted = phases["before"]["tokens"]
    return {
        name: {
            "equal": phase["tokens"] == wanted,
            "equal_requests": sum(map(list.__eq__, phase["tokens"], wanted)),
            "requests": len(wanted),
            "counts": phase["counts"],
        }
        for name, phase in phases.items()
    }


def generate(llm: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Greedy tokens twice: while the prompts are computed, and from the prefix cache."""
    from nostall.attach.vllm.counts import counts
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    texts = [{"prompt_token_ids": prompt} for prompt in prompts]
    tokens = []
    for _ in range(2):
        results = llm.generate(texts, sampling, use_tqdm=False)
        tokens += [list(result.outputs[0].token_ids) for result in results]
    return {"tokens": tokens, "counts": counts()}


def ngram_check(llm: Any, job: dict[str, Any], until: float) -> dict[str, Any]:
    """Greedy samples of shared prompts, twice: the second time from the prefix cache."""
    from vllm import SamplingParams

    draw = random.Random(2)
    count, samples, shared, new = (2, 3, 64, 8) if job["is_tiny"] else (8, 16, 1030, 64)
    words = range(3, job["vocabulary"])
    prompts = [
        base + draw.choices(words, k=draw.randint(1, 40))
        for base in (draw.choices(words, k=shared) for _ in range(count))
        for _ in range(samples)
    ]
    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=LOGPROBS
    )
    requests: dict[str, Request] = {}
    steps = 0
    for phase in range(2):
        for number, prompt in enumerate(prompts):
            name = f"{phase}-{number}:"
            requests[name] = Request(prompt, new, True)
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests() and time.monotonic() < until:
            steps += 1
            for output in engine.step():
                keep(requests[output.request_id.partition(":")[0] + ":"], output)
    short = [name for name, request in requests.items() if len(request.tokens) != new]
    # Every fourth: samples of all prompts, of both phases.
    return {
        "counts": {"requests": len(requests), "steps": steps},
        "problems": [f"{name} lacks tokens" for name in short],
        "requests": [vars(request) for request in list(requests.values())[::4]],
    }


@dataclass
class Request:
    """A request of the stressed engine."""

    prompt: list[int]
    new: int
    is_kept: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, float]] = field(default_factory=list)
    is_finished: bool = False


class Stress:
    """Requests that arrive and are aborted at random; many share a prompt."""

    def __init__(self, llm: Any, job: dict[str, Any]) -> None:
        self.engine, self.job = llm.llm_engine, job
        self.draw = random.Random(1)
        self.alive: dict[str, Request] = {}
        self.kept: list[Request] = []
        self.candidates = 0
        self.counts = {"added": 0, "finished": 0, "aborted": 0, "tokens": 0, "steps": 0}
        self.problems: list[str] = []
        self.prompts: list[list[int]] = []

    def words(self, length: int) -> list[int]:
        return [self.draw.randrange(3, self.job["vocabulary"]) for _ in range(length)]

    def run(self, until: float) -> dict[str, Any]:
        """Stress the engine until a time, then let it finish what it has."""
        most, longest = self.job["alive"], self.job["longest"]
        while time.monotonic() < until and len(self.problems) < 20:
            if self.draw.random() < 0.02 or not self.prompts:
                self.prompts = [
                    self.words(self.draw.randint(16, longest))
                    for _ in range(self.draw.choice((1, 4, 32)))
                ]
            wanted = most if self.draw.random() < 0.9 else self.draw.randint(0, most)
            for _ in range(min(max(0, wanted - len(self.alive)), 32)):
                self.add()
            if self.alive and self.draw.random() < 0.15:
                self.abort(self.draw.choice(list(self.alive)))
            if len(self.alive) > 4 and self.draw.random() < 0.005:
                for name in self.draw.sample(list(self.alive), len(self.alive) // 2):
                    self.abort(name)
            self.step()
        deadline = time.monotonic() + self.job["drain_seconds"]
        while self.engine.has_unfinished_requests() and time.monotonic() < deadline:
            self.step()
        self.problems += [f"{name} was lost" for name in self.alive]
        if not self.kept:
            self.problems.append("no request that is compared has finished")
        return {
            "counts": self.counts,
            "problems": self.problems,
            "requests": [vars(request) for request in self.kept],
        }

    def add(self) -> None:
        from vllm import SamplingParams

        shared = self.draw.choice(self.prompts)
        prompt = shared[: self.draw.choice((len(shared), len(shared), max(1, len(shared) // 2)))]
        prompt = prompt + self.words(self.draw.randint(1, 40))
        is_kept = self.draw.random() < 0.05
        request = Request(prompt, self.draw.randint(1, self.job["new"]), is_kept)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=request.new,
            ignore_eos=True,
            detokenize=False,
            logprobs=LOGPROBS if is_kept else None,
        )
        self.counts["added"] += 1
        name = f"r{self.counts['added']}:"
        self.alive[name] = request
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def abort(self, name: str) -> None:
        self.alive.pop(name)
        self.engine.abort_request([name])
        self.counts["aborted"] += 1

    def step(self) -> None:
        self.counts["steps"] += 1
        for output in self.engine.step():
            # Some versions append a suffix of their own to the names of requests.
            name = output.request_id.partition(":")[0] + ":"
            request = self.alive.get(name)
            if request is None:
                continue  # aborted while its step ran
            keep(request, output)
            if output.finished:
                self.finish(name, request)

    def finish(self, name: str, request: Request) -> None:
        del self.alive[name]
        self.counts["finished"] += 1
        self.counts["tokens"] += len(request.tokens)
        if len(request.tokens) != request.new:
            self.problems.append(f"{name} has {len(request.tokens)} of {request.new} tokens")
        if not request.is_kept:
            return
        self.candidates += 1
        # Each candidate is kept with the same probability (reservoir sampling).
        if len(self.kept) < KEPT:
            self.kept.append(request)
        elif self.draw.random() < KEPT / self.candidates:
            self.kept[self.draw.randrange(KEPT)] = request


def keep(request: Any, output: Any) -> None:
    """Take the tokens of an output, and their log probabilities."""
    first = output.outputs[0]
    request.tokens = list(first.token_ids)
    if first.logprobs:
        request.logprobs = [
            {str(token): float(value.logprob) for token, value in row.items()}
            for row in first.logprobs
        ]


def repeat(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Each request once more, in an engine that has no others; where results differ, and how far.

    Log probabilities are compared up to the first token that differs: behind it the contexts do.
    """
    engine = llm.llm_engine
    differences: list[float] = []
    equal, problems = 0, []
    for data in job["requests"]:
        known = Request(**data)
        again = Request(known.prompt, known.new, True)
        run_alone(engine, again)
        same = [a == b for a, b in zip(known.tokens, again.tokens, strict=True)]
        equal += all(same)
        until = same.index(False) + 1 if False in same else len(same)
        pairs = list(zip(known.logprobs, again.logprobs, strict=True))[:until]
        found = [abs(a[t] - b[t]) for a, b in pairs for t in a.keys() & b.keys()]
        if not all(value < job["limit"] for value in found):  # also NaN
            problems.append(f"log probabilities differ by up to {max(found)}")
        differences += found
    differences.sort()
    return {
        "repeated": len(job["requests"]),
        "equal_tokens": equal,
        "compared": len(differences),
        "median_difference": differences[len(differences) // 2] if differences else None,
        "largest_difference": differences[-1] if differences else None,
        "problems": problems,
    }


def run_alone(engine: Any, request: Request) -> None:
    """Run one request to its end."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=request.new, ignore_eos=True, detokenize=False, logprobs=LOGPROBS
    )
    engine.add_request(f"a{id(request)}", {"prompt_token_ids": request.prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            keep(request, output)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    end = time.monotonic() + job["seconds"]
    from nostall.attach.vllm.plugin import register

    register()
    import torch

    import vllm
    from nostall.attach.vllm.counts import counts
    from vllm import LLM

    llm = LLM(skip_tokenizer_init=True, seed=0, enable_prefix_caching=True, **job["engine"])
    if job["do"] == "sleep":
        result = sleep_check(llm, job)
    elif job["do"] == "stress":
        result = Stress(llm, job).run(end - job["drain_seconds"])
    elif job["do"] == "ngram":
        result = ngram_check(llm, job, end)
    else:
        result = repeat(llm, job)
    config = llm.llm_engine.vllm_config
    about = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "driver": driver(),
        "counts_of_plug_in": counts(),
    }
    Path(job["out"]).write_text(json.dumps({"result": result, "about": about}))


if __name__ == "__main__":
    main()
