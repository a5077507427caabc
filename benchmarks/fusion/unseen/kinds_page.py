"""Section of the page of unseen chains: kinds of other projects, as deployed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.fusion.chains.projects import PROJECTS, kinds_of
from benchmarks.fusion.unseen.deployed import AUTOTUNED, BASE, CHOSEN, FORCED
from benchmarks.harness.result_file import load
from benchmarks.harness.template import render

CLOCKS = {"replayed": "CUDA graphs", "looped": "a loop"}
OVER_DEFAULT, OVER_BEST, LEAST = 1.20, 1.12, 0.98
"""Targets: over the default mode, over the better of both modes, of every chain."""
FASTER_SHARE, FORCED_LEAST, FORCED_SHARE = 0.65, 0.9, 0.8
"""Targets: chains that are chosen and faster; chains whose stitched version is not slower."""

VERSIONS = {"stitched": "stitched", "tuned": "tuned blocks"}
"""Names of versions other than Inductor's own, by the state of a graph."""

Row = Mapping[str, Any]


def all_chains(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The chains of several runs, which measured different ones, with the number of the run."""
    found: dict[str, dict[str, Any]] = {}
    for number, path in enumerate(paths, 1):
        for name, chain in load(path)["chains"].items():
            found.setdefault(name, chain | {"run": number})
    return list(found.values())


def kinds_section(paths: Sequence[Path], first_path: Path) -> str:
    """Figures and table of one half of the kinds, measured in several runs with different chains.

    ``first_path``: an attempt before these runs.
    """
    records, first = [load(path) for path in paths], load(first_path)["chains"]
    record, chains = records[-1], all_chains(paths)
    by_name = {chain["case"]: chain for chain in chains}
    both = [first[name] for name in by_name if name in first]
    kinds = kinds_of(record["split"])
    planned = {name for each in records for name in each["planned"]}
    values = {
        **record,
        "runs": [
            _run(number, *each) for number, each in enumerate(zip(records, paths, strict=True), 1)
        ],
        "last_run": len(paths) > 1,
        "last_count": sum(chain["run"] == len(paths) for chain in chains),
        "last_figures": figures([chain for chain in chains if chain["run"] == len(paths)]),
        "measured": len(chains),
        "planned_count": len(planned),
        "kinds": kinds,
        "measured_kinds": len({chain["kind"] for chain in chains}),
        "every": len(PROJECTS),
        "projects": ", ".join(PROJECTS[kind].project for kind in kinds),
        "figures": figures(chains),
        "first_file": first_path,
        "first_count": len(both),
        "first_figures": figures(both),
        "again_figures": figures([by_name[chain["case"]] for chain in both]),
        "tuned_count": sum("tuned" in version(chain) or _is_over_tuned(chain) for chain in chains),
        "drifted": [line for chain in chains if (line := _drift(chain))],
        "rows": [row(chain) for chain in chains],
        "null": _null(chains),
        "refused": [
            f"{c['case']} ({_number(ratio(c, 'replayed', FORCED))} if it ran)"
            for c in chains
            if any("more peak memory" in g["reason"] for g in _graphs(c))
        ],
        "wrong": [
            f"{c['case']} ({name}, {max(found['errors']):.1e})"
            for c in chains
            for name, found in c["methods"].items()
            if found.get("wrong")
        ],
        "undecided": [c["case"] for c in chains if not c["methods"].get(CHOSEN, {}).get("chosen")],
    }
    return render(__file__, values)


def _run(number: int, record: Row, path: Path) -> str:
    """One run of the benchmark, for the text."""
    day = record["date"][:10]
    return f"run {number}, {day}, {len(record['chains'])} chains ({path.name})"


def _drift(chain: Row) -> str:
    """The ratios over Inductor's version at the selection and after it, if they differ much."""
    after = ratio(chain, "replayed", CHOSEN)
    factors = [
        [float(x) for x in re.findall(r"([0-9.]+)x \([^)]*\) in CUDA graphs", text)]
        for graph in _graphs(chain)
        for text in (graph["text"], graph.get("blocks", "") if _is_over_tuned(chain) else "")
    ]
    if not is_chosen(chain) or len(_graphs(chain)) != 1 or after is None:
        return ""
    before = math.prod(x[0] for x in factors if x)
    if not any(factors) or abs(after / before - 1) <= 0.05:
        return ""
    return f"{chain['case']} ({before:.2f}, then {after:.2f})"


def _is_over_tuned(chain: Row) -> bool:
    """Whether the version with measured block sizes was faster than Inductor's own."""
    return any("over Inductor's kernels" in graph["text"] for graph in _graphs(chain))


def _graphs(chain: Row) -> Sequence[Row]:
    """Reports of the graphs of the choice."""
    found: Sequence[Row] = chain["methods"].get(CHOSEN, {}).get("graphs", ())
    return found


def _null(chains: Sequence[Row]) -> str:
    """The median ends of the intervals of torch.compile beside itself, by clock."""
    parts = []
    for clock, name in CLOCKS.items():
        rows = [c[clock]["compared"][CHOSEN] for c in chains if clock in c]
        low, high = (median(row[f"null_{end}"] for row in rows) for end in ("low", "high"))
        parts.append(f"{low:.3f} to {high:.3f} in {name}")
    return " and ".join(parts)


def ratio(chain: Row, clock: str, method: str, base: str = BASE) -> float | None:
    """Median ratio of the base to a method in each round; None if one is missing or wrong."""
    samples = chain.get(clock, {}).get("samples_s", {})
    if chain["methods"].get(method, {}).get("wrong") or not {method, base} <= samples.keys():
        return None
    return median(a / b for a, b in zip(samples[base], samples[method], strict=True))


def over_best(chain: Row, clock: str, method: str) -> float | None:
    """The lower of the ratios over both modes of torch.compile."""
    found = [ratio(chain, clock, method, base) for base in (BASE, AUTOTUNED)]
    return min(filter(None, found), default=None)


def is_chosen(chain: Row) -> bool:
    """Whether the backend runs another version than Inductor's own of a graph of the chain."""
    return any(graph["state"] in VERSIONS for graph in _graphs(chain))


def version(chain: Row) -> str:
    """What runs: the versions of the chain's graphs."""
    states = {graph["state"] for graph in _graphs(chain)}
    return ", ".join(name for state, name in VERSIONS.items() if state in states) or "Inductor's"


def is_faster(chain: Row, clock: str) -> bool:
    found = chain.get(clock, {}).get("compared", {}).get(CHOSEN, {})
    return is_chosen(chain) and found.get("verdict") == "faster"


def figures(chains: Sequence[Row]) -> list[list[str]]:
    """What was asked for, by both clocks, and whether it is met."""
    rows = [
        _mean("as deployed over the default mode", chains, lambda c, k: ratio(c, k, CHOSEN),
              OVER_DEFAULT),
        _mean("as deployed over the better of default and max-autotune", chains,
              lambda c, k: over_best(c, k, CHOSEN), OVER_BEST),
        _mean("the stitched version, whatever the times", chains,
              lambda c, k: ratio(c, k, FORCED), None),
    ]  # fmt: skip
    rows.append(_lowest(f"lowest as deployed, at least {LEAST}", chains))
    chosen = [chain for chain in chains if is_chosen(chain)]
    rows.append(_lowest(f"lowest where its own version runs, at least {LEAST}", chosen))
    rows.append(_share(f"chosen and faster, at least {FASTER_SHARE:.0%}", chains,
                       is_faster, FASTER_SHARE))  # fmt: skip
    rows.append(_share(f"stitched version at {FORCED_LEAST} or more, at least {FORCED_SHARE:.0%}",
                       chains, _is_no_loss, FORCED_SHARE))  # fmt: skip
    wrong = sum(bool(found.get("wrong")) for c in chains for found in c["methods"].values())
    rows.append(["versions with wrong results", str(wrong), "", _met([wrong == 0])])
    return rows


def _is_no_loss(chain: Row, clock: str) -> bool:
    return (ratio(chain, clock, FORCED) or 0.0) >= FORCED_LEAST


def _mean(
    title: str,
    chains: Sequence[Row],
    value: Callable[[Row, str], float | None],
    target: float | None,
) -> list[str]:
    every = [[x for c in chains if (x := value(c, clock))] for clock in CLOCKS]
    cells = [
        f"{geometric_mean(each):.3f} ({min(each):.2f} to {max(each):.2f}, {len(each)} chains)"
        if each else "–"
        for each in every
    ]  # fmt: skip
    if target is None:
        return [title, *cells, ""]
    met = _met(bool(each) and geometric_mean(each) >= target for each in every)
    return [f"{title}, geometric mean, at least {target:.2f}", *cells, met]


def _share(
    title: str, chains: Sequence[Row], holds: Callable[[Row, str], bool], target: float
) -> list[str]:
    counts = [sum(holds(c, clock) for c in chains) for clock in CLOCKS]
    cells = [f"{count} of {len(chains)}" for count in counts]
    return [title, *cells, _met(count >= target * len(chains) for count in counts)]


def _lowest(title: str, chains: Sequence[Row]) -> list[str]:
    found = [
        min(((x, c["case"]) for c in chains if (x := ratio(c, clock, CHOSEN))), default=(0.0, "–"))
        for clock in CLOCKS
    ]
    cells = [f"{value:.3f} ({name})" for value, name in found]
    return [title, *cells, _met(value >= LEAST for value, _ in found)]


def _met(holds: Any) -> str:
    return "yes" if all(holds) else "no"


def row(chain: Row) -> list[str]:
    """The cells of one chain."""
    chosen = chain["methods"].get(CHOSEN, {})
    base = chain.get("replayed", {}).get("samples_s", {}).get(BASE)
    runs = chain.get("replayed", {}).get("runs", 1)
    return [
        f"{chain['case']}{', trained' if chain['trained'] else ''}",
        chain["project"],
        f"{1e6 * median(base) / runs:.0f}" if base else "–",
        *(_interval(chain, clock) for clock in CLOCKS),
        _number(ratio(chain, "replayed", FORCED)),
        _number(ratio(chain, "replayed", AUTOTUNED)),
        version(chain),
        str(chain.get("run", "")),
        f"{chosen['until_chosen_s']:.0f}" if "until_chosen_s" in chosen else "–",
    ]


def _interval(chain: Row, clock: str) -> str:
    found = chain.get(clock, {}).get("compared", {}).get(CHOSEN)
    if found is None:
        return "–"
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
