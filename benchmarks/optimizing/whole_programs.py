"""Programs as written, with their best documented settings, and with the bundle of nostall.

    python -m benchmarks run optimizing.programs --out OUT.json [--programs dcgan lstm_lm]
        [--split developed] [--minutes 0.8] [--limit 120] [--rounds 10]

For each program of ``split.json``: `nostall optimize` watches it and writes a bundle.  Once its
steps were watched, it also starts as written (twice: the null), with ``--best default`` and with
``--best graphs``, and is stopped once it has printed some lines.
Then these and `nostall apply --bundle` take turns (:mod:`.taking_turns`).  ``--best`` is what a
person sets with flags in half an hour: torch.compile in its default mode or with CUDA graphs
(``mode="reduce-overhead"``), fused optimisers, channels_last, static caches, loader workers.
The faster of the two is "best settings"; it is chosen by the samples that it is compared with, so
chance favours it.  Other number formats and ``mode="max-autotune"`` are not among them.

A program that is in OUT already is measured again and replaced; the others are kept.  With
``--merge FILE ...`` nothing runs: OUT gets the programs of these files.  Where nothing
is proven there is no bundle, and the program runs as written.  What the processes print, and
the recording for `nostall optimize --replay`, go to ``logs`` beside OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.result_file import head, load, save
from benchmarks.optimizing.sharing import Gate, Run
from benchmarks.optimizing.taking_turns import Turns
from nostall.core.errors import BadInput
from nostall.core.measurement import Comparison

FOLDER = Path(__file__).with_name("programs")
SPLIT = Path(__file__).with_name("split.json")
AS_WRITTEN, NULL, BEST, BUNDLE = "as written", "as written again", "best settings", "bundle"
MODES = ("default", "graphs")
"""Values of ``--best``."""
TURNS_SECONDS, BUNDLE_SECONDS = 40.0, 35.0
"""Time that is kept for the turns of a program, and for the start with its bundle."""
LATEST_SECONDS = 90.0
"""For the start with a bundle where ``--total`` has them left; other programs start beside it."""
START_SECONDS = 50.0
"""Of a program until its steps were watched, and until it has ended; the rest is for attempts."""
WATCH_SECONDS = 40.0
"""Most seconds that the other starts of a program wait for that."""
WATCHED = "nostall: watched"
LEAST_SECONDS = 120.0
"""With less left of ``--total`` no program is started."""
COMPILE_THREADS = "4"
"""Inductor's in each process; its default is one a core, and many processes compile at once."""


def programs(split: str = "all") -> dict[str, str]:
    """Names of the programs of a split, and the kind of each."""
    content = json.loads(SPLIT.read_text())
    parts = ("developed", "held_out") if split == "all" else (split,)
    return {name: kind for part in parts for name, kind in content[part].items()}


def split_of(name: str) -> str:
    """``developed`` or ``held_out``."""
    return "developed" if name in programs("developed") else "held_out"


def optimise(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, minutes: float,
    limit: float, gate: Gate,
) -> dict[str, Any]:  # fmt: skip
    """Run `nostall optimize`; what it wrote as JSON, with its duration."""
    words = [sys.executable, "-m", "nostall", "optimize", "--minutes", f"{minutes:.2f}", "--out",
             str(folder / "optimized"), "--format", "json", "--", *command]  # fmt: skip
    begin, log = time.perf_counter(), folder / "optimize.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            words, env=dict(variables), stdout=subprocess.DEVNULL, stderr=errors
        )
        with gate.run(process.pid, log), suppress(subprocess.TimeoutExpired):
            process.wait(timeout=limit)
        if process.poll() is None:  # it keeps what was proven, and ends the program within 15 s
            Run(process.pid, log).send(signal.SIGCONT)
            process.terminate()
        code = process.wait()
    written = folder / "optimized" / "result.json"
    result: dict[str, Any] = {"seconds": time.perf_counter() - begin, "exit_code": code}
    if written.exists():
        document = json.loads(written.read_text())
        document["watched"]["trace_file"] = None
        for name_of_file in ("command", "command_files", "files_written_while_watched"):
            document.pop(name_of_file)
        document["notes"] = [n for n in document["notes"] if not n.startswith("files changed")]
        return {**result, **document}
    tail = [line for line in log.read_text(errors="replace").splitlines() if "nostall" in line]
    return {**result, "failure": " | ".join(tail[-3:])}


def best_of(samples: Mapping[str, Sequence[float]]) -> str | None:
    """The mode of ``--best`` whose median step is the shortest; None if none was measured."""
    medians = {m: median(s) for m in MODES if len(s := samples.get(f"{BEST}, {m}", ())) > 1}
    return min(medians, key=lambda mode: medians[mode]) if medians else None


def ratios(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Ratios of the arms with intervals; above 1 the later one of the name is faster.

    "best settings" are those of :func:`best_of`.
    """
    null, found = samples.get(NULL), {}
    arms = {**samples, BEST: samples.get(f"{BEST}, {best_of(samples)}", ())}
    pairs = [(AS_WRITTEN, arm) for arm in (*(f"{BEST}, {m}" for m in MODES), BEST, BUNDLE)]
    for over, arm in (*pairs, (BEST, BUNDLE)):
        if len(arms.get(over, ())) > 1 and len(arms.get(arm, ())) > 1:
            own = null if over == AS_WRITTEN else None
            c = Comparison.from_samples(arms[over], arms[arm], own, kind="measured")
            found[f"{over} / {arm}"] = {
                "ratio": c.ratio, "interval": [c.low, c.high],
                "null_interval": None if own is None else [c.null_low, c.null_high],
            }  # fmt: skip
    return found


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """The programs of result files by name; later files replace those of earlier ones."""
    rows: dict[str, Any] = {}
    for content in map(load, files):
        for name, row in content["programs"].items():
            rows[name] = {"date": content["date"], "command": content["command"], **row}
    return {name: rows[name] for name in programs() if name in rows}


def measure(name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """One program, in ``limit`` seconds: optimise it, then compare its arms."""
    begin = time.perf_counter()
    script = FOLDER / f"{name}.py"
    command = [sys.executable, "-u", str(script), *(["--tiny"] * options.tiny)]
    with tempfile.TemporaryDirectory(prefix="nostall-programs-") as temporary:
        folder = Path(temporary)
        variables = {
            **os.environ, "NOSTALL_HOME": str(folder / "store"),
            "TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS,
            **_caches(options.cache / name / "tool"),
        }  # fmt: skip
        gate: Gate = options.gate
        with Turns(variables, folder, begin + limit, TURNS_SECONDS) as turns:
            gate.starting.append(turns)

            def start() -> None:
                _wait_watched(folder / "optimize.log")
                turns.add(AS_WRITTEN, command)
                turns.add(NULL, command)
                for mode in MODES:
                    # Its own caches: Inductor may read a file that another process is writing.
                    caches = _caches(options.cache / name / mode)
                    turns.add(f"{BEST}, {mode}", [*command, "--best", mode], **caches)

            starting = threading.Thread(target=start)
            starting.start()
            left = max(30.0, limit - TURNS_SECONDS - BUNDLE_SECONDS)
            minutes = max(0.1, min(options.minutes, (left - START_SECONDS) / 60))
            found = optimise(command, variables, folder, minutes, left, gate)
            starting.join()
            bundle = folder / "optimized" / "bundle.json"
            if has_bundle := bundle.exists():
                apply = [sys.executable, "-m", "nostall", "apply", "--bundle", str(bundle), "--"]
                latest = min(time.perf_counter() + LATEST_SECONDS, options.ends - TURNS_SECONDS)
                turns.start_until = max(turns.start_until, latest)
                turns.add(BUNDLE, [*apply, *command])
            turns.wait_started()
            with gate.alone(turns):
                turns.until = time.perf_counter() + 1.5 * TURNS_SECONDS
                samples = turns.samples(options.rounds)
            gate.starting.remove(turns)
        logs = options.out.parent / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob("*.log"), *folder.glob("optimized/recording.json.gz")):
            shutil.copy(path, logs)
    return {
        **{key: value for key, value in head().items() if key in ("date", "command")},
        "transformers": version("transformers"), "kind": programs()[name],
        "split": split_of(name), "optimize": found,
        "bundle": has_bundle, "step_seconds": samples, "best": best_of(samples),
        "ratios": ratios(samples), "failures": turns.failures, "seconds_until_warm": turns.starts,
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def _wait_watched(log: Path) -> None:
    """Wait until the steps of a program were watched: other starts would make them longer."""
    until = time.perf_counter() + WATCH_SECONDS
    while time.perf_counter() < until:
        if log.exists() and WATCHED in log.read_text(errors="replace"):
            return
        time.sleep(0.2)


def _caches(folder: Path) -> dict[str, str]:
    """Environment variables of the caches of compilers below a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton")}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--programs", nargs="*", help="names of split.json; default: all")
    parser.add_argument("--split", choices=("all", "developed", "held_out"), default="all")
    parser.add_argument("--minutes", type=float, default=0.8, help="of nostall optimize, for each")
    parser.add_argument("--limit", type=float, default=120.0, help="most seconds of each program")
    parser.add_argument("--total", type=float, help="seconds of all programs together")
    parser.add_argument(
        "--at-once", type=int, default=1, help="programs that start and compile at once"
    )
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each arm")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for tests")
    parser.add_argument("--merge", nargs="+", type=Path, help="only merge the programs of files")


def main(options: argparse.Namespace) -> int:
    """Returns 1 if a program could not be measured."""
    known = programs(options.split)
    names = options.programs or list(known)
    if unknown := sorted(set(names) - set(known)):
        raise BadInput(f"--programs {unknown[0]!r} is unknown; known are {', '.join(known)}")
    rows = merged([options.out] if options.out.exists() else [])
    if options.merge:
        rows = merged(options.merge)
        save(options.out, kind="measured", tiny=options.tiny, programs=rows)
        return 0
    failed, begin = False, time.perf_counter()
    options.ends = begin + (options.total or 1e9)
    waiting, lock = list(names), threading.Lock()

    def work() -> None:
        nonlocal failed
        while waiting:
            name = waiting.pop(0)
            left = options.ends - time.perf_counter()
            if not (FOLDER / f"{name}.py").exists() or left < min(options.limit, LEAST_SECONDS):
                print(f"{name}: not run", flush=True)
                continue
            try:
                row = measure(name, options, min(options.limit, left))
            except Exception as error:  # any: the other programs are still to be measured
                print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
                failed = True
                continue
            with lock:
                rows[name] = row
                save(options.out, kind="measured", tiny=options.tiny, programs=rows)
                print(_line(name, row), flush=True)
                failed = failed or bool(row["failures"])

    with tempfile.TemporaryDirectory(prefix="nostall-caches-") as cache:
        options.cache, options.gate = Path(cache), Gate()
        threads = [threading.Thread(target=work) for _ in range(options.at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        options.gate.close()
    return int(failed)


def _line(name: str, row: Mapping[str, Any]) -> str:
    parts = [f"{over} {found['ratio']:.3f} [{found['interval'][0]:.3f}, {found['interval'][1]:.3f}]"
             for over, found in row["ratios"].items() if f"{BEST}, " not in over]  # fmt: skip
    kept = ", ".join(row["optimize"].get("kept", [])) or "nothing kept"
    failures = "".join(f"; FAILED {arm}: {why}" for arm, why in row["failures"].items())
    times = f"{row['seconds']:.0f} s (optimize {row['optimize']['seconds']:.0f} s)"
    return f"{name}: {times}; {kept}; best: {row['best']}; {'; '.join(parts)}{failures}"
