"""The requests of a workload in an engine of vLLM: started together, and stepped on command."""

from __future__ import annotations

import time
from typing import Any

from nostall.attach.rollouts.workload import Requests

COMPARED = 12
"""First tokens of each request that are compared between engines."""


class Generation:
    """The requests of one generation at a time."""

    def __init__(self, engine: Any, clock: BuildClock) -> None:
        """``engine``: vLLM's ``LLMEngine``, in this process."""
        self.engine, self.clock = engine, clock
        self.slots = int(engine.vllm_config.scheduler_config.max_num_seqs)
        self.first: dict[str, list[int]] = {}
        self.count = self.number = 0

    def prepare(self, requests: Requests, generation: int) -> dict[str, Any]:
        """Cache the shared prompts, and start the requests, until all that fit have a token."""
        self.clock.take_us()
        began = time.perf_counter()
        self._add(requests.cached, [1] * len(requests.cached))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        cached = time.perf_counter()
        self.first, self.count = {}, 0
        self._add(requests.prompts, requests.outputs)
        while len(self.first) < min(len(requests.outputs), self.slots):
            self.step()
        wait_for_device()
        return {
            "cache_prompts_s": cached - began,
            "first_tokens_s": time.perf_counter() - cached,
            "first_tokens": self.count,
            "requests": len(requests.outputs),
            "generation": generation,
        }

    def decode(self, steps: int) -> dict[str, Any]:
        """Time so many steps, or those that are left."""
        wait_for_device()
        before = self.count
        each: list[float] = []
        began = time.perf_counter()
        while len(each) < steps and self.engine.has_unfinished_requests():
            start = time.perf_counter()
            self.step()
            each.append(time.perf_counter() - start)
        wait_for_device()
        seconds = time.perf_counter() - began
        each.sort()
        return {
            "seconds": seconds,
            "steps": len(each),
            "tokens": self.count - before,
            "step_p50_ms": each[len(each) // 2] * 1e3 if each else 0.0,
            "is_done": not self.engine.has_unfinished_requests(),
        }

    def finish(self) -> dict[str, Any]:
        """Run to the end of all requests; their first tokens, and the host's time of a build."""
        began = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.step()
        wait_for_device()
        return {
            "finish_s": time.perf_counter() - began,
            "all_tokens": self.count,
            "build_us": self.clock.take_us(),
            "compared": [self.first[name][:COMPARED] for name in sorted(self.first)],
        }

    def _add(self, prompts: list[list[int]], outputs: list[int]) -> None:
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        self.number += 1
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            sampling = SamplingParams(
                temperature=0,
                max_tokens=output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            name = f"{self.number}:{index:05}:"
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> None:
        """Run one step of the engine, and count its tokens."""
        for output in self.engine.step():
            tokens = output.outputs[0].token_ids
            # Some versions append a suffix of their own to the names of requests.
            first = self.first.setdefault(output.request_id.rpartition(":")[0], [])
            if len(first) < COMPARED:
                first += tokens
            self.count += len(tokens)


class BuildClock:
    """Wraps a back end's metadata builder, and adds up the host's time in it."""

    def __init__(self, backend: str) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        self.seconds, self.calls = 0.0, 0
        builder = AttentionBackendEnum[backend].get_class().get_builder_cls()
        build = builder.build

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = build(*arguments, **options)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            return result

        builder.build = timed

    def take_us(self) -> float:
        """Microseconds a call since the last call of this method."""
        mean = 1e6 * self.seconds / max(1, self.calls)
        self.seconds, self.calls = 0.0, 0
        return mean


def wait_for_device() -> None:
    """Wait until the GPU has run all steps; without one a step has run when it returns."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
