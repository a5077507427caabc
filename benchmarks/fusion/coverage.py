"""Which operators of Core ATen and of Inductor stitched kernels compute.

    python -m benchmarks run fusion.coverage --out OUT

An operator with a lowering rule is fused; one of lists of tensors (``_foreach_*``) is fused over
lists if kernels over lists have a rule for it.  One that Inductor decomposes is traced on PyTorch's
operator samples (OpInfo) with Inductor's decompositions, and its parts are captured.  OUT is a JSON
with one row for each operator.  Runs on the CPU; nothing is compiled.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.unit.fusion.capture.op_samples import Sample, _samples
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.harness.markdown import PAGES, wrapped
from benchmarks.harness.result_file import results, save
from benchmarks.harness.template import render, render_page, source
from nostall.fusion.capture import capture, left_to_pytorch
from nostall.fusion.capture.lowering import RULES
from nostall.fusion.lists.calls import list_operators

PAGE = PAGES / "fusion-coverage.md"
RESULT = "coverage.json"
DTYPES = ("float32", "int64", "bool")
"""Samples have the first of these dtypes that an operator supports."""
SAMPLES = 3
SOURCES = ("Core ATen", "Inductor", "passes", "lists")
FUSED, PARTS, OVER_LISTS, LEFT_TO_INDUCTOR, NO_SAMPLE, REFUSED = (
    "fused",
    "fused as parts",
    "fused over lists",
    "left to Inductor",
    "no sample",
    "refused",
)
MEANINGS = {
    FUSED: "a lowering rule makes it operators of nostall",
    PARTS: "Inductor decomposes it, and all parts of a sample are fused",
    OVER_LISTS: "a kernel computes it for many tensors at once (`torch.compile` only)",
    LEFT_TO_INDUCTOR: "another kind of computation, or one that a library does",
    NO_SAMPLE: "Inductor decomposes it; PyTorch has no sample that calls it",
    REFUSED: "no rule yet",
}


def overloads() -> dict[str, Any]:
    """Functional overloads of Core ATen, of lists, and of Inductor, by name.

    Those of Inductor are of its decompositions and those that its passes put into graphs.

    Composite operators are left out: autograd decomposes them before any backend sees them.
    """
    from torch._inductor.decomposition import decompositions

    found = {*_core_aten(), *_of_lists(), *_of_passes(), *decompositions}
    return {str(each): each for each in sorted(found, key=str) if _is_seen_by_backends(each)}


def _core_aten() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            each = (getattr(packet, overload) for overload in packet.overloads())
            yield from (overload for overload in each if torch.Tag.core in overload.tags)


def _of_lists() -> Iterator[Any]:
    prefix = "aten::_foreach_"  # dir(torch.ops.aten) has only what was used
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name in sorted(names):
        if name.startswith(prefix) and not name.endswith("_"):
            packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _of_passes() -> Iterator[Any]:
    """Operators that Inductor defines for its own passes, such as the statistics of a softmax."""
    from torch._inductor import inductor_prims

    yield from (x for x in vars(inductor_prims).values() if isinstance(x, torch._ops.OpOverload))


def _is_seen_by_backends(overload: Any) -> bool:
    if not isinstance(overload, torch._ops.OpOverload):
        return False
    if overload.namespace not in ("aten", "prims") or overload._schema.is_mutable:
        return False
    is_out = any(argument.is_out for argument in overload._schema.arguments)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return not is_out and not overload.has_kernel_for_dispatch_key(composite)


def classify(name: str, sampled: Mapping[str, list[str]], decomposed: bool) -> tuple[str, str]:
    """The status of an overload and what it is due to.

    ``sampled``: for overloads with a sample, the reasons why parts of it are not fused.
    """
    if name in RULES:
        return FUSED, ""
    if name in list_operators():
        return OVER_LISTS, ""
    # Before the samples: those of matrix products are so small that Inductor multiplies and adds.
    if (reason := left_to_pytorch.reason(name)) != left_to_pytorch.NO_RULE:
        return LEFT_TO_INDUCTOR, reason
    if decomposed and name in sampled:
        reasons = sampled[name]
        return (PARTS, "") if not reasons else (LEFT_TO_INDUCTOR, "; ".join(reasons))
    return (NO_SAMPLE, "") if decomposed else (REFUSED, "")


def sample_reasons(names: list[str]) -> dict[str, list[str]]:
    """For each overload that a sample of the named OpInfos calls: why parts are not fused.

    The sample with the fewest such reasons counts, and of those the one with the fewest calls.
    """
    from torch._inductor.decomposition import select_decomp_table

    best: dict[str, tuple[int, int, list[str]]] = {}
    table = select_decomp_table()
    for sample in _all_samples(names):
        calls, parts = _trace(sample, {}), _trace(sample, table)
        if calls is None or parts is None:
            continue
        reasons = _reasons(parts)
        targets = Counter(str(node.target) for node in _calls(calls))
        for target in targets:
            found = (len(reasons), targets.total(), reasons)
            best[target] = min(best.get(target, found), found)
    return {target: reasons for target, (_, _, reasons) in best.items()}


def _all_samples(names: list[str]) -> Iterator[Sample]:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        name = ".".join(filter(None, (op.name, op.variant_test_name)))
        dtype = next((d for d in DTYPES if op.supports_dtype(getattr(torch, d), "cpu")), None)
        if name in names and dtype is not None:
            yield from itertools.islice(_samples(op, name, dtype, SAMPLES), SAMPLES)


def _trace(sample: Sample, decompositions: Any) -> GraphModule | None:
    try:
        trace = make_fx(
            sample.function, tracing_mode="fake", decomposition_table=dict(decompositions)
        )
        return trace(*sample.inputs)
    except Exception:  # fake tensors may fail in any way, such as on shapes that depend on values
        return None


def _calls(module: GraphModule) -> list[Any]:
    return [
        node
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target not in _MOVES
    ]


_MOVES = (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh_copy.default)


def _reasons(module: GraphModule) -> list[str]:
    try:
        report = capture(module).report
    except Exception as error:  # one sample must not hide the others
        return [f"{type(error).__name__} in the capture"]
    return sorted(
        {f"{target.removeprefix('aten.')}: {reason}" for reason, target in report.unsupported}
    )


def opinfo_names() -> list[str]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [".".join(filter(None, (op.name, op.variant_test_name))) for op in op_db]


def rows(sampled: Mapping[str, list[str]]) -> list[dict[str, str]]:
    """One row for each operator."""
    from torch._inductor.decomposition import decompositions

    found, passes = [], set(_of_passes())
    for name, overload in overloads().items():
        status, due = classify(name, sampled, overload in decompositions)
        source = "Core ATen" if torch.Tag.core in overload.tags else "Inductor"
        source = "lists" if name.startswith("aten._foreach_") else source
        source = "passes" if overload in passes else source
        found.append({"operator": name, "source": source, "status": status, "due": due})
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    sampled = sample_reasons(opinfo_names())
    kept = {name: sampled[name] for name in sorted(overloads()) if name in sampled}
    found = rows(kept)
    save(options.out, pytorch=torch.__version__.split("+")[0], sampled=kept, rows=found)
    print(Counter(row["status"] for row in found))


def text() -> str:
    """The page of the committed result."""
    record = source(results("fusion") / RESULT)
    counts = Counter((row["source"], row["status"]) for row in record["rows"])
    statuses = [
        {"status": status, "meaning": meaning, "counts": [counts[s, status] for s in SOURCES]}
        for status, meaning in MEANINGS.items()
    ]
    sections = "\n\n".join(filter(None, (_section(record["rows"], status) for status in MEANINGS)))
    values = {**record, "statuses": statuses, "sections": sections}
    return render_page(__file__, PAGE, values)


def _section(rows: list[dict[str, str]], status: str) -> str:
    """The operators of a status, as a list of names or by reason if there are reasons."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == status:
            name = f"`{row['operator'].removeprefix('aten.')}`"
            by_reason.setdefault(row["due"], []).append(name)
    title = f"{status[0].upper()}{status[1:]}"
    if not any(by_reason):
        names = wrapped(", ".join(by_reason.get("", [])))
        return names and render(__file__, {"title": title, "names": names}, "names")
    reasons = [{"why": why, "operators": names} for why, names in sorted(by_reason.items())]
    return render(__file__, {"title": title, "reasons": reasons}, "reasons")
