"""``docs/results/torch-compile.md``: whole models with ``backend="nostall"``, measured.

python -m benchmarks page torch-compile

``benchmarks/torch_compile/results/models`` holds one JSON for each model and part, as
``benchmarks.torch_compile.models`` leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render_page
from benchmarks.torch_compile.model_setup import AGAIN, INTERLEAVED, PAIRED, START_METHODS
from benchmarks.torch_compile.model_zoo.parts import models
from nostall.core.measurement import Comparison

FOLDER = results("torch_compile") / "models"
PAGE = PAGES / "torch-compile.md"
IN_ONE, IN_ROUNDS = "autotuned", "graphs"
"""Parts in other modes: in one process, and in several."""
NONE = "not measured"
LOSSES = {
    "losses_large": (), "losses_medium": (), "losses_others": (),
    "losses_peers": ("eager", "Liger"),
}  # fmt: skip
"""Files of losses, and the methods that are shown of each; all if empty."""
ATTENTION = tuple(results("torch_compile") / f"attention_forms_{n}.json" for n in range(1, 6))
"""Files of attention forms, oldest first: of a form that several have, the last one is shown."""
LOSS_METHODS = {
    "8 chunks": "8 chunks", "4 chunks": "4 chunks", "nostall": "chosen", "Liger": "Liger",
    "eager": "eager",
}  # fmt: skip
"""Methods of the losses that the page shows, in words."""

Model = Mapping[str, Mapping[str, Any]]
"""Results of one model by part."""


def text() -> str:
    """The whole page from the committed files."""
    return models_page(load_models())


def models_page(loaded: Mapping[str, Model]) -> str:
    """The whole page."""
    records = [result for model in loaded.values() for result in model.values()]
    values = {
        "gpus": "; ".join(
            sorted({f"{r['gpu']}, PyTorch {r['torch']}, {r['dtype']}" for r in records})
        ),
        "dates": [r["date"] for r in records],
        **_steps(_by_part(loaded, "steady")),
        **_starts({n: m for n, m in loaded.items() if {"inductor", "nostall"} <= m.keys()}),
        **_pairs({n: m for n, m in loaded.items() if any(_all_pair_ratios(m))}),
        **_rows("autotuned", _by_part(loaded, IN_ONE), _mode),
        **_rows("rounds", _by_part(loaded, IN_ROUNDS), _rounds),
        "others": _others(),
        **_losses(),
        **_attention(),
        **_varying(),
        **_vocabulary(),
    }
    return render_page(__file__, PAGE, values)


def _losses() -> dict[str, Any]:
    """Losses without logits: each method of each case beside torch.compile."""
    rows = []
    paths = {name: results("torch_compile") / f"{name}.json" for name in LOSSES}
    contents = {name: load(path) for name, path in paths.items()}
    for file, content in contents.items():
        for name, found in content["cases"].items():
            loop = found["loop"]
            base = loop["samples_s"][loop["base"]]
            for method, about in found["methods"].items():
                if method not in (LOSSES[file] or LOSS_METHODS):
                    continue
                samples = loop["samples_s"][method]
                beside = Comparison.from_samples(
                    base, samples, loop["null_s"], kind="measured", resamples=500
                )
                rows.append({
                    "case": name, **found["case"], "method": _loss_method(method, about),
                    "ratio": beside, "graphs": _replayed(found, method),
                    "peak": about["peak_bytes"],
                    "base_peak": found["methods"][loop["base"]]["peak_bytes"],
                    "share": about["share_of_logits"], "error": about["errors"]["weight"],
                    "base_error": found["methods"][loop["base"]]["errors"]["weight"],
                })  # fmt: skip
    return {
        "losses": rows, "loss_about": contents["losses_large"], "loss_files": [*paths.values()],
        "loss_choices": "; ".join(
            _loss_choices([contents[name] for name, methods in LOSSES.items() if not methods])
        ),
    }  # fmt: skip


def _loss_method(method: str, about: Mapping[str, Any]) -> str:
    """What a row is of; a choice that was not made in time is no choice."""
    lines = about.get("explanation", [""])
    is_late = method == "nostall" and ": compiling" in lines[0]
    return "not chosen in time" if is_late else LOSS_METHODS[method]


def _replayed(found: Mapping[str, Any], method: str) -> str:
    """The ratio of a method by CUDA graphs, with its interval."""
    beside = found.get("replayed", {}).get("compared", {}).get(method)
    if beside is None:
        return NONE
    return f"{beside['ratio']:.3f} ({beside['low']:.3f} to {beside['high']:.3f})"


def _loss_choices(contents: Sequence[Any]) -> list[str]:
    """What the backend runs for each loss, as its report says."""
    return [
        f"{name}: {found['methods']['nostall']['explanation'][0].partition(': ')[2]}"
        for content in contents
        for name, found in content["cases"].items()
        if "nostall" in found["methods"]
    ]


def _attention() -> dict[str, Any]:
    """Forms of attention that programs write: ratios of the choice by both clocks, errors."""
    contents = [load(path) for path in ATTENTION]
    forms = {name: found for content in contents for name, found in content["forms"].items()}
    rows = [_form(name, found) for name, found in forms.items()]
    masked = next((f for f in forms.values() if "a mask of ones" in f["methods"]), None)
    return {
        "forms": rows, "attention_about": contents[0], "attention_files": ATTENTION,
        "ones": None if masked is None else _replayed(masked, "a mask of ones"),
    }  # fmt: skip


def _varying() -> dict[str, Any]:
    """Programs whose sizes vary: kernels, compilations, errors and times at several sizes."""
    files = sorted(results("torch_compile").glob("varying_sizes_*.json"))
    contents = [load(path) for path in files]
    rows = [
        _varying_row(f"{name}{', chosen' if content.get('choose') == 'measure' else ''}", found)
        for content in contents
        for name, found in content["programs"].items()
        if "failed" not in found
    ]
    return {"varying": rows, "varying_about": contents[0], "varying_files": files}


def _vocabulary() -> dict[str, Any]:
    """Training steps with large vocabularies: speed and peak memory beside torch.compile."""
    files = sorted((results("torch_compile") / "vocabulary").glob("*.gain.json"))
    found = {path.name.partition(".")[0]: load(path) for path in files}
    found = {name: each for name, each in found.items() if "peak_bytes" in each}
    rows, shares = [], []
    for name, each in found.items():
        peaks = {way: each["state_bytes"] + peak for way, peak in each["peak_bytes"].items()}
        base, ours = peaks["compile"], peaks["nostall"]
        shares.append(ours / base)
        rows.append([
            name, _replayed({"replayed": each["looped"]}, "nostall"), _replayed(each, "nostall"),
            f"{1e-9 * ours:.2f}", f"{1e-9 * base:.2f}", f"{100 * (ours / base - 1):+.0f} %",
            "; ".join(_changes(each["graphs"]["nostall"])) or "nothing",
        ])  # fmt: skip
    return {
        "vocabulary": rows, "vocabulary_median": median(shares) - 1 if shares else None,
        "vocabulary_about": next(iter(found.values()), None), "vocabulary_files": files,
    }  # fmt: skip


def _varying_row(name: str, found: Mapping[str, Any]) -> list[str]:
    errors = (found[each] for each in ("error", "plain_error", "eager_error"))
    ratios = [
        f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})" for row in found["times"]
    ]
    called = sorted(set(found["called"]))
    return [
        name,
        " or ".join(map(str, called)),
        str(len(found["sizes"])),
        str(found["graphs"]),
        " / ".join(f"{each:.1e}" for each in errors),
        *(ratios or [NONE] * 3),
        "; ".join(sorted({why for why, *_ in found["not_fused"]})),
    ]


def _form(name: str, found: Mapping[str, Any]) -> list[str]:
    """The cells of one form."""
    both = [found["methods"].get(each, {}) for each in ("compile", "nostall")]
    graphs = both[1].get("graphs", [])
    peaks = (each.get("peak_bytes") for each in both)
    return [
        name,
        _replayed(found, "nostall"),
        _replayed({"replayed": found.get("looped", {})}, "nostall"),
        " / ".join(f"{max(each['errors']):.1e}" if each.get("errors") else "–" for each in both),
        " / ".join("–" if peak is None else f"{1e-9 * peak:.2f}" for peak in peaks),
        "; ".join(f"{graph['state']}: {graph['reason'].partition(': ')[0]}" for graph in graphs),
        "; ".join(_changes(graphs)) or "nothing",
    ]


def _changes(graphs: Sequence[Any]) -> list[str]:
    """What the backend changes at attention, and what it leaves and why."""
    return [line for graph in graphs for line in (*graph["changed"], *graph["unchanged"])]


def _by_part(loaded: Mapping[str, Model], part: str) -> Model:
    """The results of one part by model."""
    return {name: model[part] for name, model in loaded.items() if part in model}


def _rows(name: str, found: Model, cells: Callable[[str, Any], list[str]]) -> dict[str, Any]:
    """Rows of a table, and when they were measured."""
    rows = [cells(model, result) for model, result in found.items()]
    return {name: rows, f"{name}_when": _when(found.values())}


def _steps(steady: Model) -> dict[str, Any]:
    return {
        "means": _means(steady),
        "steady_when": _when(steady.values()),
        "steps": [_step(name, result) for name, result in steady.items()],
        "generated": [_generated(name, result) for name, result in steady.items()],
    }


def _starts(starts: Mapping[str, Model]) -> dict[str, Any]:
    return {
        "starts": [_start(name, model) for name, model in starts.items()],
        "starts_when": _when(m[part] for m in starts.values() for part in ("inductor", "nostall")),
        "waits": [[name, *_waits(model)] for name, model in starts.items()],
    }


def _pairs(pairs: Mapping[str, Model]) -> dict[str, Any]:
    return {
        "pairs": [
            [name, *_where(m), *chain(*map(_spread, _all_pair_ratios(m))), *_inside(m)]
            for name, m in pairs.items()
        ],
        "pairs_when": _when(m[part] for m in pairs.values() for part in _IN_PAIRS if part in m),
    }


def _others() -> list[list[str]]:
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
    return rows


def _chosen_ratio(graph: Mapping[str, Any]) -> str:
    compared = graph.get("compared")
    if not compared:
        return NONE
    interval = f"[{compared['low']:.3f}, {compared['high']:.3f}]"
    null = f"[{compared['null_low']:.3f}, {compared['null_high']:.3f}]"
    return f"{compared['ratio']:.3f} {interval}, null {null}"


_IN_PAIRS = (PAIRED, AGAIN)


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


def _means(steady: Model) -> str:
    means = []
    for title, kind in (("in a loop", "looped"), ("on the GPU alone", "replayed")):
        for name, version in (("nostall", "nostall"), ("always", "all kernels")):
            ratios = [_compared(r, kind, name) for r in steady.values()]
            known = [c["ratio"] for c in ratios if c is not None]
            if known:
                means.append(f"{geometric_mean(known):.3f} {version} {title} ({len(known)} models)")
    return "; ".join(means) or NONE


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


_STAGES = {
    "plan_tuning": "raced",
    "kernel_comparison": "duels",
    "candidate": "stitched",
    "graph_comparison": "compared",
}
"""Activities of a report on the program's own thread, with their names in results of 0.1."""


def _waits(model: Model) -> list[str]:
    """Seconds on the program's own thread by stage, their sum, and the time held up."""
    start = model["nostall"]["starts"]["cold"]
    seconds = [
        sum(g["seconds"].get(stage, g["seconds"].get(former, 0.0)) for g in start["graphs"])
        for stage, former in _STAGES.items()
    ]
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
