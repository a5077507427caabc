"""Does vLLM with nostall's plug-in compute what it computes with FlashAttention alone?

    python -m benchmarks run serving.forced_tokens --out forced_tokens.json.gz \\
        --nostall new=. --nostall old=FOLDER --vllm FOLDER

All engines get the same prompts and are forced to give the same tokens; the log probabilities of
these tokens are compared with those of back end FLASH_ATTN. Settings: ``groups`` (a model whose
layers form several cache groups of one spec), ``full`` (``cudagraph_mode=FULL`` asked for, prompts
beside decodes), ``manager-off`` (layers with and without a window in one cache group) and
``shared`` (prefix caching; samples of prompts, some of which arrive beside decodes, and long
prompts among them) and ``fp8`` (``shared`` with a cache of fp8, compared with FLASH_ATTN's of 16
bits: nostall may be :data:`MOST_OF_EAGER` times as far from it as FLASH_ATTN with fp8) and ``tp``
(``shared`` on two GPUs with tensor parallelism, with twice the heads). Beside
nostall (``auto`` and ``all``) each setting runs FLASH_ATTN a second time, and without graphs:
its other numbers of splits show the size of ordinary rounding. ``manager-off`` also runs FLASH_ATTN
with the manager: without it vLLM 0.25 itself gives full layers the window of their group. With
``shared`` the run fails unless nostall's mean distance is at most :data:`MOST_OF_EAGER` times that
of FLASH_ATTN without graphs, and ``auto`` read prefixes once in decodes, beside new samples and
beside prompts.

``--nostall NAME=FOLDER`` is a source tree that has ``src/nostall``; more than one shows a state
before and after a change. Each engine is a process with a time limit; ``--parallel`` of them share
the GPU. ``--tiny`` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.serving.engine.model import LLAMA
from nostall.attach.rollouts.engine import ENVIRONMENT
from nostall.core.errors import BadInput

CHILD = Path(__file__).with_name("forced_tokens_child.py")
SETTINGS = ("groups", "full", "manager-off", "shared", "fp8", "tp")
MODEL_OF = {
    "groups": "hybrid", "full": "plain", "manager-off": "hybrid", "shared": "plain",
    "fp8": "plain", "tp": "wide",
}  # fmt: skip
"""Setting -> its model. A rank of *wide* has the heads of *plain*."""
BASE, AGAIN, EAGER = "FLASH_ATTN", "FLASH_ATTN again", "FLASH_ATTN eager"
FP8 = "FLASH_ATTN, fp8"
MANAGER_ON = "FLASH_ATTN, manager on"
VARIABLES = {
    **ENVIRONMENT,
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_PLUGINS": "",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
}
"""V1 of vLLM's model runner is the one that copies metadata between groups."""
IN_WORKERS = {"VLLM_PLUGINS": "nostall", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Processes of ranks find the plug-in by its entry point, and are asked for their counts."""
MODEL: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
HYBRID = {"sliding_window": 256, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
"""Two groups of full layers with one spec, and one group of layers with a window."""
WORKLOAD = {
    "seed": 0, "first": 64, "longest": 600, "tokens": 32,
    "later": 24, "from": 13, "beside": 4, "short": 40,
}  # fmt: skip
SHARED = {"prompts": 8, "shared": 1032, "short": 16, "beside": 1}
"""Samples of prompts; a page of 16 tokens is in part shared."""
MOST_OF_EAGER = 1.1
"""Mean distance of nostall's log probabilities, of that of FLASH_ATTN without graphs."""
IN_STEPS = ("decode", "verify", "mixed, in part")
"""Kinds of steps that ``auto`` must have served in the setting ``shared``."""
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 3 << 30,
}
SIZES = [1, 8, 64, 128, 256]
"""Steps of these numbers of tokens are captured."""


def save_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a model of random weights, large enough that attention decides the logits."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    hidden, heads = config["hidden_size"], config["head_dim"] * config["num_attention_heads"]
    pages, wide = config["head_dim"] * config["num_key_value_heads"], config["intermediate_size"]
    dtype = getattr(torch, config["torch_dtype"])

    def weight(rows: int, columns: int, gain: float = 1.0) -> Any:
        return (torch.randn(rows, columns, generator=draw) * gain * columns**-0.5).to(dtype)

    ones = torch.ones(hidden, dtype=dtype)
    words = config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": weight(words, hidden, hidden**0.5),
        "lm_head.weight": weight(words, hidden, 2.0),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": weight(heads, hidden, 1.5),
            f"{name}.self_attn.k_proj.weight": weight(pages, hidden, 1.5),
            f"{name}.self_attn.v_proj.weight": weight(pages, hidden),
            f"{name}.self_attn.o_proj.weight": weight(hidden, heads, 2.0),
            f"{name}.mlp.gate_proj.weight": weight(wide, hidden),
            f"{name}.mlp.up_proj.weight": weight(wide, hidden),
            f"{name}.mlp.down_proj.weight": weight(hidden, wide),
            f"{name}.input_layernorm.weight": ones.clone(),
            f"{name}.post_attention_layernorm.weight": ones.clone(),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def jobs_of(
    setting: str, options: argparse.Namespace, trees: dict[str, Path], models: Path
) -> dict[str, dict[str, Any]]:
    """The engines of a setting, by name."""
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": SIZES}
    if setting == "full":
        graphs["cudagraph_mode"] = "FULL"
    engine = {**ENGINE, "attention_backend": "FLASH_ATTN", "compilation_config": graphs}
    if options.tiny:
        engine = {**TINY_ENGINE}
    if setting == "manager-off":
        engine["disable_hybrid_kv_cache_manager"] = True
    work = {**WORKLOAD}
    is_shared = setting in ("shared", "fp8", "tp")
    if is_shared:
        engine["enable_prefix_caching"] = True
        work |= SHARED
    if options.tiny:
        work |= TINY_WORKLOAD | ({"shared": 200} if is_shared else {})
    work["vocabulary"] = TINY["vocab_size"] if options.tiny else MODEL["vocab_size"]
    model = str(models / MODEL_OF[setting])
    job = {"model": model, "workload": work, "plug_in": False, "environment": {}}
    if setting == "tp":
        engine |= {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    eager = {key: value for key, value in engine.items() if key != "compilation_config"}
    jobs = {
        BASE: {**job, "engine": engine},
        AGAIN: {**job, "engine": engine},
        EAGER: {**job, "engine": {**eager, "enforce_eager": True}},
    }
    if setting == "manager-off":
        jobs[MANAGER_ON] = {
            **job, "engine": {**engine, "disable_hybrid_kv_cache_manager": False},
        }  # fmt: skip
    steps_of_tree = ("auto", "all")
    if setting == "fp8":
        steps_of_tree = ("all",)
        engine = {**engine, "kv_cache_dtype": "fp8"}
        jobs = {
            BASE: jobs[BASE],
            EAGER: jobs[EAGER],
            FP8: {**job, "engine": engine},
            f"{FP8} eager": {**job, "engine": {**jobs[EAGER]["engine"], "kv_cache_dtype": "fp8"}},
        }
    custom = engine if options.tiny else {**engine, "attention_backend": "CUSTOM"}
    for tree, folder in trees.items():
        for steps in steps_of_tree:
            environment = {"NOSTALL_VLLM_ATTENTION": steps, "NOSTALL_VLLM_CPU": "1"}
            environment["PYTHONPATH"] = str(folder / "src")
            if setting == "tp":
                environment |= IN_WORKERS
            jobs[f"{tree}, {steps}"] = {
                **job, "engine": custom, "plug_in": True, "environment": environment,
            }  # fmt: skip
    return jobs


TINY = {
    **MODEL, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "torch_dtype": "float32",
}  # fmt: skip
TINY_WORKLOAD = {"first": 6, "longest": 300, "tokens": 6, "later": 4, "from": 4, "beside": 2}
TINY_ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 26, "enforce_eager": True,
}  # fmt: skip


def run_job(name: str, job: dict[str, Any], folder: Path, options: argparse.Namespace) -> Any:
    """What an engine's process wrote; a dictionary with ``problem`` if it did not end well."""
    folder.mkdir(parents=True)
    own = job.pop("environment")
    paths = [own.get("PYTHONPATH"), options.vllm, os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        **VARIABLES,
        **own,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    (folder / "job.json").write_text(json.dumps({**job, "out": str(folder / "out.json")}))
    began = monotonic()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(CHILD), str(folder / "job.json")],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(max(1.0, min(options.limit_s, options.end - began)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = "time limit"
    seconds = round(monotonic() - began, 1)
    print(f"{seconds:6.1f} s  {folder.parent.name}: {name}: {code}", flush=True)
    if code == 0:
        return {**json.loads((folder / "out.json").read_text()), "seconds": seconds}
    tail = (folder / "log").read_text(errors="replace")[-options.tail :]
    print(tail, flush=True)
    return {"problem": f"{code}", "log": tail, "seconds": seconds}


def compared(result: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """How far log probabilities are from those of the base."""
    if "problem" in result or "problem" in base:
        return {}
    differences = sorted(
        abs(a - b)
        for ours, theirs in zip(result["logprobs"], base["logprobs"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    best = [
        a == b
        for ours, theirs in zip(result["best"], base["best"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {
        "tokens": len(differences),
        "mean": fmean(differences),
        "p99": differences[int(0.99 * (len(differences) - 1))],
        "largest": differences[-1],
        "other_best": 1 - fmean(best),
    }


def shared_problems(
    engines: dict[str, dict[str, Any]], is_tiny: bool, yardstick: str = EAGER
) -> list[str]:
    """What is wrong with the engines of setting ``shared``, or ``fp8``.

    ``yardstick``: the engine whose distance nostall's may exceed by :data:`MOST_OF_EAGER`.
    """
    if any("problem" in engine for engine in engines.values()):
        return ["an engine did not end well"]
    limit = MOST_OF_EAGER * engines[yardstick]["from_base"]["mean"]
    problems = []
    for name, engine in engines.items():
        if name.startswith("FLASH_ATTN") or is_tiny:
            continue
        if not engine["from_base"]["mean"] <= limit:
            problems.append(f"{name}: mean distance {engine['from_base']['mean']} above {limit}")
        counts = engine["counts"]
        if not counts.get("shared prefixes", {}).get("with shared prefixes"):
            problems.append(f"{name}: no prefix was read once")
        if name.endswith(", auto"):
            missing = [kind for kind in IN_STEPS if kind not in counts["served"]]
            problems += [f"{name}: no step of kind {kind}" for kind in missing]
    return problems


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Lines: each engine beside the FLASH_ATTN of its setting."""
    columns = f"{'mean':>9} {'p99':>9} {'largest':>9} {'other best':>10}"
    lines = [f"{'setting':12} {'engine':24} {columns}  served"]
    for setting, engines in results.items():
        for name, result in engines.items():
            found = result.get("from_base") or {}
            numbers = " ".join(
                f"{found[key]:{width}.4f}" if found else f"{'-':>{width}}"
                for key, width in (("mean", 9), ("p99", 9), ("largest", 9), ("other_best", 10))
            )
            served = result.get("problem") or result.get("counts", {}).get("served", "")
            lines.append(f"{setting:12} {name:24} {numbers}  {served}")
    return lines


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nostall", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--vllm", type=Path, help="folder of an unpacked vLLM")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=120.0, help="of each engine")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="of the whole run")
    parser.add_argument("--tail", type=int, default=1500, help="characters of a failed one's log")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")


def main(options: argparse.Namespace) -> int:
    """Run all engines; returns 1 if one did not end well."""
    trees = {}
    for text in options.nostall or ["nostall=."]:
        name, equals, folder = text.partition("=")
        if not (equals and (Path(folder) / "src" / "nostall").is_dir()):
            raise BadInput(f"--nostall {text}; it needs NAME=FOLDER, FOLDER with src/nostall in it")
        trees[name] = Path(folder).resolve()
    options.end = monotonic() + options.budget_s
    results: dict[str, dict[str, Any]] = {setting: {} for setting in options.settings}
    with (
        tempfile.TemporaryDirectory(prefix="nostall-") as folder,
        ThreadPoolExecutor(options.parallel) as pool,
    ):
        models = Path(folder) / "models"
        plain = TINY if options.tiny else MODEL
        layers = {"layer_types": HYBRID["layer_types"] * 2}
        save_model(models / "plain", plain)
        heads = {key: 2 * plain[key] for key in ("num_attention_heads", "num_key_value_heads")}
        save_model(models / "wide", {**plain, **heads})
        save_model(models / "hybrid", {**plain, **HYBRID, **layers})
        waiting = {
            (setting, name): pool.submit(
                run_job, name, job, Path(folder) / setting / str(number), options
            )
            for setting in options.settings
            for number, (name, job) in enumerate(jobs_of(setting, options, trees, models).items())
        }
        for (setting, name), future in waiting.items():
            results[setting][name] = result = future.result()
            result["from_base"] = compared(result, results[setting][BASE])
            save(options.out, workload=WORKLOAD, model=MODEL | HYBRID, results=results)
    problems = []
    for setting, yardstick in (("shared", EAGER), ("fp8", FP8), ("tp", EAGER)):
        if setting in results:
            problems += shared_problems(results[setting], options.tiny, yardstick)
    about = {"workload": WORKLOAD, "shared": SHARED, "model": MODEL | HYBRID}
    save(options.out, **about, problems=problems, results=results)
    print(*table(results), *problems, sep="\n", flush=True)
    is_bad = any("problem" in one for row in results.values() for one in row.values())
    return int(is_bad or bool(problems))
