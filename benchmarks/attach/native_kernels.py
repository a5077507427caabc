"""Tune the Triton kernels of a whole program, and measure the program with and without.

    python -m benchmarks run attach.native_kernels --out FILE

The program is ``triton_app/app.py``: a decoder with three hand-written kernels, one of them with a
list of configurations.  Two ways, each with a store of its own: ``nostall tune app.py``, then
``nostall apply``; and ``nostall optimize``, then ``nostall apply --bundle``.  Then the program as
written, twice, and both results take turns (:mod:`benchmarks.optimizing.taking_turns`), and what
they print is compared.  What the commands print goes to ``logs`` beside OUT.

In the committed file the autotuner of each process that took turns chose its configuration itself,
while all of them started side by side; which one is not recorded.  With this version an arm keeps
the choice of its run alone, and ``logs`` says which binaries it loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.optimizing.taking_turns import Turns
from nostall.core.measurement import Comparison

APP = Path(__file__).with_name("triton_app") / "app.py"
AS_WRITTEN, NULL, TUNED, BUNDLE = "as written", "as written again", "tune and apply", "bundle"
STEP = "layers:step"
CHECKED_STEPS = 50
NOSTALL = (sys.executable, "-m", "nostall")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--app", type=Path, default=APP, help="the program")
    parser.add_argument("--seconds", type=float, default=60.0, help="of nostall tune app.py")
    parser.add_argument("--minutes", type=float, default=5.0, help="of nostall optimize")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds of everything")
    parser.add_argument("--cold", action="store_true", help="tune with a cold L2 cache")
    parser.add_argument("--parts", nargs="*", default=["optimize", "tune"], help="what to run")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each arm")


def main(options: argparse.Namespace) -> int:
    """Returns 1 if a part failed."""
    begin = time.perf_counter()
    until = begin + options.limit
    body: dict[str, Any] = {"kind": "measured", "program": options.app.name}
    logs = options.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-u", str(options.app)]
    with tempfile.TemporaryDirectory(prefix="nostall-native-") as temporary:
        folder = Path(temporary)

        def note(name: str, value: Any) -> None:
            body[name] = value
            save(options.out, **body, seconds=time.perf_counter() - begin)
            print(f"{time.perf_counter() - begin:.0f} s: {_line(name, value)}", flush=True)

        arms = {AS_WRITTEN: ([], _variables(folder, "none", "written"))}
        if "optimize" in options.parts:
            given = ["--minutes", f"{options.minutes:g}", "--step", STEP]
            words = [*NOSTALL, "optimize", *given, "--out", str(folder / "optimized")]
            words += ["--format", "json", "--", *program]
            variables, log = _variables(folder, "bundle", "optimize"), logs / "optimize.log"
            note("optimize", _document(words, variables, log, until - 100, _of_optimize))
            bundle = folder / "optimized" / "bundle.json"
            if bundle.exists():
                before = [*NOSTALL, "apply", "--bundle", str(bundle), "--"]
                arms[BUNDLE] = before, _variables(folder, "bundle", "bundle")
        if "tune" in options.parts:
            words = [*NOSTALL, "tune", str(options.app), "--seconds", f"{options.seconds:g}"]
            words += ["--out", str(folder / "runs"), *["--cold"] * options.cold]
            words += ["--format", "json", "--", "--steps", "200"]
            variables, log = _variables(folder, "tuned", "tune"), logs / "tune.log"
            note("tune", _document(words, variables, log, until - 45, _of_tune))
            for path in sorted(folder.glob("runs/*/r*.json")):  # run.json and recipe.json
                shutil.copy(path, logs / f"{path.parent.name}-{path.name}")
            before = [*NOSTALL, "apply", "--log", str(logs / "loaded.jsonl"), "--"]
            arms[TUNED] = before, _variables(folder, "tuned", "tuned")
        note("printed", _printed(arms, program, logs, until - 25))
        arms[NULL] = arms[AS_WRITTEN]
        with Turns(os.environ, logs, until) as turns:
            for name, (before, variables) in arms.items():
                turns.add(name, [*before, *program], **variables)
            samples = turns.samples(options.rounds)
        note("step_seconds", samples)
        note("ratios", _ratios(samples))
        note("failures", turns.failures)
    failed = turns.failures or any("failure" in body[name] for name in options.parts)
    return int(bool(failed))


def _variables(folder: Path, store: str, cache: str) -> dict[str, str]:
    """A store and a cache.  Processes of an arm share its cache, and so what its autotuner chose
    in the run that is alone: those that take turns start at the same time."""
    return {"NOSTALL_HOME": str(folder / store), "TRITON_CACHE_DIR": str(folder / f"cache-{cache}"),
            "TRITON_CACHE_AUTOTUNING": "1"}  # fmt: skip


def _document(
    words: Sequence[str], variables: Mapping[str, str], log: Path, until: float, choose: Any
) -> dict[str, Any]:
    """What a command prints as JSON, with its duration; or why there is nothing."""
    begin = time.perf_counter()
    with log.open("wb") as errors:
        process = subprocess.Popen(
            words, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            text, _ = process.communicate(timeout=max(10.0, until - begin))
        except subprocess.TimeoutExpired:
            process.terminate()
            text, _ = process.communicate()
    seconds = time.perf_counter() - begin
    log.with_suffix(".json").write_bytes(text)
    try:
        start = text.index(b"{\n")  # the program prints before, in `nostall tune`
        return {"seconds": seconds, **choose(json.loads(text[start:]))}
    except (ValueError, KeyError) as error:
        tail = log.read_text(errors="replace").strip().splitlines()[-3:]
        failure = " | ".join(line[-200:] for line in tail)
        return {"seconds": seconds, "failure": f"{process.returncode}: {error}: {failure}"}


def _of_optimize(document: Mapping[str, Any]) -> dict[str, Any]:
    names = ("device", "driver", "torch", "attempts", "kept", "together", "notes")
    watched = {name: document["watched"][name] for name in ("mean_seconds", "kernels")}
    return {**{name: document[name] for name in names}, "watched": watched}


def _of_tune(document: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: document[name] for name in ("kind", "ratio", "kernels", "refused")}
    for kernel in found["kernels"]:
        del kernel["target"]  # a path of this machine
    return found


def _printed(
    arms: Mapping[str, tuple[list[str], Mapping[str, str]]], program: Sequence[str], logs: Path,
    until: float,
) -> dict[str, str]:  # fmt: skip
    """The checksum that each arm prints."""
    found = {}
    for name, (before, variables) in arms.items():
        with (logs / f"{name.replace(' ', '-')}-checksum.log").open("wb") as errors:
            try:
                done = subprocess.run(
                    [*before, *program, "--steps", str(CHECKED_STEPS)], check=False, stderr=errors,
                    env={**os.environ, **variables}, stdout=subprocess.PIPE,
                    timeout=max(5.0, until - time.perf_counter()),
                )  # fmt: skip
                found[name] = done.stdout.decode().strip()[-200:]
            except subprocess.TimeoutExpired:
                found[name] = "no time"
    return found


def _ratios(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Steps as written over those of an arm: above 1, the arm is faster."""
    found = {}
    for arm in (TUNED, BUNDLE):
        if len(samples.get(arm, ())) > 1:
            c = Comparison.from_samples(
                samples[AS_WRITTEN], samples[arm], samples[NULL], kind="measured"
            )
            found[arm] = {"ratio": c.ratio, "interval": [c.low, c.high],
                          "null_interval": [c.null_low, c.null_high]}  # fmt: skip
    return found


def _line(name: str, value: Any) -> str:
    """A part in short."""
    if name == "optimize" and "attempts" in value:
        lines = [f"step {value['watched']['mean_seconds']:.6f} s"]
        for attempt in value["attempts"]:
            lines.append(f"{attempt['outcome']} {attempt['reason'][:300]}")
            lines += map(str, attempt.get("kernels", ()))
        return "\n   ".join([f"optimize {value['seconds']:.0f} s", *lines])
    if name == "tune" and "kernels" in value:
        lines = [f"refused {value['refused']}"] if value["refused"] else []
        for kernel in value["kernels"]:
            keys = ("kernel", "launches", "us", "share", "budget_s", "ratio", "configuration")
            lines.append(str([kernel[key] for key in keys]))
            lines += [f"  {s['configuration']}: {s['us']} us, {s['ratio']:.4f}"
                      for s in kernel["searches"]]  # fmt: skip
            lines += kernel["notes"]
        return "\n   ".join([f"tune {value['seconds']:.0f} s, all {value['ratio']:.4f}", *lines])
    return f"{name} {str(value)[:700]}"
