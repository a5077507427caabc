"""``docs/results/torch-compile.md``: whole models with ``backend="nostall"``, measured.

python -m benchmarks page torch-compile

``benchmarks/torch_compile/results/models`` holds one JSON for each model and part, as
``benchmarks.torch_compile.models`` leaves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.torch_compile.model_setup import AGAIN, INTERLEAVED, PAIRED, START_METHODS
from benchmarks.torch_compile.model_zoo.parts import models
from nostall.core.files.atomic import write_atomically

FOLDER = results("torch_compile") / "models"
PAGE = PAGES / "torch-compile.md"
IN_ONE, IN_ROUNDS = "autotuned", "graphs"
"""Parts in other modes: in one process, and in several."""
NONE = "not measured"

Model = Mapping[str, Mapping[str, Any]]
"""Results of one model by part."""


def text() -> str:
    """The whole page from the committed files."""
    return models_page(load_models())


def write() -> None:
    write_atomically(PAGE, text().encode())


def models_page(loaded: Mapping[str, Model]) -> str:
    """The whole page."""
    parts = [wrapped(_method(loaded)), *_steps(loaded), *_starts(loaded), *_pairs(loaded)]
    parts += [*_modes(loaded), *_repeated()]
    return page("Whole models, measured", "python -m benchmarks page torch-compile", parts)


def _method(loaded: Mapping[str, Model]) -> str:
    records = [result for model in loaded.values() for result in model.values()]
    gpus = "; ".join(sorted({f"{r['gpu']}, PyTorch {r['torch']}, {r['dtype']}" for r in records}))
    return (
        f"Measured with `python -m benchmarks run torch_compile.models` on {gpus}; "
        f"{max(r['date'] for r in records)[:10]}. `benchmarks/torch_compile/results/models` has "
        "one JSON for each model and part with every sample. Models have random weights "
        "(`benchmarks/torch_compile/model_zoo/parts.py`). A ratio is torch.compile's time of a "
        "whole step divided by nostall's, interleaved, with its 95 % interval. *faster* and "
        "*slower* are stated only beyond the null (torch.compile beside itself). How a version is "
        "chosen: [torch.compile](../explanation/torch-compile.md)."
    )


def _steps(loaded: Mapping[str, Model]) -> list[str]:
    steady = {name: model["steady"] for name, model in loaded.items() if "steady" in model}
    steps = [_step(name, result) for name, result in steady.items()]
    kernels = [_generated(name, result) for name, result in steady.items()]
    return [
        _summary(steady),
        *("## Steps", _STEPS, _when(steady.values()), table(_STEP_COLUMNS, steps)),
        *("## Generated kernels", _GENERATED, table(_GENERATED_COLUMNS, kernels)),
    ]


def _starts(loaded: Mapping[str, Model]) -> list[str]:
    starts = {n: m for n, m in loaded.items() if {"inductor", "nostall"} <= m.keys()}
    records = [m[part] for m in starts.values() for part in ("inductor", "nostall")]
    rows = [_start(name, model) for name, model in starts.items()]
    waits = [[name, *_waits(model)] for name, model in starts.items()]
    return [
        *("## Starts", _STARTS, _when(records), table(_START_COLUMNS, rows)),
        *(_WAITING, table(_WAITING_COLUMNS, waits)),
    ]


def _pairs(loaded: Mapping[str, Model]) -> list[str]:
    pairs = {name: ratios for name, m in loaded.items() if any(ratios := _all_pair_ratios(m))}
    records = [loaded[name][part] for name in pairs for part in _IN_PAIRS if part in loaded[name]]
    rows = [
        [name, *_where(loaded[name]), *chain(*map(_spread, ratios)), *_inside(loaded[name])]
        for name, ratios in pairs.items()
    ]
    if not pairs:
        return []
    return ["### First steps in pairs", _PAIRS, _when(records), table(_PAIR_COLUMNS, rows)]


def _modes(loaded: Mapping[str, Model]) -> list[str]:
    autotuned = {n: m[IN_ONE] for n, m in loaded.items() if IN_ONE in m}
    graphs = {n: m[IN_ROUNDS] for n, m in loaded.items() if IN_ROUNDS in m}
    parts = []
    if autotuned:
        rows = [_mode(name, result) for name, result in autotuned.items()]
        parts += ["## Mode max-autotune-no-cudagraphs", _MODES, _when(autotuned.values())]
        parts.append(table(_MODE_COLUMNS, rows))
    if graphs:
        rows = [_rounds(name, result) for name, result in graphs.items()]
        parts += ["## Mode reduce-overhead", _ROUNDS, _when(graphs.values())]
        parts.append(table(_ROUND_COLUMNS, rows))
    return parts


def _repeated() -> list[str]:
    """Choices of other runs: how far the same model's choice varies."""
    rows = []
    for folder in ("models_repeated", "models_slow_host"):
        for name, model in load_models(results("torch_compile") / folder).items():
            if "nostall" not in model:
                continue
            start = model["nostall"]["starts"]["cold"]
            graphs = "; ".join(f"{g['state']}: {g['reason']}" for g in start["graphs"])
            ratios = [_chosen_ratio(graph) for graph in start["graphs"]]
            rows.append([name, folder, _short(model["nostall"]), graphs, "; ".join(ratios)])
    head = ("model", "run", "GPU", "what it runs", "whole graph, ratio and null")
    return ["## Other runs", _OTHERS, table(head, rows)]


def _chosen_ratio(graph: Mapping[str, Any]) -> str:
    compared = graph.get("compared")
    if not compared:
        return NONE
    interval = f"[{compared['low']:.3f}, {compared['high']:.3f}]"
    null = f"[{compared['null_low']:.3f}, {compared['null_high']:.3f}]"
    return f"{compared['ratio']:.3f} {interval}, null {null}"


_STEP_COLUMNS = (
    *("model", "step ms", "nostall", "all kernels", "nostall, GPU", "all kernels, GPU"),
    *("eager", "kernels", "what it runs"),
)
_GENERATED = wrapped(
    "Memory-bound kernels that Inductor and nostall write: launches of one step and their time, "
    "from the profiler. All other kernels (matrix products, attention, convolutions, copies) come "
    "from the same libraries in each version. A fused kernel is launched before the kernel in "
    "front of it ends; its time includes that wait."
)
_GENERATED_COLUMNS = ("model", "torch.compile", "nostall", "of those stitched", "all kernels")
_START_COLUMNS = (
    *("model", "first step s, cold", "warm", "chosen after s", "/ Inductor's first step"),
    *("processor s", "held up s", "longest steps s"),
)
_STEPS = wrapped(
    "*nostall*: the version that the backend chose. *All kernels*: its version with every fused "
    "kernel, whatever their times. Steps of a loop; *GPU*: whole steps replayed as CUDA graphs, "
    "without the host. *Kernels*: launches of one step by torch.compile → nostall → all kernels."
)
_STARTS = wrapped(
    "Seconds by nostall (by Inductor). *Cold*: with empty caches. *Chosen*: from the start until "
    "the version that stays runs. Processor seconds are those of all processes until then. *Held "
    "up*: the time by which steps between the first one and the choice exceed the usual step, "
    "summed, and the longest steps. One process each, with Python's bytecode cached, as in an "
    "installed package."
)
_MODES = wrapped(
    "Each method has its own copy of the model. *Second copy*: torch.compile's mode beside itself "
    "with another copy of the model."
)
_MODE_COLUMNS = ("model", "nostall", "second copy")
_ROUNDS = wrapped(
    "Several processes make and time the copies of a model in different orders. Ratios are to the "
    "time of one copy by torch.compile: geometric mean, least and most. *Untouched*: a copy that "
    'goes through the backend with `nostall.choose` "inductor". *Second copy*: another copy by '
    "torch.compile. The copy to which all are compared runs twice in every round (its null) and is "
    "faster than equal copies in any order. The last ratio is therefore to the second copy, which "
    "runs once, as nostall's does."
)
_ROUND_COLUMNS = (
    *("model", "step ms", "nostall", "untouched", "second copy"),
    "nostall beside the second copy",
    *("processes", "what it runs"),
)
_PAIRS = wrapped(
    "First steps in processes that alternate, with empty caches (*cold*) and with the caches of an "
    "earlier run (*warm*): nostall's time divided by Inductor's, for each pair. Warm starts were "
    "also measured with every fused kernel (*all kernels*), because nostall may have chosen "
    "Inductor's version. *Thread*: the same ratios of the processor time of the main thread. "
    "*Collector*: seconds (medians) in which Python's garbage collector visited all objects. The "
    "order in a pair alternates; an earlier process has read every file from disk."
)
_WAITING = wrapped(
    "Seconds that the user's process spends on its own thread until the choice: tuning of kernel "
    "plans, comparison of kernels with Inductor's, the candidate version, comparison of whole "
    "graphs. Worker processes compile at the same time."
)
_OTHERS = wrapped(
    "Cold starts of other runs: `models_repeated` a second time on the same kind of machine, "
    "`models_slow_host` on a slow, noisy host. A choice can differ from run to run if the gain of "
    "the whole graph is close to the noise of Inductor's version beside itself."
)
_WAITING_COLUMNS = (
    *("model", "plans", "kernels", "candidate", "whole graphs", "total", "held up"),
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


def _when(results: Iterable[Mapping[str, Any]]) -> str:
    """Dates and GPUs of some results; parts of a page may be of different days and cards."""
    measured = list(results)
    if not measured:
        return ""
    dates = sorted(result["date"][:16] for result in measured)
    gpus = " and ".join(sorted({_short(result) for result in measured}))
    return f"Measured from {dates[0]} to {dates[-1]} UTC on {gpus}."


def _short(result: Mapping[str, Any]) -> str:
    """Name of the GPU without maker and memory."""
    return str(result["gpu"]).removeprefix("NVIDIA ").split()[0]


def _summary(steady: Mapping[str, Mapping[str, Any]]) -> str:
    means = []
    for title, kind in (("in a loop", "looped"), ("on the GPU alone", "replayed")):
        for name in ("nostall", "always"):
            ratios = [_compared(r, kind, name) for r in steady.values()]
            known = [c["ratio"] for c in ratios if c is not None]
            if known:
                version = "nostall" if name == "nostall" else "all kernels"
                means.append(f"{geometric_mean(known):.3f} {version} {title} ({len(known)} models)")
    return wrapped(f"Geometric means over torch.compile: {'; '.join(means) or NONE}.")


def _compared(result: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any] | None:
    comparison: Mapping[str, Any] | None = result.get(kind, {}).get("compared", {}).get(name)
    return comparison


def _ratio(result: Mapping[str, Any], kind: str, name: str) -> str:
    comparison = _compared(result, kind, name)
    if comparison is None:
        return NONE
    verdict = "" if comparison["verdict"] == "same" else f" {comparison['verdict']}"
    interval = f"[{comparison['low']:.3f}, {comparison['high']:.3f}]"
    return f"{comparison['ratio']:.3f} {interval}{verdict}"


def _step(name: str, result: Mapping[str, Any]) -> list[str]:
    base = result["looped"]["base"]
    ms = 1e3 * median(result["looped"]["samples_s"][base])
    kernels = result.get("kernels", {})
    counts = [kernels.get(method, {}).get("launches", "?") for method in INTERLEAVED["steady"][:3]]
    runs = "; ".join(f"{g['state']}: {g['reason']}" for g in result["graphs"]["nostall"])
    ratios = [_ratio(result, kind, n) for kind in ("looped", "replayed") for n in _NOSTALL_METHODS]
    eager = _ratio(result, "looped", "eager")
    return [name, f"{ms:.2f}", *ratios, eager, " → ".join(map(str, counts)), runs]


_NOSTALL_METHODS = ("nostall", "always")
_STITCHED = "stitched_"


def _generated(name: str, result: Mapping[str, Any]) -> list[str]:
    inductor, nostall, always_fused = INTERLEAVED["steady"][:3]
    prefixes = ("triton_", _STITCHED)
    cells = [
        _launches(result, inductor, prefixes),
        _launches(result, nostall, prefixes),
        _launches(result, nostall, (_STITCHED,)),
    ]
    return [name, *cells, _launches(result, always_fused, prefixes)]


def _launches(result: Mapping[str, Any], method: str, prefixes: tuple[str, ...]) -> str:
    """Launches and microseconds of the kernels whose names begin with one of ``prefixes``."""
    kernels = result.get("kernels", {}).get(method, {}).get("by_name")
    if kernels is None:
        return NONE
    rows = [(count, seconds) for name, count, seconds in kernels if name.startswith(prefixes)]
    return f"{sum(n for n, _ in rows)}: {1e6 * sum(seconds for _, seconds in rows):.0f} us"


def _start(name: str, model: Model) -> list[str]:
    nostall_starts = model["nostall"]["starts"]
    inductor_starts = model["inductor"]["starts"]
    cells = [name]
    for state in ("cold", "warm"):
        if state not in nostall_starts or state not in inductor_starts:
            cells.append(NONE)
            continue
        nostall_s = nostall_starts[state]["first_s"]
        inductor_s = inductor_starts[state]["first_s"]
        cells.append(f"{nostall_s:.1f} ({inductor_s:.1f}): {nostall_s / inductor_s:.2f}x")
    nostall_cold, inductor_cold = nostall_starts["cold"], inductor_starts["cold"]
    chosen = nostall_cold["until_chosen_s"]
    state = "" if nostall_cold["chosen"] else " (not yet)"
    cells += [f"{chosen:.1f}{state}", f"{chosen / inductor_cold['first_s']:.2f}x"]
    cells.append(f"{nostall_cold['until_chosen_cpu_s']:.0f} ({inductor_cold['first_cpu_s']:.0f})")
    if "held_up_s" not in nostall_cold:
        return [*cells, NONE, NONE]
    longest = ", ".join(
        f"{step_s:.1f}" for step_s in nostall_cold["longest_steps_s"] if step_s >= 0.05
    )
    return [*cells, f"{nostall_cold['held_up_s']:.1f}", longest or "under 0.1"]


def _waits(model: Model) -> list[str]:
    """Seconds on the program's own thread by stage, their sum, and the time held up."""
    start = model["nostall"]["starts"]["cold"]
    stages = ("raced", "duels", "stitched", "compared")
    seconds = [sum(g["seconds"].get(stage, 0.0) for g in start["graphs"]) for stage in stages]
    held_up = f"{start['held_up_s']:.1f}" if "held_up_s" in start else NONE
    return [*(f"{s:.1f}" for s in (*seconds, sum(seconds))), held_up]


def _all_pair_ratios(model: Model) -> list[list[float]]:
    return [*(_paired(model, part) for part in _IN_PAIRS), _paired(model, AGAIN, "always")]


def _where(model: Model) -> list[str]:
    return [_short(model[part]) if part in model else "" for part in _IN_PAIRS]


def _inside(model: Model) -> tuple[str, str]:
    """Processor time of the main thread and time of the collector in warm first steps."""
    ratios = [_paired(model, AGAIN, method, "first_thread_s") for method in _NOSTALL_METHODS]
    thread = ", ".join(f"{geometric_mean(pairs):.2f}x" for pairs in ratios if pairs)
    name, runs = "first_collector_s", model[AGAIN]["runs"] if AGAIN in model else []
    seconds = [
        [run[name] for run in runs if run["method"] == method and name in run]
        for method in START_METHODS[AGAIN]
    ]
    return thread or NONE, ", ".join(f"{median(row):.2f} s" for row in seconds if row) or NONE


def _paired(
    model: Model, part: str, method: str = "nostall", field: str = "first_s"
) -> list[float]:
    """A method's first step divided by Inductor's, for every complete pair."""
    runs = model[part]["runs"] if part in model else []
    runs = [run for run in runs if field in run]
    size = len({run["method"] for run in runs}) or 1
    rows = [
        {run["method"]: run[field] for run in runs[at : at + size]}
        for at in range(0, len(runs) - size + 1, size)
    ]
    return [pair[method] / pair["inductor"] for pair in rows if method in pair]


def _spread(ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return [NONE, "", "0"]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [f"{geometric_mean(ratios):.2f}x", spread, str(len(ratios))]


def _mode(name: str, result: Mapping[str, Any]) -> list[str]:
    return [name, *(_ratio(result, "looped", method) for method in INTERLEAVED[IN_ONE][1:])]


def _rounds(name: str, result: Mapping[str, Any]) -> list[str]:
    runs = result["rounds"]
    base, nostall, untouched, second_copy = INTERLEAVED[IN_ROUNDS]
    samples = [run["looped"]["samples_s"] for run in runs]
    cells = [name, f"{1e3 * median(median(sample[base]) for sample in samples):.2f}"]
    for slow, quick in (
        (base, nostall),
        (base, untouched),
        (base, second_copy),
        (second_copy, nostall),
    ):
        rows = [zip(sample[slow], sample[quick], strict=True) for sample in samples]
        ratios = [median(a / b for a, b in pairs) for pairs in rows]
        cells.append(f"{geometric_mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    states = dict.fromkeys(g["state"] for run in runs for g in run["graphs"][nostall])
    return [*cells, str(len(runs)), ", ".join(states)]


def load_models(folder: Path = FOLDER) -> dict[str, Model]:
    """Results by model and part, in the benchmark's order."""
    loaded: dict[str, dict[str, Any]] = {}
    for name in models():
        for path in sorted(folder.glob(f"{name}.*.json*")):
            loaded.setdefault(name, {})[path.name.split(".")[1]] = load(path)
    return dict(loaded)
