"""The headlines of all levels, computed from committed results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import geometric_mean, median
from typing import Any

from benchmarks.front.headline import HEAD, Headline, below, day
from benchmarks.front.picture import picture_text
from benchmarks.fusion.unseen import kinds_page
from benchmarks.fusion.unseen.deployed import CHOSEN
from benchmarks.fusion.unseen.page import MEASURED, deployed, kinds_files
from benchmarks.fusion.unseen.page import ratio as chain_ratio
from benchmarks.fusion.unseen.whole_models import looped_mean_of_fused_attention
from benchmarks.harness.markdown import table, wrapped
from benchmarks.harness.result_file import load
from benchmarks.harness.schema import read
from benchmarks.optimizing.page import FILE as PROGRAMS
from benchmarks.optimizing.page import crashed, in_turns, ratios_over
from benchmarks.optimizing.whole_programs import AS_WRITTEN, BEST
from benchmarks.ptx.page import all_rows
from benchmarks.ptx.page_sections import UNSEEN_KERNELS, by_kernel
from benchmarks.sass.pages.suite_section import deployed as deployed_schedules
from benchmarks.serving.page import linear_ratios
from benchmarks.serving.pages.attention import batch_times
from benchmarks.serving.pages.engine import current_rounds, rate
from benchmarks.serving.pages.rollouts import ROLLOUTS, rollout_ratios

Row = Mapping[str, Any]
SMALL_M = 64
"""Rows of a linear layer up to which a table is expected to help."""


@cache
def headlines() -> tuple[Headline, ...]:
    """All headlines, in the order of README's table and picture."""
    return (
        *whole_programs(), unseen_chains(), unseen_kinds(), user_models(), developed_models(),
        users_kernels(), searched_ptx(), native_schedules(), linear_layers(), *attention(),
        shared_prompts(), engine(), shardings(), captured_plans(),
    )  # fmt: skip


def answers(page: str) -> list[str]:
    """The first parts of a result page: a sentence for each headline, a picture and a table."""
    found = [headline for headline in headlines() if headline.page == page]
    if not found:
        return []
    rows = [[cell.replace("(docs/results/", "(") for cell in h.row] for h in found]
    picture = picture_text(page, "The ratios of the table below")
    return [*(wrapped(h.sentence) for h in found), picture, table(HEAD, rows)]


def whole_programs() -> tuple[Headline, ...]:
    """Programs as written, and with the best flags of a person, beside what ships."""
    content = load(PROGRAMS)
    rows = content["programs"]
    gpus = {row["optimize"]["device"] for row in rows.values() if "device" in row["optimize"]}
    unchanged = sum(not row["bundle"] for row in rows.values())
    slower = sum(ratio < 1 for ratio in ratios_over(BEST, rows))
    late = sum(not in_turns(row) for row in rows.values())
    failed = sum(map(crashed, rows.values()))
    rest = f"; {late} estimated" if late else ""
    rest += f"; {failed} bundle fails" if failed else ""
    notes = {
        AS_WRITTEN: f"{unchanged} stay as written{rest}",
        BEST: f"{slower} slower: refused, not reached{rest}",
    }
    labels = {AS_WRITTEN: "as written", BEST: "best flags by hand"}
    days = sorted({row["date"][:10] for row in rows.values()})
    return tuple(
        Headline(
            "whole programs, not edited", labels[over], tuple(ratios_over(over, rows)), "programs",
            " and ".join(sorted(gpu.removeprefix("NVIDIA ") for gpu in gpus)),
            " to ".join(dict.fromkeys((days[0], days[-1]))), note, "optimize.md", (PROGRAMS,),
            ("optimizing", "attach/program"), label=f"whole programs / {labels[over]}",
        )
        for over, note in notes.items()
    )  # fmt: skip


def unseen_chains() -> Headline:
    (file,) = below("fusion", "unseen_test.json.gz")
    content = load(file)
    chains = list(content["chains"].values())
    raw = [value for c in chains if (value := chain_ratio(c, MEASURED)) is not None]
    kept = sum(deployed(chain) == 1 for chain in chains)
    slower = sum(value < 1 for value in raw)
    return Headline(
        "fused chains", "torch.compile", tuple(map(deployed, chains)), "chains",
        _gpus(chains), day(content),
        f"{kept} keep torch.compile's kernels; unchecked, {slower} lose, {min(raw):.2f} at worst",
        "fusion-unseen.md", (file,), ("fusion",), label="fused chains / torch.compile",
    )  # fmt: skip


def unseen_kinds() -> Headline:
    """Held-out kinds of other projects on the GPU alone, beside the better of two modes."""
    files = tuple(kinds_files())
    content = load(files[-1])
    chains = kinds_page.all_chains(files)
    ratios = [x for c in chains if (x := kinds_page.over_best(c, "replayed", CHOSEN))]
    default = [x for c in chains if (x := kinds_page.ratio(c, "replayed", CHOSEN))]
    kept = sum(not kinds_page.is_chosen(chain) for chain in chains)
    return Headline(
        "held-out kinds", "the better of torch.compile's default and max-autotune",
        tuple(ratios), "chains", content["gpu"].removeprefix("NVIDIA "), day(content),
        f"{kept} of {len(chains)} keep torch.compile's kernels; "
        f"over default {geometric_mean(default):.2f}",
        "fusion-unseen.md", files, ("fusion", "attach/torch_compile"),
        label="held-out kinds / torch.compile's best",
    )  # fmt: skip


def user_models() -> Headline:
    """Steps in a loop, as users run them: the GPU's time alone is on the page."""
    files = below("torch_compile", "user_models/*.gain.json")
    records = [record for file in files if (record := load(file)).get("complete")]
    ratios = {r["model"]: r["looped"]["compared"]["nostall"]["ratio"] for r in records}
    models = {name.rpartition("-")[0] for name in ratios}
    slower = sum(ratio < 1 for ratio in ratios.values())
    fused = looped_mean_of_fused_attention(records)
    usual = f"; fused attention already: {fused:.2f}" if fused else ""
    return Headline(
        "whole models", "torch.compile, default mode", tuple(ratios.values()),
        f"steps of {len(models)} models", _gpus(records), day(records),
        f"median {median(ratios.values()):.2f}; {slower} slower; 2 to 6 layers{usual}",
        "fusion-unseen.md", files, ("fusion", "attach/torch_compile"),
        label="whole models / torch.compile",
    )  # fmt: skip


def developed_models() -> Headline:
    """All models of the suite, those that keep Inductor's kernels included."""
    files = below("torch_compile", "models/*.steady.json*")
    records = [load(file) for file in files]
    ratios = [record["looped"]["compared"]["nostall"]["ratio"] for record in records]
    kept = sum(
        all(graph["state"] != "stitched" for graph in record["graphs"]["nostall"])
        for record in records
    )
    return Headline(
        "models of its development", "torch.compile, default mode", tuple(ratios), "models",
        _gpus(records), day(records), f"{kept} keep Inductor's kernels and are not faster",
        "torch-compile.md", files, ("fusion", "attach/torch_compile"),
        label="development models / torch.compile",
    )  # fmt: skip


def users_kernels() -> Headline:
    """Kernels of users that nothing was developed with, beside all their configurations."""
    content = load(UNSEEN_KERNELS)
    rows = content["records"]
    wgmma = geometric_mean(r["deployed"] for r in rows if r["instructions"] == "wgmma")
    *others, _ = sorted(r["deployed"] for r in rows)
    return Headline(
        "users' kernels, searched PTX", "fastest configuration of the kernel's table",
        tuple(r["deployed"] for r in rows), "unseen kernels",
        " and ".join(sorted({r["gpu"]["gpu"].removeprefix("NVIDIA ") for r in rows})), day(content),
        f"with wgmma: {wgmma:.3f}; without the best: {geometric_mean(others):.3f}",
        "assembler.md", (UNSEEN_KERNELS,), ("ptx", "search", "tuning/assembler"), 3,
        "users' kernels / their configurations",
    )  # fmt: skip


def searched_ptx() -> Headline:
    rows = all_rows()
    ratios = [
        value
        for name in ("published", "filling", "unseen")
        for value in by_kernel([row for row in rows if row["set"] == name]).values()
    ]
    files = below("ptx", "assembler_suite.json", "assembler_filling.json", "unseen_suite.json")
    filling = by_kernel([row for row in rows if row["set"] == "filling"]).values()
    gpus = sorted({row["gpu"]["gpu"].removeprefix("NVIDIA ").split()[0] for row in rows})
    return Headline(
        "searched PTX", "fastest compiler configuration", tuple(ratios), "kernels",
        " and ".join(gpus), day([load(file) for file in files]),
        f"shapes that fill the GPU: {geometric_mean(filling):.3f}",
        "assembler.md", files, ("ptx", "search", "tuning/assembler"), 3,
        "searched PTX / compiler's best",
    )  # fmt: skip


def native_schedules() -> Headline:
    (file,) = below("sass", "suite.json.gz")
    records = [r for r in read(file).records if r.size == "published"]
    ratios = deployed_schedules(records, "anneal").values()
    return Headline(
        "native instructions", "fastest compiler configuration", tuple(ratios), "kernels",
        " and ".join(sorted({r.gpu.removeprefix("NVIDIA ") for r in records})),
        str(max(r.date for r in records))[:10], "most kernels gain less than 1 %",
        "sass.md", (file,), ("sass", "search", "tuning"), 3,
        "native instructions / compiler's best",
    )  # fmt: skip


def linear_layers() -> Headline:
    (file,) = below("serving", "gemm_h200.json.gz")
    content = load(file)
    small = [ratio for m, ratio in linear_ratios() if m <= SMALL_M]
    large = [ratio for m, ratio in linear_ratios() if m > SMALL_M]
    return Headline(
        f"linear layers, M ≤ {SMALL_M}", "F.linear", tuple(small), "shapes",
        content["gpu"].removeprefix("NVIDIA "), day(content),
        f"larger M: {geometric_mean(large):.2f}", "serving.md", (file,), ("serving/gemm",), 3,
        "linear layers / F.linear",
    )  # fmt: skip


def attention() -> tuple[Headline, ...]:
    """The plan of the rules, which ships; the fastest of several plans is on the page."""
    (file,) = below("serving", "attention.json.gz")
    content = load(file)
    times = [batch_times(row) for row in content["results"]]
    notes = {
        "FA3": ("FlashAttention-3", "FlashAttention-3 is faster in the mean of each kind"),
        "vLLM Triton": ("vLLM's Triton kernel", "where FlashAttention-3 runs"),
    }
    return tuple(
        Headline(
            "attention, all stages", beside, tuple(t[peer] / t["rule"] for t in times), "batches",
            _gpus(content["results"]), day(content), no_help, "serving.md", (file,),
            ("serving/attention", "serving/tables"), label=f"attention / {beside}",
        )
        for peer, (beside, no_help) in notes.items()
    )  # fmt: skip


def engine_ratios(ours: str, other: str) -> list[float]:
    """Token rate of one back end over another's, for each workload and speculation."""
    found = current_rounds()
    return [
        rate(rows) / rate(found[count, workload, other])
        for (count, workload, engine), rows in found.items()
        if engine == ours and "@" not in workload and (count, workload, other) in found
    ]


def shared_prompts() -> Headline:
    contents = [load(file) for file in ROLLOUTS]
    found = rollout_ratios(contents)
    shared = tuple(ratio for workload, ratio in found if workload.shares)
    alone = [ratio for workload, ratio in found if not workload.shares]
    return Headline(
        "vLLM, samples of shared prompts", "vLLM's FLASH_ATTN", shared, "workloads", "H200",
        day(contents), f"nothing shared: {geometric_mean(alone):.2f}, worst {min(alone):.2f}",
        "serving.md", ROLLOUTS, ("attach/vllm", "serving/attention", "serving/tables"),
        label="vLLM, shared prompts / FLASH_ATTN",
    )  # fmt: skip


def engine() -> Headline:
    files = below("serving", "vllm_engine.json", "vllm_engine_unspeculated.json")
    contents = [load(file) for file in files]
    return Headline(
        "vLLM with the plug-in", "vLLM's FLASH_ATTN", tuple(engine_ratios("CUSTOM", "FLASH_ATTN")),
        "workloads", "H200", day(contents), "no gain where FLASH_ATTN runs", "serving.md", files,
        ("attach/vllm", "serving/attention"), label="vLLM plug-in / FLASH_ATTN",
    )  # fmt: skip


def shardings() -> Headline:
    (file,) = below("sharding", "gpu_hybrids_4.json")
    content = load(file)
    ratios = []
    for model in content["summary"]["models"].values():
        ratios.append(min(peer["over_plan"] for peer in model["peers"].values()))
    return Headline(
        "sharding plans", "best of DDP, FSDP2, TP", tuple(ratios), "models", "4 H200",
        max(session["date"] for session in content["sessions"])[:10],
        "small models with fast links: DDP is faster", "parallel.md", (file,),
        ("parallel/sharding", "parallel/execute"), label="sharding plan / best peer",
    )  # fmt: skip


def captured_plans() -> Headline:
    (file,) = below("parallel", "peers_2.json")
    content = load(file)
    found = {model: own for model, own in content["summary"].items() if own}
    slower: list[str] = []
    for model, own in found.items():
        peer = own["fastest_peer"].split(",")[0].upper()
        if own["peer_over_chosen"]["interval"][1] < 1:
            slower.append(f"{model} ({peer})")
        elif own["peer_over_plan"]["interval"][1] < 1:  # a candidate was chosen
            slower.append(f"{model}'s own plan ({peer})")
    lacking = [model for model in found if not _has_all_peers(content["models"][model]["arms"])]
    lost = [f"slower: {', '.join(slower)}"] if slower else []
    lost += [f"peers missing: {', '.join(lacking)}"] if lacking else []
    return Headline(
        "captured plans", "best of DDP, FSDP2, TP, captured",
        tuple(own["peer_over_chosen"]["ratio"] for own in found.values()), "models", "2 H200",
        day(content), "; ".join(lost), "parallel.md", (file,),
        ("parallel/sharding", "parallel/execute"), label="captured plan / best captured peer",
    )  # fmt: skip


def _has_all_peers(arms: Sequence[Row]) -> bool:
    """Whether each peer was timed compiled and captured."""
    timed = {arm["arm"] for arm in arms if arm.get("ms") and arm["mode"] == "compiled and captured"}
    return timed >= {"ddp", "fsdp2", "tp"}


def _gpus(rows: Sequence[Row]) -> str:
    return " and ".join(sorted({row["gpu"].removeprefix("NVIDIA ") for row in rows}))
