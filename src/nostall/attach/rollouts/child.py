"""The process of one engine: starts vLLM on a model of random weights, and answers commands."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nostall.attach.rollouts.generation import BuildClock, Generation
from nostall.attach.rollouts.workload import Rollout
from nostall.attach.vllm.plugin import register
from nostall.core.process import Channel, ProcessEnded

MOST_BATCHED = 8192
Answer = Callable[[Generation, dict[str, Any]], Any]


def started_engine(
    options: argparse.Namespace, more: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """An engine, and what it is; ``more``: further arguments of ``LLM``."""
    began = time.perf_counter()
    import torch

    import vllm
    from vllm import LLM

    # vLLM calls it itself where nostall is installed and VLLM_PLUGINS allows it.
    register()
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
        kv_cache_memory_bytes=int(options.cache_gib * 2**30),
        **more,
    )
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    return engine, {
        "backend": options.backend,
        "async": bool(engine.vllm_config.scheduler_config.async_scheduling),
        "v2_runner": bool(getattr(engine.vllm_config, "use_v2_model_runner", False)),
        "kv_tokens": int(cache.num_gpu_blocks) * int(cache.block_size),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "start_s": time.perf_counter() - began,
    }


def answer(generation: Generation, command: dict[str, Any]) -> Any:
    """The answer to one command."""
    if command["do"] == "prepare":
        requests = Rollout.parse(command["workload"]).requests()
        return generation.prepare(requests, command["generation"])
    if command["do"] == "decode":
        return generation.decode(command["steps"])
    if command["do"] == "finish":
        return generation.finish()
    from nostall.attach.vllm.counts import counts

    return counts()


def parser() -> argparse.ArgumentParser:
    """The options of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True, help="a name of vLLM's enumeration")
    parser.add_argument("--cache-gib", type=float, required=True)
    parser.add_argument("--longest", type=int, required=True, help="tokens of a request")
    parser.add_argument("--sequences", type=int, required=True, help="that run at a time")
    parser.add_argument("--folder", type=Path, required=True, help="with the model's config.json")
    parser.add_argument("channel", type=int, help="file descriptor")
    return parser


def serve(
    options: argparse.Namespace,
    more: Mapping[str, Any],
    answer: Answer = answer,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Start an engine, and answer commands until the channel ends.

    ``more``: further arguments of ``LLM``; ``known``: what is told of the engine, too.
    """
    channel = Channel.from_descriptor(options.channel)
    engine, about = started_engine(options, more)
    generation = Generation(engine, BuildClock(options.backend))
    channel.send({**about, **known})
    while True:
        try:
            command = channel.receive()
        except ProcessEnded:
            return
        channel.send(answer(generation, command))


if __name__ == "__main__":
    given = parser().parse_args()
    serve(given, {"attention_backend": given.backend})
