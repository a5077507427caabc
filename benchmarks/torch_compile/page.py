"""Write docs/compile_measured.md from the whole models that were measured.

    python -m benchmarks page torch-compile

``benchmarks/torch_compile/results/models/`` holds one JSON for each model and part, as
``benchmarks.torch_compile.models`` leaves them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import wrapped
from benchmarks.harness.result_file import ROOT, results
from benchmarks.torch_compile.model_process import AGAIN, PAIRED, SIDE_BY_SIDE, STARTED
from benchmarks.torch_compile.model_zoo import models
from nostall.core.files import write_atomically

FOLDER = results("torch_compile") / "models"
BLOCKING, AHEAD = (results("torch_compile") / f"models_{name}" for name in ("blocking", "ahead"))
"""Starts: when the program compiled the stitched version itself, and when another process did, but
the program wrote kernels and had them compiled."""
PAGE = ROOT.parent / "docs" / "compile_measured.md"
IN_ONE, IN_ROUNDS = "autotuned", "graphs"
"""Parts in other modes: in one process, and in several."""
NONE = "not measured"

Model = Mapping[str, Mapping[str, Any]]
"""Results of one model by part."""


def page(found: Mapping[str, Model]) -> str:
    """The whole page."""
    every = [result for model in found.values() for result in model.values()]
    gpus = "; ".join(sorted({f"{r['gpu']}, PyTorch {r['torch']}, {r['dtype']}" for r in every}))
    said = (
        "Written by `python -m benchmarks page torch-compile` from "
        "[these files](../benchmarks/torch_compile/results/models), which hold every sample "
        f"(`python -m benchmarks run torch_compile.models --out OUT`; {gpus}; "
        f"{max(r['date'] for r in every)[:10]}). Models have random weights "
        "(`benchmarks/torch_compile/model_zoo.py`). A ratio is torch.compile's time for a whole step "
        "/ nostall's, in turns, with its 95 % interval; *faster* and *slower* are said beyond the "
        "null (torch.compile beside itself) only. [What happens to a graph](compile.md)."
    )
    steady = {name: model["steady"] for name, model in found.items() if "steady" in model}
    starts = {n: m for n, m in found.items() if {"inductor", "nostall"} <= m.keys()}
    modes = {n: m[IN_ONE] for n, m in found.items() if IN_ONE in m}
    rounds = {n: m[IN_ROUNDS] for n, m in found.items() if IN_ROUNDS in m}
    parts = ["# Whole models, measured\n", wrapped(said) + "\n", _summary(steady)]
    parts += [
        "## Steps\n",
        _STEPS,
        _when(steady.values()),
        _table(_STEP_COLUMNS, [_step(n, r) for n, r in steady.items()]),
    ]
    parts += ["## Generated kernels\n", _GENERATED]
    parts += [_table(_GENERATED_COLUMNS, [_generated(n, r) for n, r in steady.items()])]
    begun = [m[part] for m in starts.values() for part in ("inductor", "nostall")]
    parts += [
        "## Starts\n",
        _STARTS,
        _when(begun),
        _table(_START_COLUMNS, [_start(*m) for m in starts.items()]),
    ]
    waits = {name: rows for name in found if (rows := _waits(name)) is not None}
    if waits:
        before = [load(folder)[n]["nostall"] for folder in (BLOCKING, AHEAD) for n in waits]
        parts += [_WAITING, _when(before, "First and then were measured")]
        parts += [_table(_WAITING_COLUMNS, [[n, *rows] for n, rows in waits.items()])]
    pairs = {name: every for name, m in found.items() if any(every := _every_pair(m))}
    if pairs:
        taken = [found[name][part] for name in pairs for part in _IN_PAIRS if part in found[name]]
        rows = [
            [name, *_where(found[name]), *chain(*map(_spread, every)), *_inside(found[name])]
            for name, every in pairs.items()
        ]
        parts += [_PAIRS, _when(taken), _table(_PAIR_COLUMNS, rows)]
    if modes:
        parts += ["## max-autotune-no-cudagraphs\n", _MODES, _when(modes.values())]
        parts += [_table(_MODE_COLUMNS, [_mode(*m) for m in modes.items()])]
    if rounds:
        parts += ["## reduce-overhead\n", _ROUNDS, _when(rounds.values())]
        parts += [_table(_ROUND_COLUMNS, [_rounds(*m) for m in rounds.items()])]
    return "\n".join(parts)


_STEP_COLUMNS = (
    *("model", "step ms", "nostall", "all kernels", "nostall, GPU", "all kernels, GPU"),
    *("eager", "kernels", "what it runs"),
)
_GENERATED = (
    wrapped(
        "What Inductor and nostall write, memory-bound all of it: launches of one step and what "
        "they take, by the profiler. The rest (matrix products, attention, convolutions, copies) "
        "is the same libraries' in each. A stitched kernel is launched before the one in front of "
        "it has ended and counts from then, with the time that it waits."
    )
    + "\n"
)
_GENERATED_COLUMNS = ("model", "torch.compile", "nostall", "of those stitched", "all kernels")
_START_COLUMNS = (
    *("model", "first step s, cold", "warm", "chosen after s", "/ Inductor's first step"),
    *("processor s", "held up s", "longest steps s"),
)
_STEPS = (
    wrapped(
        "*nostall* is what the backend chose, *all kernels* its version with every kernel "
        "put in, whatever that costs. Steps of a loop; *GPU*: whole steps as replayed CUDA graphs, "
        "whatever the host does. *kernels*: launches of one step, torch.compile → nostall → all "
        "kernels."
    )
    + "\n"
)
_STARTS = (
    wrapped(
        "nostall's seconds (Inductor's in brackets). *cold*: with empty caches. *chosen*: from the "
        "beginning until the version that stays runs. Processor seconds are those of all processes "
        "until then. *Held up*: what steps took between the first one and the choice beyond the "
        "usual step, all together, with the longest steps. One process of each, with Python's "
        "bytecode at hand, as where packages were installed."
    )
    + "\n"
)
_MODES = (
    wrapped(
        "Each method has a model of its own; *again*: the mode of torch.compile beside itself with "
        "another copy of the model, whose weights lie elsewhere."
    )
    + "\n"
)
_MODE_COLUMNS = ("model", "nostall", "again")
_ROUNDS = (
    wrapped(
        "The same in several processes, which make and time the copies in different orders: the "
        "ratio to the time of one copy by torch.compile, in the geometric mean and from the least "
        "to the most. *Untouched*: a copy that goes through the backend with `nostall.choose` "
        '"inductor", and nothing of ours behind it. *Again*: another copy by torch.compile. The '
        "copy to which all are compared runs twice in every turn (its null), and is faster than "
        "equal ones in whichever order; the last ratio is to the time of the other copy, which "
        "runs once, as nostall's does."
    )
    + "\n"
)
_ROUND_COLUMNS = (
    *("model", "step ms", "nostall", "untouched", "again", "nostall beside again"),
    *("processes", "what it runs"),
)
_PAIRS = (
    wrapped(
        "First steps once more, in processes that took turns, with empty caches (*cold*) and with "
        "what a run of each has left (*warm*): the ratio of every pair's two, nostall's over "
        "Inductor's. Warm ones were also taken by the version with every stitched kernel put in "
        "(*all kernels*), as nostall may have chosen Inductor's, and nothing else ran beside them "
        "but those of another model. *Thread*: the same ratios of the processor time of the "
        "program's main thread alone. *Collector*: seconds (medians) in which Python's garbage "
        "collector went through all objects there are. Who goes first changes; processes before "
        "them have read every file from the disk. In the table above one came after the other. "
        "Cold ones of before 2026-11-25 had Python compile PyTorch each time, which made all "
        "starts longer, and what the benchmark itself needs of nostall was imported before their "
        "clock began."
    )
    + "\n"
)
_WAITING = (
    wrapped(
        "What a program does on its own thread until it has chosen, in seconds: races of plans, "
        "comparisons of kernels with what Inductor makes of the same operators, the stitched "
        "version, comparisons of whole graphs. [First](../benchmarks/results/"
        "fusion_backend_blocking) it compiled all of it; [then](../benchmarks/results/"
        "fusion_backend_ahead) another process had Inductor compile, while threads of the program "
        "wrote kernels; at last, in the runs of the table above, a third one writes those (and "
        "where there are many regions a fourth one helps the first). *Held up*, as above: then → "
        "at last."
    )
    + "\n"
)
_WAITING_COLUMNS = (
    *("model", "races", "kernels", "stitched version", "whole graphs", "in all", "held up"),
)
_IN_PAIRS = (PAIRED, AGAIN)
_PAIR_COLUMNS = (
    *("model", "cold on", "warm on"),
    *("cold, nostall / Inductor", "least to most", "pairs"),
    *("warm, nostall / Inductor", "least to most", "pairs"),
    *("warm, all kernels / Inductor", "least to most", "pairs"),
    "warm, thread: nostall, all kernels",
    "warm, collector: Inductor, nostall, all kernels",
)


def _when(results: Iterable[Mapping[str, Any]], what: str = "Measured") -> str:
    """Parts of a page may be of different states of the code, and of different GPUs."""
    taken = list(results)
    if not taken:
        return ""
    dates = sorted(result["date"][:16] for result in taken)
    gpus = " and ".join(sorted({_short(result) for result in taken}))
    return wrapped(f"{what} from {dates[0]} to {dates[-1]} UTC on {gpus}.") + "\n"


def _short(result: Mapping[str, Any]) -> str:
    """A GPU's name without its maker and its memory."""
    return str(result["gpu"]).removeprefix("NVIDIA ").split()[0]


def _summary(steady: Mapping[str, Mapping[str, Any]]) -> str:
    told = []
    for title, kind in (("in a loop", "looped"), ("on the GPU alone", "replayed")):
        for name in ("nostall", "always"):
            ratios = [_compared(r, kind, name) for r in steady.values()]
            known = [c["ratio"] for c in ratios if c is not None]
            if known:
                what = "nostall" if name == "nostall" else "all kernels"
                told.append(f"{geometric_mean(known):.3f} {what} {title} ({len(known)} models)")
    return wrapped(f"Geometric means over torch.compile: {'; '.join(told) or NONE}.") + "\n"


def _compared(result: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = result.get(kind, {}).get("compared", {}).get(name)
    return found


def _ratio(result: Mapping[str, Any], kind: str, name: str) -> str:
    found = _compared(result, kind, name)
    if found is None:
        return NONE
    verdict = "" if found["verdict"] == "same" else f" {found['verdict']}"
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]{verdict}"


def _step(name: str, result: Mapping[str, Any]) -> list[str]:
    base = result["looped"]["base"]
    ms = 1e3 * median(result["looped"]["samples_s"][base])
    kernels = result.get("kernels", {})
    counts = [kernels.get(which, {}).get("launches", "?") for which in SIDE_BY_SIDE["steady"][:3]]
    runs = "; ".join(f"{g['state']}: {g['reason']}" for g in result["graphs"]["nostall"])
    ratios = [_ratio(result, kind, n) for kind in ("looped", "replayed") for n in _OURS]
    eager = _ratio(result, "looped", "eager")
    return [name, f"{ms:.2f}", *ratios, eager, " → ".join(map(str, counts)), runs]


_OURS = ("nostall", "always")
_STITCHED = "stitched_"


def _generated(name: str, result: Mapping[str, Any]) -> list[str]:
    plain, ours, every = SIDE_BY_SIDE["steady"][:3]
    both = ("triton_", _STITCHED)
    cells = [_of(result, plain, both), _of(result, ours, both), _of(result, ours, (_STITCHED,))]
    return [name, *cells, _of(result, every, both)]


def _of(result: Mapping[str, Any], which: str, begins: tuple[str, ...]) -> str:
    """Launches and microseconds of the kernels whose names begin so."""
    rows = result.get("kernels", {}).get(which, {}).get("by_name")
    if rows is None:
        return NONE
    taken = [(count, spent) for kernel, count, spent in rows if kernel.startswith(begins)]
    return f"{sum(n for n, _ in taken)}: {1e6 * sum(spent for _, spent in taken):.0f} us"


def _start(name: str, model: Model) -> list[str]:
    ours, theirs = model["nostall"]["starts"], model["inductor"]["starts"]
    cells = [name]
    for state in ("cold", "warm"):
        if state not in ours or state not in theirs:
            cells.append(NONE)
            continue
        mine, its = ours[state]["first_s"], theirs[state]["first_s"]
        cells.append(f"{mine:.1f} ({its:.1f}): {mine / its:.2f}x")
    first = theirs["cold"]
    chosen = ours["cold"]["until_chosen_s"]
    state = "" if ours["cold"]["chosen"] else " (not yet)"
    cells += [f"{chosen:.1f}{state}", f"{chosen / first['first_s']:.2f}x"]
    cells.append(f"{ours['cold']['until_chosen_cpu_s']:.0f} ({first['first_cpu_s']:.0f})")
    if "held_up_s" not in ours["cold"]:
        return [*cells, NONE, NONE]
    longest = ", ".join(f"{one:.1f}" for one in ours["cold"]["longest_steps_s"] if one >= 0.05)
    return [*cells, f"{ours['cold']['held_up_s']:.1f}", longest or "under 0.1"]


def _waits(name: str) -> list[str] | None:
    """Seconds first, then, and at last."""
    places = [folder / f"{name}.nostall.json" for folder in (BLOCKING, AHEAD, FOLDER)]
    if not all(place.exists() for place in places):
        return None
    starts = [json.loads(place.read_text())["starts"]["cold"] for place in places]
    stages = ("raced", "duels", "stitched", "compared")
    taken = [
        [sum(g["seconds"].get(x, 0.0) for g in start["graphs"]) for x in stages] for start in starts
    ]
    rows = [*zip(*taken, strict=True), tuple(map(sum, taken))]
    rows += [tuple(start["held_up_s"] for start in starts if "held_up_s" in start)]
    return [" → ".join(f"{one:.1f}" for one in row) for row in rows]


def _every_pair(model: Model) -> list[list[float]]:
    return [*(_paired(model, part) for part in _IN_PAIRS), _paired(model, AGAIN, "always")]


def _where(model: Model) -> list[str]:
    return [_short(model[part]) if part in model else "" for part in _IN_PAIRS]


def _inside(model: Model) -> tuple[str, str]:
    """What the main thread and the collector did in warm first steps, where that was looked at."""
    every = [_paired(model, AGAIN, method, "first_thread_s") for method in _OURS]
    thread = ", ".join(f"{geometric_mean(one):.2f}x" for one in every if one)
    name, runs = "first_collector_s", model[AGAIN]["runs"] if AGAIN in model else []
    taken = [[r[name] for r in runs if r["method"] == one and name in r] for one in STARTED[AGAIN]]
    return thread or NONE, ", ".join(f"{median(one):.2f} s" for one in taken if one) or NONE


def _paired(model: Model, part: str, method: str = "nostall", what: str = "first_s") -> list[float]:
    """Of every pair that is whole, a method's first step over Inductor's."""
    runs = model[part]["runs"] if part in model else []
    runs = [one for one in runs if what in one]
    size = len({one["method"] for one in runs}) or 1
    taken = [
        {one["method"]: one[what] for one in runs[at : at + size]}
        for at in range(0, len(runs) - size + 1, size)
    ]
    return [pair[method] / pair["inductor"] for pair in taken if method in pair]


def _spread(ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return [NONE, "", "0"]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [f"{geometric_mean(ratios):.2f}x", spread, str(len(ratios))]


def _mode(name: str, result: Mapping[str, Any]) -> list[str]:
    return [name, *(_ratio(result, "looped", which) for which in SIDE_BY_SIDE[IN_ONE][1:])]


def _rounds(name: str, result: Mapping[str, Any]) -> list[str]:
    every = result["rounds"]
    base, ours, untouched, again = SIDE_BY_SIDE[IN_ROUNDS]
    samples = [one["looped"]["samples_s"] for one in every]
    cells = [name, f"{1e3 * median(median(one[base]) for one in samples):.2f}"]
    for slow, quick in ((base, ours), (base, untouched), (base, again), (again, ours)):
        taken = [zip(one[slow], one[quick], strict=True) for one in samples]
        ratios = [median(a / b for a, b in pairs) for pairs in taken]
        cells.append(f"{geometric_mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    runs = dict.fromkeys(g["state"] for one in every for g in one["graphs"][ours])
    return [*cells, str(len(every)), ", ".join(runs)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def load(folder: Path = FOLDER) -> dict[str, Model]:
    """What is there, in the benchmark's order."""
    found: dict[str, dict[str, Any]] = {}
    for name in models():
        for place in sorted(folder.glob(f"{name}.*.json")):
            found.setdefault(name, {})[place.name.split(".")[1]] = json.loads(place.read_text())
    return dict(found)


def main() -> int:
    found = load()
    if not found:
        print(
            f"no model in {FOLDER}; run benchmarks.torch_compile.models on a GPU", file=sys.stderr
        )
        return 2
    write_atomically(PAGE, page(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
