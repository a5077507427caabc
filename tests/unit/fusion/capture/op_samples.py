"""Checks of captured graphs and generated kernels on PyTorch's operator samples (OpInfo).

    python -m tests.unit.fusion.capture.op_samples FOLDER EACH PART PARTS

takes ``EACH`` samples of each dtype of each ``PARTS``-th operator, from operator ``PART`` on. It
compares graphs with PyTorch and kernels with graphs, and prints JSON. Kernels run on a GPU or, if
there is none, in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools.interpreters.reference import interpret
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.fusion.capture import CapturedGraph, capture
from nostall.fusion.capture.trace import decompositions

UNSUPPORTED_PREFIXES = (
    *("fft", "linalg", "signal", "sparse", "special", "masked", "_refs", "ops", "jiterator"),
    *("svd", "lu", "pca", "stft", "istft", "cholesky", "geqrf", "ormqr", "triangular_solve"),
    *("nn.functional.conv", "nn.functional.interpolate", "nn.functional.grid"),
    *("nn.functional.max_", "nn.functional.fractional", "nn.functional.ctc_loss"),
)
"""Prefixes of operators that kernels never contain; not traced, to save time."""
REFERENCE = ("float64", "int64", "uint8", "bool")
"""Dtypes in which graphs are compared with PyTorch; fp64 because the reference computes in it."""
INTERPRETED = ("float32", "float16", "int64", "int32", "uint8", "bool")
COMPILED = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
MAX_SAMPLES = 60
"""Samples of one operator that are generated, to take some from both ends."""
TOLERANCES = {"float64": (1e-7, 1e-9), "float32": (2e-5, 1e-6)}
"""Relative and absolute tolerance by dtype of PyTorch's result."""


@dataclass(frozen=True)
class Sample:
    """A call of an operator with fixed arguments, as a function of its tensors."""

    operator: str
    dtype: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]

    def __str__(self) -> str:
        return f"{self.operator} of {self.dtype} {[tuple(x.shape) for x in self.inputs]}"


def operators() -> dict[str, Any]:
    """PyTorch's descriptions of operators (OpInfo), by operator name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}
    return {name: op for name, op in named.items() if not name.startswith(UNSUPPORTED_PREFIXES)}


def samples(names: Collection[str], dtypes: Sequence[str], each: int) -> Iterator[Sample]:
    """The first and last samples, ``each`` in all, of each operator and dtype."""
    for name, op in operators().items():
        if name in names:
            for dtype in dtypes:
                if op.supports_dtype(getattr(torch, dtype), "cpu"):
                    yield from _samples(op, name, dtype, each)


def _samples(op: Any, name: str, dtype: str, each: int) -> Iterator[Sample]:
    torch.manual_seed(0)
    generated = op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False)
    selected = list(itertools.islice(generated, MAX_SAMPLES))
    if len(selected) > each:
        selected = [*selected[: each - each // 2], *selected[len(selected) - each // 2 :]]
    for sample in selected:
        leaves, tree = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = tuple(leaves[at].detach() for at in places)
        if inputs and all(x.layout == torch.strided for x in inputs):
            yield Sample(name, dtype, _function_of_tensors(op.op, leaves, tree, places), inputs)


def _function_of_tensors(
    function: Callable[..., Any], leaves: list[Any], tree: Any, places: Sequence[int]
) -> Callable[..., Any]:
    def call(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            filled[at] = tensor
        positional, named = tree_unflatten(filled, tree)
        return function(*positional, **named)

    return call


@dataclass(frozen=True)
class CapturedSample:
    """A sample of which all calls can be fused; ``outputs`` are those of its FX graph."""

    module: GraphModule
    captured: CapturedGraph
    outputs: tuple[FxNode, ...]

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a sample in the order of the graph's inputs."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, tensors, strict=True)
        by_index = {self.captured.values[node]: x for node, x in pairs}
        return [by_index[index] for index in self.captured.graph.inputs]


def capture_sample(sample: Sample) -> CapturedSample | str:
    """Capture a sample; returns the reason if a call of it cannot be fused."""
    try:
        trace = make_fx(sample.function, tracing_mode="fake", decomposition_table=decompositions())
        module = trace(*sample.inputs)
    except (
        Exception
    ) as error:  # fake tensors may fail in any way, such as on shapes that depend on values
        return f"not traced: {type(error).__name__}"
    if module.graph.find_nodes(op="get_attr"):
        return "a tensor of its own"
    captured = capture(module)
    if captured.report.unsupported:
        return "stays as it is: " + min(reason for reason, _ in captured.report.unsupported)
    if not captured.graph.operators:
        return "nothing to compute"
    (output,) = module.graph.find_nodes(op="output")
    flat, _ = tree_flatten(output.args[0])
    return CapturedSample(
        module, captured, tuple(node for node in flat if isinstance(node, FxNode))
    )


def graph_errors(sample: Sample, captured: CapturedSample) -> list[str]:
    """Differences between the interpreted graph and PyTorch."""
    flat, _ = tree_flatten(sample.function(*(x.clone() for x in sample.inputs)))
    expected = [value for value in flat if isinstance(value, Tensor)]
    graph, values = captured.captured.graph, captured.captured.values
    results = interpret(graph, [x.numpy() for x in captured.inputs(sample.inputs)])
    result_of = dict(zip(graph.outputs, results, strict=True))
    errors = []
    for node, value in zip(captured.outputs, expected, strict=True):
        index = values[node]
        if index not in result_of:
            continue  # an input, or a view of one
        output, dtype = graph[index], str(value.dtype).removeprefix("torch.")
        if (output.dtype, output.shape) != (dtype, tuple(value.shape)):
            errors.append(f"{sample}: {output}, PyTorch gives {dtype} {tuple(value.shape)}")
            continue
        result = torch.tensor(result_of[index]).to(value.dtype)
        default = (0.0, 0.0) if dtype[0] in "iub" else (2e-2, 1e-3)
        rtol, atol = TOLERANCES.get(dtype, default)
        if not torch.allclose(result, value, rtol=rtol, atol=atol, equal_nan=True):
            errors.append(f"{sample}: {output} has other values than PyTorch's")
    return errors


def kernel_errors(sample: Sample, captured: CapturedSample, folder: Path, device: str) -> list[str]:
    """Differences between the generated kernels of a sample and its graph."""
    from nostall.fusion.codegen.runtime.stitched_graph import stitch
    from tests.unit.fusion.codegen.accuracy import (
        OutOfBoundsWrite,
        find_value_errors,
        with_guard_bands,
    )

    stitched = stitch(captured.captured.graph, folder=folder)
    inputs = [x.to(device) for x in captured.inputs(sample.inputs)]
    try:
        outputs = with_guard_bands(stitched)(*inputs)
    except OutOfBoundsWrite as stray:
        return [f"{sample}: {stray}"]
    except Exception as error:  # one failing sample must not hide the others
        return [f"{sample}: {type(error).__name__}: {error}"]
    return [f"{sample}: {text}" for text in find_value_errors(stitched, inputs, outputs)]


@dataclass
class Summary:
    """Outcome of a check of many samples."""

    counts: Counter[str]
    """Samples that were checked, and samples that were not, by reason."""
    operators: set[str]
    """Operators with a checked sample."""
    errors: list[str]


def check_graphs(samples: Iterator[Sample]) -> Summary:
    """Compare graphs of samples with PyTorch."""
    return _check(samples, graph_errors, "graphs")


def check_kernels(samples: Iterator[Sample], folder: Path, device: str) -> Summary:
    """Compare kernels of samples with their graphs."""

    def errors(sample: Sample, captured: CapturedSample) -> list[str] | str:
        if any(node.dtype == "float64" for node in captured.captured.graph):
            return "fp64, which kernels do not compute"
        return kernel_errors(sample, captured, folder, device)

    return _check(samples, errors, "kernels")


def _check(
    samples: Iterator[Sample],
    check: Callable[[Sample, CapturedSample], list[str] | str],
    what: str,
) -> Summary:
    summary = Summary(Counter(), set(), [])
    for sample in samples:
        captured = capture_sample(sample)
        errors = captured if isinstance(captured, str) else check(sample, captured)
        if isinstance(errors, str):
            summary.counts[errors] += 1
            continue
        summary.counts[what] += 1
        summary.operators.add(sample.operator)
        summary.errors += errors
    return summary


def main() -> None:
    from tools.interpreters.triton_interpreter import prepare

    folder, each, part, parts = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    has_gpu = torch.cuda.is_available()
    warnings.simplefilter("ignore")
    if not has_gpu:
        prepare()
    names = set(list(operators())[part::parts])
    kernels = samples(names, COMPILED if has_gpu else INTERPRETED, each)
    summaries = [
        check_graphs(samples(names, REFERENCE, each)),
        check_kernels(kernels, folder, "cuda" if has_gpu else "cpu"),
    ]
    print(
        json.dumps(
            {
                "seen": sum((summary.counts for summary in summaries), Counter()),
                "operators": [sorted(summary.operators) for summary in summaries],
                "wrong": [text for summary in summaries for text in summary.errors],
            }
        )
    )


if __name__ == "__main__":
    main()
