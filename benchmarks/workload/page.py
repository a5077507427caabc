"""``docs/results/workload.md``: the job model and the trace reader against measurements.

python -m benchmarks page workload
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from nostall.core.files.atomic import write_atomically

PAGE = PAGES / "workload.md"
FOLDER = results("workload")
Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    return page(
        "Jobs and traces",
        "python -m benchmarks page workload",
        [_steps(), _operators(), _exchange(), _slowdown(), _population(), _traces(), _reading()],
    )


def write() -> None:
    write_atomically(PAGE, text().encode())


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(ms: float, error: float) -> str:
    return f"{ms:.2f} ({100 * error:+.0f} %)"


def _steps() -> str:
    path = FOLDER / "fit.json"
    record = load(path)
    rows = []
    for model in record["models"]:
        for part, measured in model["measured_ms"].items():
            flat = _signed(model["flat_ms"][part], model["flat_error"][part])
            fitted = _signed(model["fitted_ms"][part], model["fitted_error"][part])
            rows.append([model["model"], part, f"{measured:.2f}", flat, fitted])
    intro = wrapped(
        f"Training steps of models with random weights on {record['about']['device']}, torch "
        f"{record['about']['torch']}: milliseconds that torch.profiler *measured*, and those "
        "*modelled* from the module with the flat efficiency of 70 % and with the fitted "
        "operators of the preset `h200-measured`. The operators are fitted to single calls, not "
        f"to these models (`python -m benchmarks run workload.gpu`, {link(FOLDER / 'gpu.json')}; "
        f"`python -m benchmarks run workload.fit`, {link(path)})."
    )
    head = ("model", "part", "measured ms", "flat 70 %", "fitted")
    return f"## Modelled and measured steps\n\n{intro}\n\n{table(head, rows)}"


def _operators() -> str:
    record = load(FOLDER / "fit.json")
    rows = [
        [kind, str(fit["points"]), f"{1e6 * fit['overhead']:.2f}", f"{fit['compute']:.3f}",
         f"{fit['memory']:.3f}", _percent(fit["mean_error"]), _percent(fit["worst_error"])]
        for kind, fit in record["operators"].items()
    ]  # fmt: skip
    head = ("operator", "calls measured", "overhead us", "factor of FLOP", "factor of bytes",
            "mean error", "worst error")  # fmt: skip
    links = [
        [name, str(fit["points"]), f"{1e6 * fit['overhead']:.2f}", f"{fit['share']:.3f}",
         _percent(fit["mean_error"]), _percent(fit["worst_error"])]
        for name, fit in record["links"].items()
    ]  # fmt: skip
    link_head = ("link", "transfers measured", "overhead us", "share of peak", "mean error",
                 "worst error")  # fmt: skip
    parts = ["### Fitted operators and links", table(head, rows), table(link_head, links)]
    return "\n\n".join(parts)


def _exchange() -> str:
    record = load(FOLDER / "fit.json")
    rows = [
        [run["model"], f"{run['gradients_mb']:.0f}", str(run["buckets"]),
         _signed(run["flat_ms"], run["flat_error"]), _signed(run["fitted_ms"], run["fitted_error"]),
         f"{run['measured_ms']:.2f}"]
        for run in record["exchanged"]
    ]  # fmt: skip
    ranks = record["all_ranks"]
    after = wrapped(
        "NCCL's kernels also wait for the other rank, so a trace of one rank overstates the "
        f"transfer. With the traces of both ranks the all-reduces take {ranks['rank_ms'][0]:.2f} "
        f"and {ranks['rank_ms'][1]:.2f} ms, of which {ranks['waited_ms'][0]:.2f} and "
        f"{ranks['waited_ms'][1]:.2f} ms are waiting; the transfer takes "
        f"{ranks['transfer_ms']:.2f} ms."
    )
    head = ("model", "gradients MB", "buckets", "flat 70 %, ms", "fitted, ms",
            "measured in one rank's trace, ms")  # fmt: skip
    title = "### Gradients over two GPUs"
    return f"{title}\n\n{table(head, rows)}\n\n{after}"


def _slowdown() -> str:
    path = FOLDER / "slowdown.json"
    record = load(path)
    names = {
        "leaving_one_of_three_out": "three models, each left out in turn",
        "unseen": "three further models, fitted on the first three",
        "leaving_one_of_all_out": "all six models, each left out in turn",
    }
    rows = []
    for key, name in names.items():
        summary = record["summary"][key]
        keys = ("flat_mape_mean", "fitted_mape_mean", "fitted_mape_worst", "covered_by_90")
        rows.append([name, *(_percent(summary[key]) for key in keys)])
    intro = wrapped(
        "Step time on several nodes, predicted from one node's *measured* step, against Pollux's "
        "published measurements (`NOSTALL_PUBLIC_DATA=DIR python -m benchmarks run "
        f"workload.slowdown`, {link(path)}). Mean absolute errors; the last column is the share "
        "of steps inside the predicted 90 % interval. The form of the fit was chosen with the "
        "models in view, only its parameters are fitted without the model in question."
    )
    head = ("models", "flat 70 %", "fitted, mean", "fitted, worst model", "inside 90 % interval")
    return f"## Slow-down on several nodes\n\n{intro}\n\n{table(head, rows)}"


def _population() -> str:
    path = FOLDER / "synthetic_population.json"
    record = load(path)
    names = {
        "weight_share": ("GPU time in weight and gradient traffic", "{:.1%}"),
        "ps_faster_on_allreduce_local": (
            "PS/Worker jobs that are faster on AllReduce in one server", "{:.1%}"),
        "25_to_100_gigabit": ("PS/Worker speed-up from 25 to 100 Gb/s", "{:.2f}x"),
    }  # fmt: skip
    rows = [
        [name, form.format(record["records"][key]["paper"]),
         form.format(record["records"][key]["modelled"])]
        for key, (name, form) in names.items()
    ]  # fmt: skip
    intro = wrapped(
        f"{record['jobs']:,} *synthetic* jobs beside the abstract of arXiv:1910.05930, whose "
        "population is not public. The generator was written before its first run, from other "
        "marginals, and is not fitted (`python -m benchmarks run workload.synthetic_population`, "
        f"{link(path)}). All numbers of the last column are *modelled*."
    )
    head = ("", "paper's abstract, real jobs", "synthetic jobs")
    return f"## A synthetic population\n\n{intro}\n\n{table(head, rows)}"


def _traces() -> str:
    rows = []
    for name, tool in (("hta", "HolisticTraceAnalysis 0.5.0"), ("tracelens", "TraceLens")):
        path = FOLDER / f"{name}.json"
        records = load(path)["records"]
        differences = [_largest(record["difference_of_total"]) for record in records]
        equal = sum(difference < 1e-5 for difference in differences)
        rows.append([tool, str(len(records)), str(equal), _percent(max(differences)), link(path)])
    intro = wrapped(
        "Span, idle, computing and communication times of public traces, beside other tools "
        "(`workload.hta`, `workload.tracelens`; both need the traces and the tool). The largest "
        "difference is a share of the span. TraceLens counts NVLS all-reduce kernels "
        "(`multimem_all_reduce_kernel`) as computation, nostall as communication."
    )
    head = ("tool", "traces", "all figures equal", "largest difference", "file")
    return f"## Trace figures beside other tools\n\n{intro}\n\n{table(head, rows)}"


def _largest(differences: Row) -> float:
    return max(abs(value) for value in differences.values() if value is not None)


def _reading() -> str:
    path = FOLDER / "reading_speed.json"
    rows = [
        [r["file"], f"{r['file_megabytes']:,.0f}", f"{r['events']:,}",
         f"{r['events_per_processor_second']:,}", f"{r['peak_megabytes']}"]
        for r in load(path)["records"]
    ]  # fmt: skip
    intro = wrapped(
        "A generated trace in Kineto's layout (`python -m benchmarks run workload.reading_speed`, "
        f"{link(path)})."
    )
    head = ("file", "MB", "events", "events per processor second", "peak memory MB")
    return f"## Reading speed\n\n{intro}\n\n{table(head, rows)}"
