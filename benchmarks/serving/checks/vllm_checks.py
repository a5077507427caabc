"""Does vLLM with nostall's back end survive sleep and stress, and compute the same?

    python -m benchmarks run serving.vllm_checks --check sleep --out sleep_h200.json
    python -m benchmarks run serving.vllm_checks --check stress --budget-s 480 --out stress.json
    python -m benchmarks run serving.vllm_checks --check ngram --budget-s 400 --out ngram_h200.json

``sleep``: greedy tokens of samples of shared prompts before sleep, after sleep of level 1, and
after sleep of level 2 with weights loaded anew; all must be equal, and steps with shared prefixes
must have been served each time. FLASH_ATTN runs beside it.

``stress``: requests arrive and are aborted at random for ``--budget-s`` in all; most share a
prompt, and the cache is so small that vLLM preempts some. Each request that was not aborted must
end with all its tokens. Some of them run again, alone, with FLASH_ATTN: up to the first token that
differs, log probabilities must be nearer than ``--limit``.

``ngram``: samples of shared prompts with n-gram speculation, all steps served by nostall. Verifies
must have been served, and have read shared prefixes once; some requests run again, alone, with
FLASH_ATTN and without speculation, and are compared as above.

Each engine is a process with random weights of 6 layers. ``--tiny`` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.serving.engine.forced_tokens import MODEL, TINY, save_model
from nostall.attach.rollouts.engine import ENVIRONMENT

ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.05,
}
TINY_ENGINE = {
    "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 24, "enforce_eager": True,
}  # fmt: skip
CACHE_BYTES = {"sleep": 3 << 30, "stress": 1 << 30, "repeat": 1 << 30, "ngram": 3 << 30}
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip
START_SECONDS, REPEAT_SECONDS, DRAIN_SECONDS = 120.0, 100.0, 40.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--check", choices=("sleep", "stress", "ngram"), required=True)
    parser.add_argument("--budget-s", type=float, default=480.0, help="of the whole check")
    parser.add_argument("--backend", default="CUSTOM", help="vLLM's name of the stressed back end")
    parser.add_argument("--limit", type=float, default=0.5, help="of log probabilities")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")


def main(options: argparse.Namespace) -> int:
    """Run one check; returns 1 if something was lost, or computed otherwise."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {**(TINY if options.tiny else MODEL)}
        save_model(folder / "model", config)
        run = {"sleep": sleep, "stress": stress, "ngram": ngram}[options.check]
        found = run(folder, options, begin)
    save(options.out, kind="checked", check=options.check, **found)
    print(json.dumps(found["summary"], indent=1))
    return int(not found["is_right"])


def sleep(folder: Path, options: argparse.Namespace, begin: float) -> dict[str, Any]:
    """The engines of both back ends, one after the other."""
    found = {}
    for backend in dict.fromkeys((options.backend, "FLASH_ATTN")):
        job = job_of("sleep", folder, options, backend, options.budget_s / 2)
        job["engine"]["enable_sleep_mode"] = not options.tiny
        found[backend] = run_job(folder / backend, job)
    summary = {
        name: each.get("problem") or {phase: p["equal"] for phase, p in each["result"].items()}
        for name, each in found.items()
    }
    ours = found[options.backend]
    is_right = "problem" not in ours and all(p["equal"] for p in ours["result"].values())
    if is_right and options.backend == "CUSTOM" and not options.tiny:
        phases = ours["result"].values()
        is_right = all(p["counts"]["shared prefixes"]["with shared prefixes"] for p in phases)
    return {"engines": found, "summary": summary, "is_right": is_right}


def stress(folder: Path, options: argparse.Namespace, begin: float) -> dict[str, Any]:
    """A stressed engine, and another one that repeats some of its requests."""
    seconds = options.budget_s - (0 if options.tiny else REPEAT_SECONDS)
    job = job_of("stress", folder, options, options.backend, seconds)
    return repeated("stressed", run_job(folder / "stress", job), folder, options, begin)


def ngram(folder: Path, options: argparse.Namespace, begin: float) -> dict[str, Any]:
    """An engine with n-gram speculation, and another one that repeats some of its requests."""
    seconds = max(options.budget_s - REPEAT_SECONDS - START_SECONDS, 60.0)
    job = job_of("ngram", folder, options, options.backend, seconds)
    job["engine"]["speculative_config"] = NGRAM
    job["environment"] = {"NOSTALL_VLLM_ATTENTION": "all", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    found = run_job(folder / "ngram", job)
    if "problem" not in found and not options.tiny and options.backend == "CUSTOM":
        plug_in = found["about"]["counts_of_plug_in"]
        found["result"]["problems"] += [
            text
            for text, count in (
                ("no verify was served", plug_in["served"].get("verify", 0)),
                ("no prefix was read once", plug_in["shared prefixes"]["with shared prefixes"]),
            )
            if not count
        ]
    return repeated("speculated", found, folder, options, begin)


def repeated(
    name: str, found: dict[str, Any], folder: Path, options: argparse.Namespace, begin: float
) -> dict[str, Any]:
    """The result of an engine whose requests FLASH_ATTN repeats."""
    if "problem" in found:
        return {"engines": {name: found}, "summary": found["problem"], "is_right": False}
    requests = found["result"].pop("requests")[: 4 if options.tiny else 64]
    left = options.budget_s - (time.monotonic() - begin)
    job = job_of("repeat", folder, options, "FLASH_ATTN", max(left, 60.0))
    again = run_job(folder / "repeat", {**job, "requests": requests, "limit": options.limit})
    problems = [*found["result"]["problems"], *again.get("result", again).get("problems", ())]
    if "problem" in again:
        problems.append(again["problem"])
    summary = {
        **found["result"]["counts"],
        "plug_in": found["about"]["counts_of_plug_in"],
        **{key: x for key, x in again.get("result", {}).items() if key != "problems"},
        "problems": problems[:5],
    }
    return {
        "engines": {name: found, "repeated": again},
        "summary": summary,
        "is_right": not problems,
    }


def job_of(
    do: str, folder: Path, options: argparse.Namespace, backend: str, seconds: float
) -> dict[str, Any]:
    """What an engine's process is told."""
    if options.tiny:
        engine: dict[str, Any] = {**TINY_ENGINE}
    else:
        engine = {**ENGINE, "attention_backend": backend, "kv_cache_memory_bytes": CACHE_BYTES[do]}
    return {
        "do": do,
        "engine": {**engine, "model": str(folder / "model")},
        "seconds": seconds,
        "drain_seconds": min(DRAIN_SECONDS, seconds / 3),
        "vocabulary": TINY["vocab_size"] if options.tiny else MODEL["vocab_size"],
        "alive": 12 if options.tiny else 320,
        "longest": 300 if options.tiny else 1500,
        "new": 12 if options.tiny else 250,
        "is_tiny": options.tiny,
    }


def run_job(path: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What an engine's process wrote, or ``problem`` if it did not end well."""
    out, file = path.with_suffix(".out.json"), path.with_suffix(".job.json")
    file.write_text(json.dumps({**job, "out": str(out)}))
    command = [sys.executable, "-m", "benchmarks.serving.checks.vllm_checks_child", str(file)]
    own = job.get("environment", {})
    environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "", **own}
    try:
        run = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=job["seconds"] + START_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"problem": "the engine did not end in time"}
    if run.returncode or not out.exists():
        return {"problem": f"exit code {run.returncode}: {run.stderr[-1500:]}"}
    found: dict[str, Any] = json.loads(out.read_text())
    return found
