"""Benchmark of engine steps: the times of vLLM's steps by what they compute, for the simulator.

    python -m benchmarks run serving.step_costs --out FILE [--vllm FOLDER] [--budget-s SECONDS]

Runs a real engine in a child process, on a model of Llama-3-8B's shape with random weights. For
each point of a seeded grid (decodes, keys of each) it fills the engine with decodes, lets it run
some steps, and adds prompts of several lengths. The time of every step is recorded with what vLLM's
own scheduler put into it, prefills of the filling included. A warm-up round comes first. The file
is written again after each point, so that a time limit loses nothing.

``--vllm`` is a folder with an unpacked vLLM, put in front of the import path; without it the
installed one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import head
from benchmarks.serving.engine.model import LLAMA
from nostall.attach.rollouts.engine import ENVIRONMENT
from nostall.core.errors import MissingPart
from nostall.core.files.atomic import write_atomically

DECODES = (0, 1, 4, 16, 64, 128, 256)
KEYS = (256, 1024, 4096)
PROMPTS = (32, 128, 512, 1024, 2048, 4096, 6000)
DECODE_STEPS = 6
"""Steps of decodes before and after the prompts of a point."""
MAX_TOKENS = 4096
"""Tokens of a step (max_num_batched_tokens)."""
MAX_FILL = 300_000
"""Keys of all decodes of a point; larger points are left out."""
CHILD = "benchmarks.serving.engine.step_costs"


class StepRecorder:
    """Wraps the scheduler of an engine in this process, and times the engine's steps.

    With asynchronous scheduling the engine schedules a step while the one before it runs. The time
    of a step then is that between the results of both, which hides most of the host's work.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.samples: list[dict[str, Any]] = []
        self._contents: dict[int, tuple[dict[str, int], float, Any]] = {}
        self._completed: list[tuple[dict[str, int], float]] = []
        self._begin = self._last_end = 0.0
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._schedule = self._scheduler.schedule
        self._update = self._scheduler.update_from_output
        self._scheduler.schedule = self._record
        self._scheduler.update_from_output = self._complete

    def close(self) -> None:
        """Leave the scheduler as it was."""
        self._scheduler.schedule = self._schedule
        self._scheduler.update_from_output = self._update

    def _record(self, *arguments: Any, **options: Any) -> Any:
        output = self._schedule(*arguments, **options)
        # The output is kept, so that no later one gets its id.
        self._contents[id(output)] = (self._content_of(output), self._begin, output)
        return output

    def _complete(self, output: Any, *arguments: Any, **options: Any) -> Any:
        # A step that was scheduled before the recorder began has no content.
        if id(output) in self._contents:
            self._completed.append(self._contents.pop(id(output))[:2])
        return self._update(output, *arguments, **options)

    def _content_of(self, output: Any) -> dict[str, int]:
        """What a step computes, by vLLM's scheduler output."""
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        content = dict.fromkeys(
            ("prefill_tokens", "prefill_pairs", "decode_tokens", "decode_keys"), 0
        )
        for name, tokens in output.num_scheduled_tokens.items():
            before = computed[name]
            prompt = self._scheduler.requests[name].num_prompt_tokens
            if before < prompt:
                content["prefill_tokens"] += tokens
                content["prefill_pairs"] += tokens * before + tokens * (tokens + 1) // 2
            else:
                content["decode_tokens"] += tokens
                content["decode_keys"] += before + tokens
        return content

    def step(self, *, records: bool) -> None:
        """Run one step of the engine and record the one that ended."""
        self._completed = []
        self._begin = time.perf_counter()
        self.engine.step()
        end = time.perf_counter()
        if not self._completed:
            return
        content, begin = self._completed[-1]
        seconds = end - max(begin, self._last_end)
        self._last_end = end
        if records and any(content.values()):
            self.samples.append({**content, "seconds": seconds})


def run_point(
    recorder: StepRecorder, parameters: Any, decodes: int, keys: int, seed: int, *, records: bool
) -> None:
    """Fill the engine with decodes, then add the prompts one by one."""
    rng, engine = random.Random(seed), recorder.engine

    def add(name: str, length: int, outputs: int) -> str:
        prompt = [rng.randrange(LLAMA["vocab_size"]) for _ in range(length)]
        request = {"prompt_token_ids": prompt}
        engine.add_request(name, request, parameters(outputs))
        return name

    names = [add(f"{seed}-decode-{i}", keys, 200) for i in range(decodes)]
    fill_steps = decodes * keys // MAX_TOKENS + 2 if decodes else 0
    for _ in range(fill_steps + (DECODE_STEPS if decodes else 0)):
        recorder.step(records=records)
    for number, prompt in enumerate(PROMPTS):
        add(f"{seed}-prompt-{number}", prompt, 1)
        for _ in range(-(-prompt // max(MAX_TOKENS - decodes, 1)) + 1):
            recorder.step(records=records)
    for _ in range(DECODE_STEPS if decodes else 0):
        recorder.step(records=records)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        recorder.step(records=False)


def child(layers: int, budget_s: float, seed: int) -> None:
    """Measure; prints a line of JSON for the start and for each point."""
    start = time.monotonic()
    import torch

    import vllm
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps({**LLAMA, "num_hidden_layers": layers})
        )
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=LLAMA["max_position_embeddings"],
            gpu_memory_utilization=0.85,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=256,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        engine = llm.llm_engine
        cache = engine.vllm_config.cache_config
        started = {
            "gpu": torch.cuda.get_device_name(0),
            "engine": f"vllm {vllm.__version__}",
            "kv_tokens": int(cache.num_gpu_blocks) * int(cache.block_size),
            "start_s": round(time.monotonic() - start, 1),
        }
        print(json.dumps({"started": started}), flush=True)

        for point in points(engine, int(started["kv_tokens"]), start + budget_s, seed):
            print(json.dumps({"point": point}), flush=True)


def points(engine: Any, kv_tokens: int, end: float, seed: int) -> Iterator[dict[str, Any]]:
    """Samples of the grid's points in a seeded order, until ``time.monotonic()`` is ``end``."""
    from vllm import SamplingParams

    def parameters(outputs: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)

    recorder = StepRecorder(engine)
    run_point(recorder, parameters, 16, 256, seed, records=False)
    most = min(MAX_FILL, kv_tokens - 2 * max(PROMPTS) - 256 * 200)
    grid = [(d, k) for d in DECODES for k in KEYS if d * k <= most and (d or k == KEYS[0])]
    random.Random(seed).shuffle(grid)
    for number, (decodes, keys) in enumerate(grid, 1):
        if time.monotonic() > end:
            break
        recorder.samples = []
        run_point(recorder, parameters, decodes, keys, seed + number, records=True)
        yield {"decodes": decodes, "keys": keys, "samples": recorder.samples}
    recorder.close()


def measure_points(engine: Any, seconds: float, seed: int) -> list[dict[str, Any]]:
    """The points of an engine that serves other workloads, too."""
    cache = engine.vllm_config.cache_config
    kv_tokens = int(cache.num_gpu_blocks) * int(cache.block_size)
    return list(points(engine, kv_tokens, time.monotonic() + seconds, seed))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, help="folder with an unpacked vLLM")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> int:
    if options.vllm is None and find_spec("vllm") is None:
        raise MissingPart(
            "vLLM is not installed; pip install vllm, or give --vllm a folder with an unpacked one"
        )
    paths = [str(options.vllm)] if options.vllm else []
    paths += [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **ENVIRONMENT,
    }
    settings = [str(options.layers), str(options.budget_s), str(options.seed)]
    log = options.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    body: dict[str, Any] = {}
    points: list[dict[str, Any]] = []
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", CHILD, *settings],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"started"'):
                body = json.loads(line)["started"]
                print(f"engine started after {body['start_s']} s: {body}", flush=True)
            elif line.startswith('{"point"'):
                points.append(json.loads(line)["point"])
                _save(options, body, points)
                _print_point(points[-1])
    if not points:
        print(f"no point was measured (exit code {process.returncode}); the end of {log}:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        return 1
    return 0


def _save(options: argparse.Namespace, body: dict[str, Any], points: list[dict[str, Any]]) -> None:
    document = {
        "format": "nostall-step-costs-1",
        **head(),
        **body,
        "model": f"Llama-3-8B's shape, {options.layers} layers, random weights",
        "samples": [sample for point in points for sample in point["samples"]],
    }
    write_atomically(options.out, json.dumps(document).encode())


def _print_point(point: dict[str, Any]) -> None:
    decode = [s["seconds"] for s in point["samples"] if not s["prefill_tokens"]]
    prefill = [s["seconds"] / s["prefill_tokens"] for s in point["samples"] if s["prefill_tokens"]]
    shown = f"{statistics.median(decode) * 1e3:7.2f} ms" if decode else "      -   "
    print(
        f"{point['decodes']:4} decodes of {point['keys']:5} keys: {len(point['samples']):4} steps, "
        f"decode step {shown}, prefill {statistics.median(prefill) * 1e6:6.1f} us a token",
        flush=True,
    )


if __name__ == "__main__":
    child(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
