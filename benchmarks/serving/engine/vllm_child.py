"""One vLLM engine that serves workloads on command; run by ``vllm_engine``.

Model: eight layers of the shape of Llama-3-8B with random weights, greedy tokens. All requests of
a workload arrive at once, so that the token rate is the engine's; a paced workload gives the time
to the first token. Commands and answers come over the channel of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serving.engine.model import LLAMA
from nostall.attach.rollouts.generation import BuildClock
from nostall.core.process import Channel, ProcessEnded

MAX_TOKENS = 8192
CONFIG = {**LLAMA, "num_hidden_layers": 8, "max_position_embeddings": MAX_TOKENS}
PATTERN = 12
"""Words of a prompt are drawn in repeated runs of this length, so that n-grams are found."""

Lengths = list[tuple[int, int]]
"""(prompt tokens, output tokens) of each request."""


def lengths_of(workload: str, traces: Path, requests: int, seed: int) -> Lengths:
    """The requests of a workload, by its name."""
    draw = random.Random(seed)
    if workload == "prefill-heavy":
        return [(draw.randint(2000, 6000), draw.randint(8, 32)) for _ in range(requests)]
    if workload == "decode-heavy":
        return [(draw.randint(100, 1000), draw.randint(128, 384)) for _ in range(requests)]
    path = traces / f"AzureLLMInferenceTrace_{workload}.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    first = draw.randrange(len(rows) - requests)
    pairs = [(int(row[1]), int(row[2])) for row in rows[first : first + requests]]
    return [
        (max(1, min(prompt, MAX_TOKENS - out - 1)), max(1, out))
        for prompt, out in ((p, min(o, 1024)) for p, o in pairs)
    ]


def prompt_of(length: int, seed: int) -> list[int]:
    """Tokens of a prompt: runs of words that come again."""
    draw = random.Random(seed)
    runs = [[draw.randrange(3, 1000) for _ in range(PATTERN)] for _ in range(4)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += draw.choice(runs)
    return tokens[:length]


def serve(engine: Any, name: str, lengths: Lengths, seed: int, rate: float | None) -> Any:
    """Serve requests, all at once or ``rate`` a second; the figures of the workload."""
    from vllm import SamplingParams

    waiting = [
        (
            0.0 if rate is None else index / rate,
            {"prompt_token_ids": prompt_of(prompt, seed * 100_000 + index)},
            SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False),
        )
        for index, (prompt, out) in enumerate(lengths)
    ]
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    times: dict[str, list[tuple[float, int]]] = {}
    tokens: dict[str, list[int]] = {}
    steps: list[float] = []
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            at, prompt, sampling = waiting.pop(0)
            request = f"{name}-{seed}-{len(arrived)}"
            arrived[request] = at if rate is not None else 0.0
            engine.add_request(request, prompt, sampling)
        if not engine.has_unfinished_requests():
            continue
        before = time.perf_counter()
        outputs = engine.step()
        after = time.perf_counter()
        steps.append(after - before)
        for output in outputs:
            request = output.request_id
            if request not in arrived:  # some versions append a suffix of their own
                request = request.rpartition("-")[0]
            identifiers = list(output.outputs[0].token_ids)
            tokens[request] = identifiers
            first.setdefault(request, after - start)
            times.setdefault(request, []).append((after - start, len(identifiers)))
    seconds = time.perf_counter() - start
    ttft = sorted(first[r] - arrived[r] for r in first)
    gaps = sorted(
        (b - a) / max(1, m - n)
        for points in times.values()
        for (a, n), (b, m) in pairwise(points)
        if m > n
    )
    return {
        "workload": name,
        "seed": seed,
        "rate": rate,
        "requests": len(lengths),
        "seconds": seconds,
        "prompt_tokens": sum(p for p, _ in lengths),
        "output_tokens": sum(len(t) for t in tokens.values()),
        "output_tokens_per_s": sum(len(t) for t in tokens.values()) / seconds,
        "steps": len(steps),
        "ttft_s": {"p50": _at(ttft, 0.5), "p99": _at(ttft, 0.99)},
        "tbt_s": {"p50": _at(gaps, 0.5), "p99": _at(gaps, 0.99)},
        "step_s": {"p50": _at(sorted(steps), 0.5), "p99": _at(sorted(steps), 0.99)},
        "tokens": [tokens[r][:48] for r in sorted(tokens, key=lambda r: int(r.split("-")[-1]))],
    }


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def next_tokens(engine: Any, prompts: list[list[int]]) -> list[dict[str, float]]:
    """Log probabilities of the most probable next tokens of each prompt, by token."""
    from vllm import SamplingParams

    found: dict[str, dict[str, float]] = {}
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"logits-{number}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs and output.outputs[0].logprobs:
                first = output.outputs[0].logprobs[0]
                number = output.request_id.split("-")[1]
                found[number] = {str(t): float(v.logprob) for t, v in first.items()}
    return [found.get(str(number), {}) for number in range(len(prompts))]


def started_engine(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """An engine after its warm-up, and what it is."""
    began = time.perf_counter()
    import torch

    import vllm
    from vllm import LLM

    speculation = None
    if options.speculate:
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": options.speculate,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.8}
    if options.cache_gib:
        # Engines that share a GPU cannot measure how much memory is free.
        memory = {
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": int(options.cache_gib * 2**30),
        }
    llm = LLM(
        model=str(options.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=4096,
        max_num_seqs=256,
        enable_prefix_caching=False,
        attention_backend=options.backend,
        speculative_config=speculation,
        **memory,
    )
    engine = llm.llm_engine
    serve(engine, "warm-up", [(600, 8)] * 16, 9, None)
    cache = engine.vllm_config.cache_config
    return engine, {
        "backend": options.backend,
        "speculate": options.speculate,
        "served": os.environ.get("NOSTALL_VLLM_ATTENTION", "auto"),
        "linear": "NOSTALL_VLLM_LINEAR" in os.environ,
        "async": bool(engine.vllm_config.scheduler_config.async_scheduling),
        "kv_tokens": int(cache.num_gpu_blocks) * int(cache.block_size),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "start_s": time.perf_counter() - began,
    }


def answer(engine: Any, clock: BuildClock, traces: Path, command: dict[str, Any]) -> Any:
    """The answer to one command."""
    if command["do"] == "serve":
        name, _, rate = command["workload"].partition("@")
        lengths = lengths_of(name, traces, command["requests"], 0)
        clock.take_us()
        result = serve(
            engine, command["workload"], lengths, command["seed"], float(rate) if rate else None
        )
        return {**result, "build_us": clock.take_us()}
    if command["do"] == "logits":
        return next_tokens(engine, command["prompts"])
    if command["do"] == "steps":
        from benchmarks.serving.engine.step_costs import measure_points

        return measure_points(engine, command["seconds"], command["seed"])
    from nostall.attach.vllm.counts import counts

    return counts()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--cache-gib", type=float, default=0.0, help="of keys and values; 0: all")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the model's configuration")
    parser.add_argument("channel", type=int, help="file descriptor")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "config.json").write_text(json.dumps(CONFIG))
    channel = Channel.from_descriptor(options.channel)
    engine, about = started_engine(options)
    clock = BuildClock(options.backend)
    channel.send(about)
    while True:
        try:
            command = channel.receive()
        except ProcessEnded:
            return
        channel.send(answer(engine, clock, options.traces, command))


if __name__ == "__main__":
    main()
