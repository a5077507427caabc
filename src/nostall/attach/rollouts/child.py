"""The process of one engine: starts vLLM on a model of random weights, and answers commands."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from nostall.attach.rollouts.generation import BuildClock, Generation
from nostall.attach.rollouts.workload import LONGEST, parse_workload
from nostall.attach.vllm.plugin import register
from nostall.core.process import Channel, ProcessEnded

MOST_BATCHED = 8192


def started_engine(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """An engine, and what it is."""
    began = time.perf_counter()
    import torch

    import vllm
    from vllm import LLM

    # vLLM calls it itself where nostall is installed and VLLM_PLUGINS allows it.
    register()
    more: dict[str, Any] = {"attention_backend": options.backend}
    if options.backend == "CPU_ATTN":  # The CPU build has one back end, and compiles for minutes.
        more = {"enforce_eager": True}
    if options.cascade:
        more["disable_cascade_attn"] = False
    llm = LLM(
        model=str(options.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=options.longest,
        max_num_batched_tokens=MOST_BATCHED,
        max_num_seqs=options.sequences,
        enable_prefix_caching=True,
        # Engines that share a GPU cannot measure how much memory is free.
        gpu_memory_utilization=0.05,
        kv_cache_dtype=options.cache_dtype,
        kv_cache_memory_bytes=int(options.cache_gib * 2**30),
        **more,
    )
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    return engine, {
        "backend": options.backend,
        "cascade": options.cascade,
        "cache_dtype": options.cache_dtype,
        "async": bool(engine.vllm_config.scheduler_config.async_scheduling),
        "v2_runner": bool(getattr(engine.vllm_config, "use_v2_model_runner", False)),
        "kv_tokens": int(cache.num_gpu_blocks) * int(cache.block_size),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "start_s": time.perf_counter() - began,
    }


def answer(generation: Generation, traces: Path | None, command: dict[str, Any]) -> Any:
    """The answer to one command."""
    if command["do"] == "prepare":
        workload = parse_workload(command["workload"], traces)
        return generation.prepare(workload, command["generation"], command.get("most"))
    if command["do"] == "decode":
        return generation.decode(command["steps"])
    if command["do"] == "finish":
        return generation.finish()
    if command["do"] == "profile":
        return generation.profile(command["steps"])
    from nostall.attach.vllm.counts import counts

    return counts()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True, help="a name of vLLM's enumeration")
    parser.add_argument("--cache-gib", type=float, required=True)
    parser.add_argument("--cache-dtype", default="auto", help="vLLM's name")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a request")
    parser.add_argument("--sequences", type=int, default=256, help="that run at a time")
    parser.add_argument("--cascade", action="store_true")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="with the model's config.json")
    parser.add_argument("channel", type=int, help="file descriptor")
    options = parser.parse_args()
    channel = Channel.from_descriptor(options.channel)
    engine, about = started_engine(options)
    generation = Generation(engine, BuildClock(options.backend))
    channel.send(about)
    while True:
        try:
            command = channel.receive()
        except ProcessEnded:
            return
        channel.send(answer(generation, options.traces, command))


if __name__ == "__main__":
    main()
