"""The requests of a workload in an engine of vLLM: started together, and stepped on command."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from nostall.attach.rollouts.workload import Workload, distinct_tokens

ATTENTION = re.compile(
    r"flash|fmha|meta_attention|reduce_splits|tall_|unified_attention|reduce_segments|"
    r"varlen_num_blocks",
    re.IGNORECASE,
)
"""Names of kernels that compute attention: FlashAttention's, nostall's, and those of vLLM."""
SHOWN = 30
"""Kernels of most time that are listed."""


class Event(NamedTuple):
    """A kernel, or another operation of the GPU."""

    name: str
    start_us: float
    end_us: float


def profile_steps(run: Callable[[], None]) -> dict[str, Any]:
    """Times of what the GPU runs while ``run`` runs, or ``problem``: why they are not known.

    Needs PyTorch's profiler with CUPTI, which records the kernels of CUDA graphs, too.
    """
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile

        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
        device = torch.autograd.DeviceType.CUDA
        events = [
            Event(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == device and not getattr(event, "is_user_annotation", False)
        ]
    except Exception as error:  # A missing profiler must not end a measurement of rates.
        return {"problem": f"{type(error).__name__}: {error}"[:300]}
    return summary(events) | {"seconds": seconds, "profiler_s": time.perf_counter() - began}


def summary(events: Iterable[Event]) -> dict[str, Any]:
    """Sums in us: ``busy`` is the time in which anything runs, ``span`` first start to last end."""
    kernels: dict[str, list[float]] = {}
    ordered = sorted(events, key=lambda event: event.start_us)
    if not ordered:
        return {"problem": "the profiler saw no kernel"}
    busy, reached = 0.0, ordered[0].start_us
    attention = attention_reached = 0.0
    for event in ordered:
        busy += max(0.0, event.end_us - max(reached, event.start_us))
        reached = max(reached, event.end_us)
        if ATTENTION.search(event.name):
            attention += max(0.0, event.end_us - max(attention_reached, event.start_us))
            attention_reached = max(attention_reached, event.end_us)
        calls = kernels.setdefault(event.name[:120], [0, 0.0])
        calls[0] += 1
        calls[1] += event.end_us - event.start_us
    most = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "busy_us": busy,
        "span_us": reached - ordered[0].start_us,
        "attention_us": attention,
        "kernels": {name: [count, round(us, 1)] for name, (count, us) in most[:SHOWN]},
        "other_us": sum(us for _, (_, us) in most[SHOWN:]),
    }


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

    def prepare(self, workload: Workload, generation: int, most: int | None) -> dict[str, Any]:
        """Cache the shared prompts, and start the requests, until all that fit have a token.

        ``most``: most generated tokens of a request; None: as the workload says. Where it is given,
        the tokens in distinct pages are counted too.
        """
        requests = workload.requests(generation)
        outputs = [min(output, most or output) for output in requests.outputs]
        self.clock.take_us()
        began = time.perf_counter()
        self._add(requests.cached, [1] * len(requests.cached))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        cached = time.perf_counter()
        self.first, self.count = {}, 0
        self._add(requests.prompts, outputs)
        while len(self.first) < min(len(outputs), self.slots):
            self._step()
        wait_for_device()
        about = {
            "cache_prompts_s": cached - began,
            "first_tokens_s": time.perf_counter() - cached,
            "first_tokens": self.count,
            "requests": len(outputs),
            "generation": generation,
        }
        return about | ({"distinct_tokens": distinct_tokens(requests.prompts)} if most else {})

    def decode(self, steps: int) -> dict[str, Any]:
        """Time so many steps, or those that are left."""
        wait_for_device()
        before = self.count
        each: list[float] = []
        began = time.perf_counter()
        while len(each) < steps and self.engine.has_unfinished_requests():
            start = time.perf_counter()
            self._step()
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
            self._step()
        wait_for_device()
        return {
            "finish_s": time.perf_counter() - began,
            "all_tokens": self.count,
            "build_us": self.clock.take_us(),
            "compared": [self.first[name][:COMPARED] for name in sorted(self.first)],
        }

    def profile(self, steps: int) -> dict[str, Any]:
        """What the GPU ran in so many steps."""
        wait_for_device()

        def run() -> None:
            for _ in range(steps):
                self._step()
            wait_for_device()

        return {"steps": steps, **profile_steps(run)}

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

    def _step(self) -> None:
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
