"""``docs/results/fusion-unseen.md``: generated chains, whole models and optimiser steps.

python -m benchmarks page fusion-unseen
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.fusion.chains.generated import KINDS
from benchmarks.fusion.unseen import whole_models
from benchmarks.fusion.unseen.kinds_page import kinds_section
from benchmarks.fusion.unseen.measure import AUTOTUNED, EARLIER, INDUCTOR
from benchmarks.harness.markdown import PAGES, link, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render, render_page
from benchmarks.torch_compile import product_page
from nostall.core.measurement import Comparison

PAGE = PAGES / "fusion-unseen.md"
FOLDER, MODELS = results("fusion"), results("torch_compile") / "user_models"
MODELLED, MEASURED = "explorer", "measured plans"
DEPLOYED_TARGET, LEAST_RATIO, SHARE_TARGET = 1.5, 0.90, 0.95
AUTOTUNED_TARGET, AUTOTUNED_COUNT = 1.3, 30

Row = Mapping[str, Any]
_SETS = (
    ("test", "The test half", "Chains to which no parameter was fitted."),
    ("reported", "Reported chains",
     "Chains of users on which the stitched kernels were slower on 2026-11-26."),
    ("train", "The train half",
     "The parameters of the cost model are fitted to these chains. Measured before that fit and "
     "before kernels were merged."),
)  # fmt: skip
"""Name in the file, title and description of the sets of chains."""


def text() -> str:
    """The whole page from the committed files."""
    values = {
        "sets": "\n\n".join(chain_section(*one) for one in _SETS),
        "named": named_section(_file("unseen_named"), FOLDER / "plans_80153b1a.json"),
        "autotuned": "\n\n".join(autotuned_section(_file("unseen_autotuned"))),
        "kinds": kinds_section(kinds_files(), _file("unseen_kinds_first")),
        "models": "\n\n".join(whole_models.models_section(MODELS)),
        "optimizer": whole_models.optimizer_section(FOLDER / "optimizer_steps.json"),
        "list_plans": whole_models.plans_section(FOLDER / "list_plans.json"),
        "products": product_page.section(
            results("torch_compile") / "product_kernels.json.gz",
            results("torch_compile") / "product_reductions.json.gz",
        ),
    }
    return render_page(__file__, PAGE, values)


def kinds_files() -> list[Path]:
    """The runs on held-out kinds after the first attempt, in order; each has other chains."""
    names = ("unseen_kinds.json.gz", "unseen_kinds_rest.json.gz")
    return [FOLDER / name for name in names if (FOLDER / name).exists()]


def _file(name: str) -> Path:
    """A result file, which may be compressed."""
    return next(FOLDER.glob(f"{name}.json*"))


def chain_section(name: str, title: str, about: str) -> str:
    """The section of one set of chains."""
    path = _file(f"unseen_{name}")
    record = load(path)
    first = chains = record["chains"]
    changed, file = "", FOLDER / f"unseen_{name}_changed.json"
    if file.exists():
        again = load(file)["chains"]
        chains = {**first, **again}
        values = {"again": again, "file": file, "first": list(map(deployed, first.values()))}
        changed = render(__file__, values, "changed")
    values = {
        "title": title,
        "about": about,
        "chains": len(chains),
        "changed": changed,
        "source": _source(path, record),
        "summary": summary(chains),
        "by_kind": "" if name == "reported" else by_kind(chains),
        "slow": slow_chains(chains),
    }
    return render(__file__, values, "set")


def ratio(chain: Row, version: str, base: str = INDUCTOR) -> float | None:
    """Median time of ``base`` over that of a version; None if one of them is missing."""
    us = chain["us"]
    if version not in us or base not in us or version in chain["wrong"]:
        return None
    return float(us[base] / us[version])


def comparison(chain: Row, base: str, version: str) -> Comparison:
    """The version's times beside those of ``base``, with torch.compile's two runs as the null."""
    samples = chain["samples_us"]
    null = samples[f"{INDUCTOR} again"] if base == INDUCTOR else samples[base]
    return Comparison.from_samples(samples[base], samples[version], null, kind="measured")


def deployed(chain: Row, base: str = INDUCTOR) -> float:
    """The ratio of what runs: the stitched version if it is measured to be faster than ``base``."""
    version = MEASURED if MEASURED in chain["us"] else MODELLED
    found = ratio(chain, version, base)
    if found is None or comparison(chain, base, version).verdict != "faster":
        return 1.0
    return found


def summary(chains: Mapping[str, Row]) -> list[list[str]]:
    """The figures of a set beside the targets."""
    what_runs = geometric_mean(deployed(c) for c in chains.values())
    rows = [
        _target(
            f"what runs over torch.compile, geometric mean, at least {DEPLOYED_TARGET}",
            f"{what_runs:.3f}",
            what_runs >= DEPLOYED_TARGET,
        )
    ]
    for name, version in (("modelled best plans", MODELLED), ("fastest measured plans", MEASURED)):
        found = _ratios(chains.values(), version)
        if not found:
            continue
        share = sum(r >= 0.995 for r in found) / len(found)
        rows += [
            _target(f"{name}: geometric mean", f"{geometric_mean(found):.2f}"),
            _target(
                f"{name}: chains at 1.00 or more (rounded), at least {SHARE_TARGET:.0%}",
                f"{share:.0%}",
                share >= SHARE_TARGET,
            ),
            _target(
                f"{name}: slowest chain, at least {LEAST_RATIO}",
                f"{min(found):.2f}",
                min(found) >= LEAST_RATIO,
            ),
        ]
    apart = [chain["wrong"] for chain in chains.values() if chain["wrong"]]
    wrong = sum(INDUCTOR not in versions for versions in apart)
    others = "chains further from fp64 than allowed with torch.compile, too (what runs counts as 1)"
    return [
        *rows,
        _target("chains with a wrong result that torch.compile has right", str(wrong), wrong == 0),
        _target(others, str(len(apart) - wrong)),
    ]


def _target(name: str, result: str, is_met: bool | None = None) -> list[str]:
    return [name, result, "no target" if is_met is None else "yes" if is_met else "no"]


def _ratios(chains: Iterable[Row], version: str) -> list[float]:
    return [found for chain in chains if (found := ratio(chain, version)) is not None]


def by_kind(chains: Mapping[str, Row]) -> str:
    """A table with a row for each kind of chain."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    ordered = sorted(KINDS, key=len, reverse=True)
    for name, chain in chains.items():
        kinds[next(kind for kind in ordered if name.startswith(f"{kind} "))].append(chain)
    rows = []
    for kind, members in sorted(kinds.items()):
        cells: list[str | int] = [kind, len(members)]
        for version in (MODELLED, MEASURED):
            found = _ratios(members, version)
            cells.append(f"{geometric_mean(found):.2f} ({min(found):.2f})" if found else "–")
        rows.append([*cells, f"{geometric_mean(deployed(c) for c in members):.2f}"])
    return render(__file__, {"rows": rows}, "by kind")


def slow_chains(chains: Mapping[str, Row]) -> str:
    """A table of the chains whose modelled best plans are slower than torch.compile's kernels."""
    rows = [
        {
            "name": name,
            "inductor_us": chain["us"][INDUCTOR],
            "modelled": found,
            "measured": ratio(chain, MEASURED),
            "plans": _plans(chain, MODELLED),
        }
        for name, chain in chains.items()
        if (found := ratio(chain, MODELLED)) is not None and found < 0.995
    ]
    rows.sort(key=itemgetter("modelled", "name"))
    return render(__file__, {"rows": rows}, "slow") if rows else "None."


def _plans(chain: Row, version: str) -> str:
    return "; ".join(chain["versions"][version]["plans"])


def named_section(path: Path, plans_path: Path) -> str:
    """The named chains with the plans of an earlier commit and with today's, interleaved."""
    record = load(path)
    rows, slower = [], 0
    for name, chain in record["chains"].items():
        if EARLIER not in chain["samples_us"]:
            continue
        cells = [name, f"{chain['us'][EARLIER]:.1f}"]
        for version in (MODELLED, MEASURED):
            if version not in chain["samples_us"]:
                cells.append("–")
                continue
            found = comparison(chain, EARLIER, version)
            slower += version == MEASURED and found.high < 1
            cells.append(f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]")
        rows.append([*cells, _plans(chain, EARLIER)])
    values = {
        "source": _source(path, record),
        "plans": load(plans_path),
        "rows": rows,
        "slower": slower,
    }
    return render(__file__, values, "named")


def autotuned_section(path: Path) -> list[str]:
    """Chains of the test half beside Inductor's mode max-autotune-no-cudagraphs."""
    record = load(path)
    rows: list[Row] = []
    ratios: list[float] = []
    over_both: list[float] = []
    for name, chain in record["chains"].items():
        stitched = ratio(chain, MEASURED, AUTOTUNED)
        default = ratio(chain, AUTOTUNED)
        row = {"name": name, "us": None, "default": None, "stitched": None}
        if stitched is None or default is None:
            rows.append({**row, "plans": chain["failures"].get(AUTOTUNED, "not measured")})
            continue
        ratios.append(deployed(chain, AUTOTUNED))
        faster = INDUCTOR if chain["us"][INDUCTOR] < chain["us"][AUTOTUNED] else AUTOTUNED
        over_both.append(deployed(chain, faster))
        row |= {"us": chain["us"][AUTOTUNED], "default": default, "stitched": stitched}
        rows.append({**row, "plans": _plans(chain, MEASURED)})
    values = {
        "source": _source(path, record),
        "rows": rows,
        "planned": AUTOTUNED_COUNT,
        "ended": "; the time for the others ended" if len(rows) < AUTOTUNED_COUNT else "",
        "ratios": ratios,
        "target": AUTOTUNED_TARGET,
        "met": geometric_mean(ratios) >= AUTOTUNED_TARGET,
        "over_both": over_both,
    }
    return [render(__file__, values, "autotuned")]


def _source(path: Path, record: Row) -> str:
    cards = {f"{c['gpu']}, PyTorch {c['torch']}" for c in record["chains"].values()}
    return wrapped(f"Measured on {'; '.join(sorted(cards))}, {record['date'][:10]} ({link(path)}).")
