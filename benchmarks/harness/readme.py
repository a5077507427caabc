"""The generated tables of ``README.md`` and ``benchmarks/README.md``.

A generated region is the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``. The command
``python -m benchmarks page readme`` writes the regions from committed results.
"""

from __future__ import annotations

from statistics import geometric_mean, median
from typing import Any

from benchmarks.fusion.unseen.page import deployed as deployed_chain
from benchmarks.harness.markdown import region, table, wrapped
from benchmarks.harness.result_file import ROOT, load, results
from benchmarks.harness.schema import read
from benchmarks.ptx.page import all_rows
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.sass.pages.suite_section import deployed
from benchmarks.serving.page import linear_ratios
from benchmarks.serving.pages.attention import attention_ratios
from benchmarks.serving.pages.engine import engine_ratio
from nostall.core.files.atomic import write_atomically
from nostall.sass.model.agreement import load_agreement

README = ROOT.parent / "README.md"
TABLE = ROOT / "README.md"


def readme(text: str) -> str:
    """README.md with new regions: the rank agreement of the SM model and the headline results."""
    agreement = load_agreement()
    sentence = "How well it ranks what a GPU measures is not recorded yet."
    if agreement is not None:
        sentence = wrapped(f"{agreement.sentence[0].upper()}{agreement.sentence[1:]}")
    text = region(text, "agreement", sentence)
    rows = [
        *(_assembler(), _schedules(), _unseen_chains(), _chains(), _user_models(), _models()),
        *(_serving(), _sharding(), _pipelines(), _traces(), _learners()),
    ]
    return region(text, "headlines", table(("level", "measured", "GPU", "result"), rows))


def benchmark_table(text: str) -> str:
    """benchmarks/README.md with a new table: one row for each benchmark."""
    head = ("benchmark", "question", "needs", "results", "page")
    return region(text, "benchmarks", table(head, [_row(b) for b in BENCHMARKS]))


def _row(benchmark: Benchmark) -> tuple[str, ...]:
    files = " ".join(f"[{file.rpartition('/')[2]}]({file})" for file in benchmark.results)
    page = f"[{benchmark.page}](../docs/results/{benchmark.page})" if benchmark.page else "–"
    return f"`{benchmark.name}`", benchmark.question, benchmark.needs, files or "–", page


def _links(page: str, name: str) -> str:
    return f"[page](docs/results/{page}), `{name}`"


def _assembler() -> tuple[str, ...]:
    rows = all_rows()
    sets = ("published", "filling", "unseen")
    ratios = {n: [row["deployed"] for row in rows if row["set"] == n] for n in sets}
    kernels = {n: len({row["kernel"] for row in rows if row["set"] == n}) for n in sets}
    means = {name: f"{geometric_mean(values):.3f}" for name, values in ratios.items()}
    low, high = min(map(min, ratios.values())), max(map(max, ratios.values()))
    gain = (
        f"kernels whose PTX was re-ordered by search run {means['published']} times as fast as the "
        f"fastest of the compiler's configurations at small shapes ({kernels['published']} "
        f"kernels), {means['filling']} at shapes that fill the GPU ({kernels['filling']}), "
        f"{means['unseen']} on kernels it was not developed with ({kernels['unseen']}); "
        f"{low:.3f} to {high:.3f} in {len(rows)} searches of at most "
        f"{max(row['seconds_searched'] for row in rows):.0f} s"
    )
    gpus = " and ".join(sorted({r["gpu"]["gpu"].removeprefix("NVIDIA ").split()[0] for r in rows}))
    return "input of ptxas", gain, gpus, _links("assembler.md", "ptx.assembler_suite")


def _serving() -> tuple[str, ...]:
    small = [ratio for m, ratio in linear_ratios() if m <= 64]
    attention = attention_ratios()
    gain = (
        f"linear layers with a tuned table run {geometric_mean(small):.3f} times as fast as "
        "F.linear for M up to 64; one attention kernel for all stages is "
        f"{attention['vLLM Triton']:.1f} times as fast as vLLM's Triton kernel and "
        f"{attention['FA3']:.2f} times as fast as FlashAttention-3; vLLM with the plug-in gives "
        f"{engine_ratio('TRITON_ATTN'):.2f} times the tokens of its Triton back end and "
        f"{engine_ratio('FLASH_ATTN'):.2f} times those of FLASH_ATTN, which is no gain"
    )
    return "LLM serving", gain, "H200", _links("serving.md", "serving.attention")


def _schedules() -> tuple[str, ...]:
    records = read(results("sass") / "suite.json.gz").records
    published = [record for record in records if record.size == "published"]
    ratios = deployed(published, "anneal").values()
    gain = (
        f"searched SASS schedules run {geometric_mean(ratios):.4f} times as fast as the fastest "
        f"of 24 to 30 compiler configurations ({len(ratios)} kernels, {min(ratios):.4f} to "
        f"{max(ratios):.4f})"
    )
    return "native instructions", gain, _gpus(records), _links("sass.md", "sass.suite")


def _gpus(records: Any) -> str:
    return " and ".join(sorted({record.gpu.removeprefix("NVIDIA ") for record in records}))


def _unseen_chains() -> tuple[str, ...]:
    record = load(results("fusion") / "unseen_test.json")
    chains = list(record["chains"].values())
    ratios = [deployed_chain(chain) for chain in chains]
    gain = (
        f"{len(ratios)} generated chains that nothing was fitted to run "
        f"{geometric_mean(ratios):.2f} times as fast as torch.compile ({min(ratios):.2f} to "
        f"{max(ratios):.2f})"
    )
    gpus = " and ".join(sorted({chain["gpu"].removeprefix("NVIDIA ") for chain in chains}))
    return "kernel fusion", gain, gpus, _links("fusion-unseen.md", "fusion.unseen_chains")


def _chains() -> tuple[str, ...]:
    chains = [load(path) for path in sorted((results("fusion") / "chains").glob("*.json"))]
    ratios = [chain["compared"]["compile"]["ratio"] for chain in chains]
    gain = (
        f"the chains it was developed with run {geometric_mean(ratios):.2f} times as fast as "
        f"torch.compile ({len(ratios)} chains, {min(ratios):.2f} to {max(ratios):.2f})"
    )
    gpus = " and ".join(sorted({chain["gpu"].removeprefix("NVIDIA ") for chain in chains}))
    return "kernel fusion", gain, gpus, _links("fusion-chains.md", "fusion.chains")


def _user_models() -> tuple[str, ...]:
    """Whole models as users write them: means and extremes of the GPU's time and of loops."""
    paths = sorted((results("torch_compile") / "user_models").glob("*.gain.json"))
    records = [record for path in paths if (record := load(path)).get("complete")]
    ratios = {
        clock: [record[clock]["compared"]["nostall"]["ratio"] for record in records]
        for clock in ("replayed", "looped")
    }
    alone, looped = ratios["replayed"], ratios["looped"]
    verdicts = [record["replayed"]["compared"]["nostall"]["verdict"] for record in records]
    faster = verdicts.count("faster")
    gain = (
        f"steps of {len(records)} whole models as users write them take torch.compile "
        f"{geometric_mean(alone):.3f} times the GPU's time of nostall ({min(alone):.2f} to "
        f"{max(alone):.2f}), and {geometric_mean(looped):.3f} times the time in a loop "
        f"({min(looped):.2f} to {max(looped):.2f}); {faster} of them are measured to be faster on "
        "the GPU alone"
    )
    gpus = " and ".join(sorted({record["gpu"].removeprefix("NVIDIA ") for record in records}))
    return "whole models", gain, gpus, _links("fusion-unseen.md", "torch_compile.user_models")


def _models() -> tuple[str, ...]:
    """Step-time ratio of each model that runs stitched kernels; the other models are counted."""
    ratios, unchanged, gpus = [], 0, set()
    for path in sorted((results("torch_compile") / "models").glob("*.steady.json*")):
        record = load(path)
        gpus.add(record["gpu"].removeprefix("NVIDIA "))
        if any(graph["state"] == "stitched" for graph in record["graphs"]["nostall"]):
            ratio = record["looped"]["compared"]["nostall"]["ratio"]
            ratios.append(f"{record['model']} {ratio:.2f}")
        else:
            unchanged += 1
    gain = (
        f"steps of the models it was developed with, beside torch.compile: {', '.join(ratios)}; "
        f"{unchanged} other models keep Inductor's kernels"
    )
    links = _links("torch-compile.md", "torch_compile.models")
    return "whole models", gain, " and ".join(sorted(gpus)), links


def _sharding() -> tuple[str, ...]:
    content = load(results("sharding") / "gpu_hybrids_4.json")
    models = content["summary"]["models"].values()
    taus, errors = ([model[key] for model in models] for key in ("tau", "mape"))
    regret = max(model["regret"] for model in models)
    choice = f"at most {100 * regret:.1f} % slower than the fastest" if regret else "the fastest"
    gain = (
        f"measured steps of {content['summary']['plans']} plans of shardings and of pipelines of "
        f"sharded stages, of {len(models)} models, rank as predicted (Kendall tau {min(taus):.2f} "
        f"to {max(taus):.2f}), though predictions are {100 * min(errors):.0f} to "
        f"{100 * max(errors):.0f} % off in the mean; the planner's choice is {choice} (4 GPUs)"
    )
    return "sharding plans", gain, "H200", _links("parallel.md", "sharding.gpu_hybrids")


def _pipelines() -> tuple[str, ...]:
    summaries = {
        gpus: load(results("parallel") / f"predicted_vs_measured_{gpus}.json")["summary"]
        for gpus in (2, 4)
    }
    texts = [
        f"those of {summary['points']} plans on {gpus} GPUs {100 * summary['mape']:.1f} % "
        f"({100 * summary['worst_error']:.1f} % at worst)"
        for gpus, summary in summaries.items()
    ]
    gain = f"predicted iteration times are off in the mean: {', '.join(texts)}"
    return "pipeline plans", gain, "H200", _links("parallel.md", "parallel.predicted_vs_measured")


def _traces() -> tuple[str, ...]:
    record = load(results("workload") / "fit.json")
    errors = [abs(model["fitted_error"]["step"]) for model in record["models"]]
    gain = (
        "modelled GPU time of a training step, with fitted operators, is "
        f"{100 * median(errors):.0f} % off in the median of {len(errors)} models "
        f"({100 * max(errors):.0f} % at worst)"
    )
    gpu = record["about"]["device"].removeprefix("NVIDIA ")
    return "jobs", gain, gpu, _links("workload.md", "workload.fit")


def _learners() -> tuple[str, ...]:
    record = load(results("learners") / "operators.json")
    forest, new = record["methods_test"]["forest"], record["pipeline_mean"]
    gain = (
        f"kinds of training steps are named with accuracy {forest['known_accuracy']:.2f}, unknown "
        f"kinds found with AUROC {forest['unknown_auroc']:.2f} and grouped with accuracy "
        f"{new['hungarian_accuracy']:.2f} (generated models of {len(record['kinds'])} kinds)"
    )
    return "kinds of work", gain, "CPU", _links("learners.md", "learners.operators")


def write() -> None:
    """Write the generated regions of both files."""
    write_atomically(README, readme(README.read_text("utf-8")).encode())
    write_atomically(TABLE, benchmark_table(TABLE.read_text("utf-8")).encode())
