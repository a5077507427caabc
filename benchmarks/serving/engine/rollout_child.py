"""The process of one engine of the rollout benchmark: all workloads, and profiles of steps."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving.engine.rollout_workloads import parse_workload
from nostall.attach.rollouts import child
from nostall.attach.rollouts.generation import Generation, wait_for_device
from nostall.attach.rollouts.workload import distinct_tokens

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


def profile(generation: Generation, steps: int) -> dict[str, Any]:
    """What the GPU ran in so many steps."""
    wait_for_device()

    def run() -> None:
        for _ in range(steps):
            generation.step()
        wait_for_device()

    return {"steps": steps, **profile_steps(run)}


def answer(traces: Path | None, generation: Generation, command: dict[str, Any]) -> Any:
    """The answer to one command.

    Where ``most``, the most generated tokens of a request, is given, the tokens in distinct pages
    are counted too.
    """
    if command["do"] == "profile":
        return profile(generation, command["steps"])
    if command["do"] != "prepare":
        return child.answer(generation, command)
    number, most = command["generation"], command.get("most")
    requests = parse_workload(command["workload"], traces).requests(number)
    if not most:
        return generation.prepare(requests, number)
    cut = requests._replace(outputs=[min(output, most) for output in requests.outputs])
    about = generation.prepare(cut, number)
    return about | {"distinct_tokens": distinct_tokens(requests.prompts)}


def main() -> None:
    parser = child.parser()
    parser.add_argument("--cache-dtype", default="auto", help="vLLM's name")
    parser.add_argument("--cascade", action="store_true")
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    more: dict[str, Any] = {"attention_backend": options.backend}
    if options.backend == "CPU_ATTN":  # The CPU build has one back end, and compiles for minutes.
        more = {"enforce_eager": True}
    if options.cascade:
        more["disable_cascade_attn"] = False
    more["kv_cache_dtype"] = options.cache_dtype
    about = {"cascade": options.cascade, "cache_dtype": options.cache_dtype}
    child.serve(options, more, partial(answer, options.traces), about)


if __name__ == "__main__":
    main()
