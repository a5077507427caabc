"""One engine of the benchmark of rollouts: answers commands over a Unix socket."""

from __future__ import annotations

import argparse
import json
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from benchmarks.serving.engine.rollout_workload import Rollout
from benchmarks.serving.engine.vllm_child import BuildClock

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Llama-3-8B's shape with a quarter of its vocabulary."""
COMPARED = 12
"""First tokens of each request that are compared between engines."""


class Generation:
    """The requests of one workload in an engine."""

    def __init__(self, engine: Any, clock: BuildClock) -> None:
        self.engine, self.clock = engine, clock
        self.tokens: dict[str, list[int]] = {}
        self.number = 0

    def prepare(self, workload: Rollout) -> dict[str, float]:
        """Cache the shared prompts, and start all requests, until each has its first token."""
        self.number += 1
        shared, prompts = workload.tokens(self.number)
        began = time.perf_counter()
        self._add(shared, 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        cached = time.perf_counter()
        self.tokens = {}
        self._add(prompts, workload.new)
        while len(self.tokens) < len(prompts):
            self._step()
        return {
            "cache_prompts_s": cached - began,
            "first_tokens_s": time.perf_counter() - cached,
            "requests": len(prompts),
        }

    def decode(self, steps: int) -> dict[str, float]:
        """Time so many steps."""
        wait_for_device()
        before = self._count()
        began = time.perf_counter()
        each = []
        for _ in range(steps):
            start = time.perf_counter()
            self._step()
            each.append(time.perf_counter() - start)
        wait_for_device()
        seconds = time.perf_counter() - began
        each.sort()
        return {
            "seconds": seconds,
            "steps": steps,
            "tokens": self._count() - before,
            "step_p50_ms": each[len(each) // 2] * 1e3,
        }

    def finish(self) -> dict[str, Any]:
        """Run to the end of all requests; their first tokens, and the host's time of a build."""
        while self.engine.has_unfinished_requests():
            self._step()
        first = [self.tokens[name][:COMPARED] for name in sorted(self.tokens)]
        return {
            "first_tokens": first,
            "build_us": self.clock.take_us(),
            "all_tokens": self._count(),
        }

    def _add(self, prompts: list[list[int]], new: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for index, prompt in enumerate(prompts):
            name = f"{self.number}:{new}:{index:04}:"
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def _step(self) -> None:
        for output in self.engine.step():
            # Some versions append a suffix of their own to the names of requests.
            name = output.request_id.rpartition(":")[0]
            self.tokens[name] = list(output.outputs[0].token_ids)

    def _count(self) -> int:
        return sum(map(len, self.tokens.values()))


def wait_for_device() -> None:
    """Wait until the GPU has run all steps; without one a step has run when it returns."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def started_engine(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """An engine, and what it is."""
    began = time.perf_counter()
    import torch

    import vllm
    from vllm import LLM

    more = {"disable_cascade_attn": False} if options.cascade else {}
    llm = LLM(
        model=str(options.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=16_384,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        enable_prefix_caching=True,
        attention_backend=options.backend,
        # Engines that share a GPU cannot measure how much memory is free.
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=int(options.cache_gib * 2**30),
        **more,
    )
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    return engine, {
        "backend": options.backend,
        "cascade": options.cascade,
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
        generation.clock.take_us()
        return generation.prepare(Rollout.parse(command["workload"]))
    if command["do"] == "decode":
        return generation.decode(command["steps"])
    if command["do"] == "finish":
        return generation.finish()
    from nostall.attach.vllm.counts import counts

    return counts()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--cache-gib", type=float, required=True)
    parser.add_argument("--cascade", action="store_true")
    parser.add_argument("--folder", type=Path, required=True, help="for the model's configuration")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to connect to")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    config = {**MODEL, "num_hidden_layers": options.layers}
    (options.folder / "config.json").write_text(json.dumps(config))
    connection = Client(options.socket, "AF_UNIX")
    engine, about = started_engine(options)
    generation = Generation(engine, BuildClock(options.backend))
    connection.send_bytes(json.dumps(about).encode())
    while True:
        try:
            command = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps(answer(generation, command)).encode())


if __name__ == "__main__":
    main()
