"""Sections of ``docs/results/serving.md`` on decodes that read shared prefixes once."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.serving.engine.rollout_workload import Rollout
from benchmarks.serving.engine.rollouts import rates
from nostall.core.measurement import Comparison

FOLDER = results("serving")
ROLLOUTS = (FOLDER / "rollouts_shared_h200.json", FOLDER / "rollouts_unshared_h200.json")
FORESTS = FOLDER / "prefix_forests_h200.json.gz"

Row = Mapping[str, Any]


def rollouts() -> str:
    """Token rates of vLLM with the plug-in beside FLASH_ATTN."""
    contents = [load(path) for path in ROLLOUTS]
    pairs = [pair for content in contents for pair in _pairs(content)]
    custom = contents[0]["engines"][1]
    about = (
        f"{custom['gpu']}, {contents[0]['date'][:10]}, vLLM {custom['vllm']} (V2 runner, its own "
        "graphs, asynchronous scheduling, prefix caching on), Llama-3-8B's shape with random "
        "weights. All samples of all prompts decode at once; their prompts are cached before the "
        "clock starts. FLASH_ATTN and CUSTOM (nostall, default choice) hold the GPU in turns, 8 "
        "turns each, in the course of one generation. A ratio is the median of the turns' pairs "
        "with its 95 % bootstrap interval, and the range of the pairs. The last column is the "
        "host's time to build the metadata of a step, FLASH_ATTN's in brackets. (`python -m "
        f"benchmarks run serving.rollouts`, {', '.join(map(link, ROLLOUTS))})"
    )
    columns = (
        "prompts x samples, shared + new tokens", "steps a turn", "FLASH_ATTN, tokens/s",
        "CUSTOM, tokens/s", "ratio (interval)", "range", "build, us",
    )  # fmt: skip
    rows = [_rollout_cells(*pair) for pair in pairs]
    return "\n\n".join(["### Shared prompts", wrapped(about), table(columns, rows)])


def _pairs(content: Row) -> list[tuple[Row, Row]]:
    """The records of FLASH_ATTN and CUSTOM for each workload."""
    base, custom = content["engines"]
    return list(zip(base["rounds"], custom["rounds"], strict=True))


def comparison(base: Row, custom: Row) -> Comparison:
    """CUSTOM's token rate over FLASH_ATTN's."""
    return Comparison.from_samples(rates(dict(custom)), rates(dict(base)), kind="measured")


def rollout_ratios(content: Row) -> list[tuple[Rollout, float]]:
    """Each workload and CUSTOM's token rate over FLASH_ATTN's."""
    return [
        (Rollout.parse(base["workload"]), comparison(base, custom).ratio)
        for base, custom in _pairs(content)
    ]


def _rollout_cells(base: Row, custom: Row) -> list[str]:
    ours, theirs = rates(dict(custom)), rates(dict(base))
    ratio = comparison(base, custom)
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [
        Rollout.parse(base["workload"]).name,
        str(base["turns"][0]["steps"]),
        f"{median(theirs):,.0f}",
        f"{median(ours):,.0f}",
        f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
        f"{min(pairs):.3f} to {max(pairs):.3f}",
        f"{custom['build_us']:.0f} ({base['build_us']:.0f})",
    ]


def forests() -> str:
    """Times of the attention kernel that reads shared prefixes once, beside FlashAttention-3."""
    content = load(FORESTS)
    checked, first = content["forests"], content["results"][0]
    about = (
        f"One layer of Llama-3-8B's shape at a decode step on {first['gpu']}, "
        f"{content['date'][:10]}, bf16, pages of 16, times in us (medians). The tables are built "
        "on the device from the block table. *Bound* reads each key once at the memory's nominal "
        "rate. *Ours* is the plan of the rules; FA3 / ours is below 1 for few sequences, which the "
        "plug-in leaves to FlashAttention. *Tables* is the time to build the tables of a step, "
        f"once for all layers. Before, {checked['checked']} random forests of five shapes, "
        f"{checked['grouped']} with groups, were compared with fp64: {len(checked['wrong'])} "
        f"wrong. (`python -m benchmarks run serving.prefix_forests`, {link(FORESTS)})"
    )
    columns = ("prompts x samples, shared + own keys", "bound", "FA3", "ours", "FA3 / ours",
               "ours / bound", "tables", "RMS error of ours / of FA3")  # fmt: skip
    rows = []
    for row in content["results"]:
        took = {name: median(samples) for name, samples in row["samples_us"].items()}
        error = row["rms_error"]
        rows.append(
            [
                row["name"], f"{row['bound_us']:.1f}", f"{took['FA3']:.1f}", f"{took['ours']:.1f}",
                f"{took['FA3'] / took['ours']:.2f}", f"{took['ours'] / row['bound_us']:.2f}",
                f"{took['tables']:.1f}", f"{error['ours'] / error['FA3']:.3f}",
            ]
        )  # fmt: skip
    return "\n\n".join(["## Prefixes from block tables", wrapped(about), table(columns, rows)])
