"""A program around vLLM's ``LLM`` as written, and with what `nostall optimize` proves of it.

    python -m benchmarks run optimizing.vllm --out OUT.json [--workloads shared] [--minutes 4]
        [--limit 290] [--model FOLDER]

`nostall optimize` starts ``engines/vllm_offline.py`` several times, as written and with other
engine arguments in turns.  Then it runs under `nostall apply --bundle` if seconds are left, and the
lines of its calls are kept.  One start as written and one with a change give a row, "undecided";
two of each decide: ``--limit`` needs two starts for the first and four for the second (a start took
109 s to its first call in ``results/vllm_h200.json``).  Without ``--model``, a Llama of 8 layers of
the shape of Llama-3-8B with random weights is made, for vLLM's GPU build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import load, save
from benchmarks.optimizing.sharing import Gate
from benchmarks.optimizing.whole_programs import optimise

SCRIPT = Path(__file__).with_name("engines") / "vllm_offline.py"
WORKLOADS = ("shared", "speculation", "eager")
CALL = re.compile(rb"call \d+: (\d+) tokens in ([\d.]+) s")
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MAKE = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2]))).save_pretrained(sys.argv[1])
"""


def make_model(folder: Path, **changes: int) -> None:
    """Write a model of random weights, in a process of its own, which leaves the GPU's memory."""
    shape = json.dumps({**SHAPE, **changes})
    subprocess.run([sys.executable, "-c", _MAKE, str(folder), shape], check=True)


def calls(command: list[str], variables: dict[str, str], seconds: float) -> list[list[float]]:
    """Tokens and seconds of each call that a program prints; empty if it does not end in time."""
    try:
        run = subprocess.run(command, env=variables, stdout=subprocess.PIPE, timeout=seconds)
    except subprocess.TimeoutExpired:
        return []
    return [[float(tokens), float(took)] for tokens, took in CALL.findall(run.stdout)]


def measure(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One workload: what `nostall optimize` answers, and the calls with and without its bundle."""
    command = [sys.executable, "-u", str(SCRIPT), str(model), "--workload", name]
    with tempfile.TemporaryDirectory(prefix="nostall-vllm-") as temporary:
        folder = Path(temporary)
        variables = {**os.environ, "NOSTALL_HOME": str(folder / "store")}
        limit = max(30.0, options.ends - time.perf_counter())
        gate = Gate()
        found = optimise(command, variables, folder, options.minutes, limit, gate)
        gate.close()
        bundle, logs = folder / "optimized" / "bundle.json", options.out.parent / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob("*.log"), *folder.glob("optimized/*.json*")):
            shutil.copy(path, logs)
        row: dict[str, Any] = {"optimize": found, "bundle": bundle.exists(), "applied": []}
        apply = [sys.executable, "-m", "nostall", "apply", "--bundle", str(bundle), "--", *command]
        left = options.ends - time.perf_counter()
        if row["bundle"] and left > 30:
            row["applied"] = calls(apply, variables, left)
        return row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder; default: a new one of random weights")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["shared"])
    parser.add_argument("--minutes", type=float, default=4.0, help="of nostall optimize, for each")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of all workloads")


def main(options: argparse.Namespace) -> int:
    """Returns 1 if nothing was kept in some workload."""
    options.ends = time.perf_counter() + options.limit
    rows = load(options.out)["programs"] if options.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="nostall-model-") as temporary:
        model = options.model or Path(temporary)
        if not (model / "config.json").exists():
            make_model(model)
        for name in options.workloads:
            rows[name] = row = measure(name, model, options)
            save(options.out, kind="measured", programs=rows)
            found = row["optimize"]
            print(f"{name}: {found.get('kept') or found.get('failure') or 'nothing kept'}; "
                  f"{found['seconds']:.0f} s", flush=True)  # fmt: skip
            for attempt in found.get("attempts", []):
                print(f"  {attempt['change']['name']}: {attempt['outcome']}, {attempt['reason']}")
            print(f"  with the bundle: {row['applied']}", flush=True)
    return int(not all(row["bundle"] for row in rows.values()))
