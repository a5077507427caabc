"""``docs/results/fusion-unseen.md``: generated chains, whole models and optimiser steps.

python -m benchmarks page fusion-unseen
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.fusion.chains.generated import KINDS
from benchmarks.fusion.unseen import whole_models
from benchmarks.fusion.unseen.measure import AUTOTUNED, EARLIER, INDUCTOR
from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.torch_compile import product_page
from nostall.core.files.atomic import write_atomically
from nostall.core.measurement import Comparison

PAGE = PAGES / "fusion-unseen.md"
FOLDER, MODELS = results("fusion"), results("torch_compile") / "user_models"
MODELLED, MEASURED = "explorer", "measured plans"
DEPLOYED_TARGET, LEAST_RATIO, SHARE_TARGET = 1.5, 0.90, 0.95
AUTOTUNED_TARGET, AUTOTUNED_COUNT = 1.3, 30

Row = Mapping[str, Any]


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
    modelled = [r for c in chains.values() if (r := ratio(c, MODELLED)) is not None]
    measured = [r for c in chains.values() if (r := ratio(c, MEASURED)) is not None]
    what_runs = geometric_mean(deployed(c) for c in chains.values())
    rows = [
        [
            f"what runs over torch.compile, geometric mean, at least {DEPLOYED_TARGET}",
            f"{what_runs:.3f}",
            _yes(what_runs >= DEPLOYED_TARGET),
        ]
    ]
    for name, found in (("modelled best plans", modelled), ("fastest measured plans", measured)):
        if not found:
            continue
        share = sum(r >= 0.995 for r in found) / len(found)
        rows += [
            [f"{name}: geometric mean", f"{geometric_mean(found):.2f}", "no target"],
            [
                f"{name}: chains at 1.00 or more (rounded), at least {SHARE_TARGET:.0%}",
                f"{share:.0%}",
                _yes(share >= SHARE_TARGET),
            ],
            [
                f"{name}: slowest chain, at least {LEAST_RATIO}",
                f"{min(found):.2f}",
                _yes(min(found) >= LEAST_RATIO),
            ],
        ]
    apart = [chain["wrong"] for chain in chains.values() if chain["wrong"]]
    wrong = sum(INDUCTOR not in versions for versions in apart)
    return [
        *rows,
        ["chains with a wrong result that torch.compile has right", str(wrong), _yes(wrong == 0)],
        [
            "chains further from fp64 than allowed with torch.compile, too (what runs counts as 1)",
            str(len(apart) - wrong),
            "no target",
        ],
    ]


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "no"


def by_kind(chains: Mapping[str, Row]) -> str:
    """A table with a row for each kind of chain."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    ordered = sorted(KINDS, key=len, reverse=True)
    for name, chain in chains.items():
        kinds[next(kind for kind in ordered if name.startswith(f"{kind} "))].append(chain)
    rows = []
    for kind, members in sorted(kinds.items()):
        cells = [kind, str(len(members))]
        for version in (MODELLED, MEASURED):
            found = [r for c in members if (r := ratio(c, version)) is not None]
            cells.append(f"{geometric_mean(found):.2f} ({min(found):.2f})" if found else "–")
        rows.append([*cells, f"{geometric_mean(deployed(c) for c in members):.2f}"])
    head = ["kind", "chains", "modelled best plans (slowest)", "fastest measured plans (slowest)"]
    return table([*head, "what runs"], rows)


def slow_chains(chains: Mapping[str, Row]) -> str:
    """A table of the chains whose modelled best plans are slower than torch.compile's kernels."""
    rows = []
    for name, chain in chains.items():
        found = ratio(chain, MODELLED)
        if found is not None and found < 0.995:
            tuned = ratio(chain, MEASURED)
            plans = "; ".join(chain["versions"][MODELLED]["plans"])
            cells = [f"{chain['us'][INDUCTOR]:.1f}", f"{found:.2f}"]
            rows.append((found, [name, *cells, f"{tuned:.2f}" if tuned else "–", plans]))
    head = ["chain", "torch.compile us", "modelled best", "fastest measured", "modelled best plans"]
    return table(head, [cells for _, cells in sorted(rows)]) if rows else "None."


def named_section(path: Path, plans_path: Path) -> list[str]:
    """The named chains with the plans of an earlier commit and with today's, interleaved."""
    record, plans = load(path), load(plans_path)
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
        rows.append([*cells, "; ".join(chain["versions"][EARLIER]["plans"])])
    text = (
        f"Of the 41 named chains, {len(plans['same_source'])} have the same kernels, source for "
        f"source, as at commit {plans['commit']}, where they were measured last. The others got "
        "other modelled best plans. Both run interleaved in one process; a ratio is the earlier "
        f"plan's time over today's; {len(rows)} of the {len(plans['chains'])} are measured. "
        f"Fastest measured plans slower beyond the interval: {slower}."
    )
    head = ["chain", "earlier plan us", "modelled best", "fastest measured", "earlier plans"]
    return [_source(path, record), wrapped(text), table(head, rows)]


def autotuned_section(path: Path) -> list[str]:
    """Chains of the test half beside Inductor's mode max-autotune-no-cudagraphs."""
    record = load(path)
    rows: list[list[str]] = []
    ratios: list[float] = []
    over_both: list[float] = []
    for name, chain in record["chains"].items():
        stitched = ratio(chain, MEASURED, AUTOTUNED)
        default = ratio(chain, AUTOTUNED)
        if stitched is None or default is None:
            rows.append([name, "–", "–", "–", chain["failures"].get(AUTOTUNED, "not measured")])
            continue
        ratios.append(deployed(chain, AUTOTUNED))
        faster = INDUCTOR if chain["us"][INDUCTOR] < chain["us"][AUTOTUNED] else AUTOTUNED
        over_both.append(deployed(chain, faster))
        plans = "; ".join(chain["versions"][MEASURED]["plans"])
        rows.append(
            [name, f"{chain['us'][AUTOTUNED]:.1f}", f"{default:.2f}", f"{stitched:.2f}", plans]
        )
    mean = geometric_mean(ratios)
    ended = "; the time for the others ended" if len(rows) < AUTOTUNED_COUNT else ""
    text = (
        f"{len(rows)} of the first {AUTOTUNED_COUNT} chains of the test half, taken in turn from "
        f"every kind{ended}. A ratio is max-autotune's median time over "
        "that of the fastest measured plans, interleaved. What runs in that mode is the stitched "
        "version where it is measured to be faster: "
        f"{mean:.2f} in the geometric mean of {len(ratios)} chains (target {AUTOTUNED_TARGET}: "
        f"{_yes(mean >= AUTOTUNED_TARGET)}). Over the faster of max-autotune and torch.compile's "
        f"defaults it is {geometric_mean(over_both):.2f}."
    )
    head = ["chain", "max-autotune us", "its gain over the defaults", "stitched", "plans"]
    return [_source(path, record), wrapped(text), table(head, rows)]


def _source(path: Path, record: Row) -> str:
    cards = {f"{c['gpu']}, PyTorch {c['torch']}" for c in record["chains"].values()}
    return wrapped(f"Measured on {'; '.join(sorted(cards))}, {record['date'][:10]} ({link(path)}).")


def chain_sections(name: str, title: str, path: Path, about: str) -> list[str]:
    """The sections of one set of chains."""
    record = load(path)
    chains = record["chains"]
    changed = _existing(FOLDER / f"unseen_{name}_changed.json")
    again = load(changed)["chains"] if changed else {}
    chains = {**chains, **again}
    texts = [about, f"{len(chains)} chains."]
    if changed:
        texts.append(
            f"{len(again)} of them were measured last ({link(changed)}): by then kernels compute "
            "values again, a rule that was written after kinds of this half had been seen to be "
            "slow. The first sentence of this page is of the first measurement of all "
            f"{len(record['chains'])} chains, "
            f"{geometric_mean(map(deployed, record['chains'].values())):.2f}."
        )
    parts = [f"## {title}", wrapped(" ".join(texts)), _source(path, record)]
    parts.append(table(["target or figure", "result", "met"], summary(chains)))
    if name != "reported":
        parts += ["### By kind of chain", by_kind(chains)]
    return [*parts, "### Chains on which the modelled best plans are slower", slow_chains(chains)]


_SETS = (
    (
        "test",
        "The test half",
        "Chains to which no parameter was fitted.",
    ),
    (
        "reported",
        "Reported chains",
        "Chains of users on which the stitched kernels were slower on 2026-11-26.",
    ),
    (
        "train",
        "The train half",
        "The parameters of the cost model are fitted to these chains. Measured before that fit and "
        "before kernels were merged.",
    ),
)


def text() -> str:
    """The whole page from the committed files."""
    parts = [
        wrapped(
            "`python -m benchmarks run fusion.unseen_chains` times generated chains beside "
            "torch.compile's defaults: CUDA graphs over copies of the inputs that are larger than "
            "L2, interleaved, torch.compile twice. A ratio is torch.compile's median time over the "
            "stitched kernels'. What runs is the stitched version where it is measured to be "
            "faster, and torch.compile's elsewhere, as the backend selects; the same samples "
            "decide and are reported. A chain counts as slower below 0.995. What plans "
            "are called: [names of plans](../explanation/codegen.md#names-of-plans)."
        )
    ]
    for name, title, about in _SETS:
        path = _existing(FOLDER / f"unseen_{name}.json")
        parts += chain_sections(name, title, path, about) if path else []
    named = _existing(FOLDER / "unseen_named.json")
    if named:
        plans = FOLDER / "plans_80153b1a.json"
        parts += ["## Named chains beside an earlier commit", *named_section(named, plans)]
    autotuned = _existing(FOLDER / "unseen_autotuned.json")
    if autotuned:
        parts += ["## Test chains over max-autotune", *autotuned_section(autotuned)]
    parts += whole_models.sections(FOLDER, MODELS)
    parts += product_page.sections(results("torch_compile") / "product_kernels.json.gz")
    parts += ["## What is not done or not measured", *map(wrapped, _MISSING)]
    return page("Fusion of unseen chains", "python -m benchmarks page fusion-unseen", parts)


_MISSING: Sequence[str] = (
    "Whole models: the column with the date tells which code was measured. From 22:20 on "
    "2026-11-27 (UTC) softmax, losses and rotary embeddings of whole models are in kernels: "
    "Inductor replaces the maximum and the sum of a softmax by one call, which nostall did not "
    "know, and it did not read halves of heads of a projection. From 2026-11-29 on attention that "
    "PyTorch decomposes is [given back to fused kernels](../explanation/torch-compile.md#attention)"
    ". The other models were not measured again. The training steps of DiT and with LoRA were "
    "measured once more, but had not chosen a version within 150 seconds beside another process "
    "on the GPU, so their earlier results stand.",
    "Rotary embeddings of projections that are scaled or normalised before they are viewed as "
    "heads, and gradients of interleaved halves, have kernels that no GPU measured in a model.",
    "Prologues of matrix products: right operands, operands that two products read or that the "
    "backward pass needs stay apart. Batched products and products whose parts are read: nostall "
    "has no kernel that contains one.",
    "Where attention is fused already, both targets are missed. Inductor's own kernels take little "
    "of the time of Llama's and Qwen's forward passes (column *share*), and products, attention "
    "and copies the rest; there stitched kernels gain two per cent at most. In T5's training step "
    "they gain a third of the GPU's time, because Inductor adds up the gradient of the position "
    "bias inside of the backward pass of the softmax (5.5 of 16.3 ms in two launches).",
    "Optimiser steps: SGD, Adam, clipping alone, clipping with AdamW as one graph, a list of 147 "
    "tensors and bf16 parameters with a copy in fp32 were not measured on a GPU with these "
    "kernels; the time was up.",
    "Known slow kinds. RMS norms with a residual are slower for rows of 151,936 elements: two "
    "launches read each row twice, as Inductor's loop does; why they are slower was not profiled. "
    "The modelled best plan of the cross-entropy of 32,000 classes is slower than that of the "
    "earlier commit (0.62); the fastest measured one is not. Norms with scales for blocks of "
    "which the length is no power of two, and normalised values in fp32 whose parts are read, "
    "stay two kernels.",
)


def _existing(path: Path) -> Path | None:
    """The file, or its compressed form; None if there is neither."""
    compressed = path.with_name(f"{path.name}.gz")
    return path if path.exists() else compressed if compressed.exists() else None


def write() -> None:
    write_atomically(PAGE, text().encode())
