"""Sections of ``docs/results/assembler.md``: register budgets, other GPUs, stall reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.markdown import table, wrapped

Row = Mapping[str, Any]
_SHOWN_STALLS = 3
"""Stall reasons of a kernel: those that changed most."""


def budgets_section(before: Sequence[Row], rows: Sequence[Row], source: str) -> str:
    """What register budgets above the original's number add."""
    known = {row["kernel"]: row["deployed"] for row in before}
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["kernel"] in known:
            found.setdefault(row["kernel"], []).append(row["deployed"])
    lines = [
        [name, f"{known[name]:.3f}", f"{geometric_mean(values):.3f}"]
        for name, values in found.items()
    ]
    means = (
        geometric_mean(known[n] for n in found),
        geometric_mean(geometric_mean(values) for values in found.values()),
    )
    lines.append(["geometric mean", *(f"{mean:.3f}" for mean in means)])
    note = wrapped(
        "ptxas schedules for the register budget that it is told, even where the kernel needs "
        "fewer registers. Deployed ratios over (a) with budgets up to the original's number of "
        f"registers ({source}; another call, 18 to 40 s of search), and with larger ones (above):"
    )
    head = ("kernel", "budgets below", "below and above")
    return f"## Register budgets\n\n{note}\n\n{table(head, lines)}"


PEERS = {
    "assembler": "assembler",
    "spike": "random orders",
    "anneal": "moves of native instructions",
    "sip": "SIP",
    "sip-from-winner": "assembler, then SIP",
    "cuasmrl-from-winner": "assembler, then CuAsmRL",
}
"""Methods beside the assembler, by the word that the table shows."""


def peers_section(rows: Sequence[Row], source: str) -> str:
    """Other methods, each seed in one call of its own."""
    found = {(row["seed"], row["kernel"], row["method"]): row for row in rows}
    lines, notes = [], []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        kernels = list(dict.fromkeys(row["kernel"] for row in rows if row["seed"] == seed))
        for name in kernels:
            cells = [found.get((seed, name, method)) for method in PEERS]
            shown = [f"{cell['deployed']:.3f}" if cell else "–" for cell in cells]
            lines.append([name, str(seed), *shown])
        whole = [m for m in PEERS if all((seed, n, m) in found for n in kernels)]
        means = {
            method: geometric_mean(found[seed, name, method]["deployed"] for name in kernels)
            for method in whole
        }
        shown = [f"{means[m]:.3f}" if m in means else "–" for m in PEERS]
        lines.append(["geometric mean", str(seed), *shown])
        ours = max(found[seed, name, "assembler"]["search"]["search_s"] for name in kernels)
        others = [
            found[key]["search"]["seconds"] for n in kernels if (key := (seed, n, "spike")) in found
        ]
        beside = f", random orders {max(others):.0f} s" if others else ""
        notes.append(f"seed {seed}: the assembler {ours:.0f} s{beside}")
    note = wrapped(
        "*Random orders* is a program that only re-orders PTX at random under a portfolio of "
        "options, keeps what is faster, and proves nothing. Seconds of search for a kernel, at "
        f"most: {'; '.join(notes)}. Seed 1 was searched without register budgets above the "
        "original's. For seed 3 the assembler's row is that of the table of kernels, another call "
        f"of the same day; an anneal of native instructions is part of it. ({source})"
    )
    head = ("kernel", "seed", *PEERS.values())
    return f"## Beside other methods\n\n{table(head, lines)}\n\n{note}"


VARIANTS = {
    "assembler": "whole, same call",
    "assembler-one-sigma": "one sigma",
    "assembler-all-blocks": "all blocks",
    "assembler-without-recombination": "no recombination",
    "assembler-without-immigrants": "no immigrants",
    "assembler-two-parents": "two parents",
}
"""The whole search and those without a part of the evolution, by the word that the table shows."""


def ablation_section(variants: Sequence[Row], rows: Sequence[Row], source: str) -> str:
    """What the parts of the evolution are worth."""
    found = {(row["kernel"], row["method"]): row["deployed"] for row in variants}
    whole: dict[str, list[float]] = {}
    for row in rows:
        whole.setdefault(row["kernel"], []).append(row["deployed"])
    kernels = list(dict.fromkeys(row["kernel"] for row in variants))
    seconds = max(row["seconds_searched"] for row in variants)
    lines = [
        [
            name,
            f"{min(whole[name]):.3f} to {max(whole[name]):.3f}",
            *(f"{found[name, m]:.3f}" if (name, m) in found else "–" for m in VARIANTS),
        ]
        for name in kernels
    ]
    note = wrapped(
        f"Deployed ratios over (a) at {seconds:.0f} s with a part of the evolution left out: one "
        "sigma (3) of four, re-orderings of all blocks only, no recombination, no random orders "
        "of the portfolio's states, a population of two. *All seeds* has the lowest and highest "
        "ratio of the seeds above, with more seconds. One search each: a difference as large as "
        "that between the whole search and the seeds does not show what a part is worth. "
        f"({source})"
    )
    head = ("kernel", "all seeds", *VARIANTS.values())
    return f"## Parts of the evolution\n\n{note}\n\n{table(head, lines)}"


def long_section(long: Sequence[Row], rows: Sequence[Row], source: str) -> str:
    """What more time gains."""
    short: dict[str, list[float]] = {}
    for row in rows:
        short.setdefault(row["kernel"], []).append(row["deployed"])
    lines = [
        [
            row["kernel"],
            f"{geometric_mean(short[row['kernel']]):.3f}",
            f"{row['seconds_searched']:.0f}",
            f"{row['deployed']:.3f}",
            f"{sum(row['counts'].values()):,}",
        ]
        for row in long
    ]
    note = wrapped(
        "A search ten times as long, beside the mean of the short ones above: deployed ratios over "
        f"(a). ({source})"
    )
    head = ("kernel", "short", "seconds of the long one", "long", "candidates")
    return f"## Long searches\n\n{note}\n\n{table(head, lines)}"


def transfer_section(kernels: Mapping[str, Row], source: str) -> str:
    """Winners of earlier searches, measured again on another day and with other assemblers."""
    good = {name: row for name, row in kernels.items() if "ratio" in row.get("deployed", {})}
    versions = list(dict.fromkeys(v for row in good.values() for v in row["versions"]))
    gpus = " and ".join(sorted({row["gpu"]["gpu"] for row in good.values()}))
    lines = [
        [
            name,
            _card(row["searched"]["gpu"]),
            f"{row['searched']['deployed']:.3f}",
            _ratio(row["deployed"]),
            *(_ratio(row["versions"].get(version, {})) for version in versions),
        ]
        for name, row in good.items()
    ]
    note = wrapped(
        "Winners of earlier searches, built again from their records and measured on another "
        f"machine with {gpus}, without moves of native instructions: over the compiler's cubin, "
        "and with each ptxas over the original text that the same ptxas assembles. Ratios below 1 "
        "are shown as they are; a deployed kernel is measured before it replaces the original. "
        f"(`python -m benchmarks run ptx.transfer`, {source})"
    )
    head = ("kernel", "searched on", "there", "here", *(f"ptxas {v}" for v in versions))
    return f"## Another machine, another ptxas\n\n{note}\n\n{table(head, lines)}"


def _card(name: str) -> str:
    return name.removeprefix("NVIDIA ").split()[0]


def _ratio(result: Row) -> str:
    return f"{result['ratio']:.3f}" if "ratio" in result else "–"


def stalls_section(kernels: Mapping[str, Row], source: str) -> str:
    """Cycles that a warp waits per instruction, before and after the search."""
    good = {name: row for name, row in kernels.items() if "after" in row}
    lines = [[name, _changes(row)] for name, row in good.items()]
    note = wrapped(
        "Stall reasons whose cycles per issued instruction changed most, counted by ncu in one "
        "launch each of the original and of the winner as ptxas makes it. (`python -m benchmarks "
        f"run ptx.stall_reasons`, {source})"
    )
    return f"## Stall reasons\n\n{note}\n\n{table(('kernel', 'cycles before and after'), lines)}"


def _changes(row: Row) -> str:
    before, after = row["before"]["waits"], row["after"]["waits"]
    names = sorted({*before, *after}, key=lambda n: -abs(after.get(n, 0) - before.get(n, 0)))
    return ", ".join(
        f"{name} {before.get(name, 0.0):.2f} to {after.get(name, 0.0):.2f}"
        for name in names[:_SHOWN_STALLS]
    )
