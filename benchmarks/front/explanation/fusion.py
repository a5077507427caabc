"""Figures of ``docs/explanation/cost-model.md`` and ``codegen.md``."""

from __future__ import annotations

from statistics import median

from benchmarks.harness.result_file import load, results

FOLDER = results("fusion")
_BEYOND = 0.005
"""Differences below this one count as none."""


def cost_model() -> dict[str, str]:
    """Name -> text: the fit of the model of generated kernels."""
    fit = load(FOLDER / "unseen_fit.json")
    before, after = (100 * fit["regret"][name]["mean"] for name in ("sources", "fitted"))
    machine = fit["figures"]["machine"]
    starts = load(FOLDER / "program_start_rate.json")["measured"]
    return {
        "fit-size": f"{fit['plans']:,} plans of {fit['kernels']} kernels",
        "regret-before": f"{before:.1f} %",
        "regret-after": f"{after:.1f} %",
        "issued": f"{machine['issued']:.2f}",
        "program-start": f"{1e9 * machine['program_s']:.1f} ns",
        "program-start-alone": f"{min(median(row['ns_each']['early']) for row in starts):.2f} ns",
        "warp-start": f"{1e9 * machine['warp_s']:.2f} ns",
    }


def codegen() -> dict[str, str]:
    """Name -> text: outputs that are stored to leave L2 first."""
    chains = load(FOLDER / "streamed_outputs.json")["chains"].values()
    losses = [
        {name: median(row["streamed"]) / median(row["kept"]) - 1 for name, row in times.items()}
        for times in (chain["samples_us"] for chain in chains)
    ]
    faster = sum(row["alone"] < -_BEYOND for row in losses)
    slower = sum(row["alone"] > _BEYOND for row in losses)
    both = max(max(row.values()) for row in losses if row["alone"] <= _BEYOND)
    return {
        "streamed": f"{faster} of {len(losses)} kernels faster and {slower} slower",
        "streamed-both": f"{100 * both:.1f} %",
    }
