"""PyTorch's own samples of operators (OpInfo), as graphs and as kernels.

``python -m tests.unit.fusion.capture.op_samples FOLDER EACH PART PARTS`` takes ``EACH`` samples of every
operator and dtype, of every ``PARTS``-th operator: graphs are compared with PyTorch, kernels with
graphs, on a GPU or, where there is none, in Triton's interpreter.  It prints JSON.
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
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.fusion.capture import CapturedGraph, capture
from nostall.fusion.capture.trace import decompositions
from nostall.fusion.testing.reference import interpret

OUTSIDE = (
    *("fft", "linalg", "signal", "sparse", "special", "masked", "_refs", "ops", "jiterator"),
    *("svd", "lu", "pca", "stft", "istft", "cholesky", "geqrf", "ormqr", "triangular_solve"),
    *("nn.functional.conv", "nn.functional.interpolate", "nn.functional.grid"),
    *("nn.functional.max_", "nn.functional.fractional", "nn.functional.ctc_loss"),
)
"""How operators begin that are never part of a kernel: not traced, for the sake of time."""
REFERENCE = ("float64", "int64", "uint8", "bool")
"""Dtypes in which a graph is compared with PyTorch: fp64 because graphs are interpreted in it."""
INTERPRETED = ("float32", "float16", "int64", "int32", "uint8", "bool")
COMPILED = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
MOST = 60
"""Samples of one operator that are drawn, to take some from both ends."""
CLOSE = {"float64": (1e-7, 1e-9), "float32": (2e-5, 1e-6)}
"""Relative and absolute; float32 is what PyTorch makes of integers."""


@dataclass(frozen=True)
class Sample:
    """A call of an operator; ``inputs`` are its tensors, everything else is known."""

    operator: str
    dtype: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]

    def __str__(self) -> str:
        return f"{self.operator} of {self.dtype} {[tuple(x.shape) for x in self.inputs]}"


def operators() -> dict[str, Any]:
    """PyTorch's descriptions of operators, by their names and the names of their variants."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}
    return {name: op for name, op in named.items() if not name.startswith(OUTSIDE)}


def samples(names: Collection[str], dtypes: Sequence[str], each: int) -> Iterator[Sample]:
    """``each`` samples of operators of these names and of every dtype, the first and last ones."""
    for name, op in operators().items():
        if name in names:
            for dtype in dtypes:
                if op.supports_dtype(getattr(torch, dtype), "cpu"):
                    yield from _samples(op, name, dtype, each)


def _samples(op: Any, name: str, dtype: str, each: int) -> Iterator[Sample]:
    torch.manual_seed(0)
    drawn = op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False)
    every = list(itertools.islice(drawn, MOST))
    if len(every) > each:
        every = [*every[: each - each // 2], *every[len(every) - each // 2 :]]
    for sample in every:
        leaves, tree = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = tuple(leaves[at].detach() for at in places)
        if inputs and all(x.layout == torch.strided for x in inputs):
            yield Sample(name, dtype, _called(op.op, leaves, tree, places), inputs)


def _called(
    function: Callable[..., Any], leaves: list[Any], tree: Any, places: Sequence[int]
) -> Callable[..., Any]:
    def call(*tensors: Tensor) -> Any:
        every = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            every[at] = tensor
        positional, named = tree_unflatten(every, tree)
        return function(*positional, **named)

    return call


@dataclass(frozen=True)
class Taken:
    """A sample all of which is operators of ours; ``outputs`` are those of its FX graph."""

    module: GraphModule
    captured: CapturedGraph
    outputs: tuple[FxNode, ...]

    def inputs(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What the graph reads, in its order."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        known = {self.captured.values[node]: x for node, x in zip(placeholders, given, strict=True)}
        return [known[index] for index in self.captured.graph.inputs]


def taken(sample: Sample) -> Taken | str:
    """The sample as a graph, or why some of it is none."""
    try:
        trace = make_fx(sample.function, tracing_mode="fake", decomposition_table=decompositions())
        module = trace(*sample.inputs)
    except Exception as error:  # whatever fake tensors cannot do: a value that decides a shape
        return f"not traced: {type(error).__name__}"
    if module.graph.find_nodes(op="get_attr"):
        return "a tensor of its own"
    captured = capture(module)
    if captured.report.unsupported:
        return "stays as it is: " + min(why for why, _ in captured.report.unsupported)
    if not captured.graph.operators:
        return "nothing to compute"
    (output,) = module.graph.find_nodes(op="output")
    flat, _ = tree_flatten(output.args[0])
    return Taken(module, captured, tuple(node for node in flat if isinstance(node, FxNode)))


def unlike_pytorch(sample: Sample, found: Taken) -> list[str]:
    """Where the graph means something else than PyTorch does."""
    expected, _ = tree_flatten(sample.function(*(x.clone() for x in sample.inputs)))
    wanted = [value for value in expected if isinstance(value, Tensor)]
    graph, values = found.captured.graph, found.captured.values
    made = interpret(graph, [x.numpy() for x in found.inputs(sample.inputs)])
    given = dict(zip(graph.outputs, made, strict=True))
    wrong = []
    for node, value in zip(found.outputs, wanted, strict=True):
        index = values[node]
        if index not in given:
            continue  # an input, or a view of one
        told, dtype = graph[index], str(value.dtype).removeprefix("torch.")
        if (told.dtype, told.shape) != (dtype, tuple(value.shape)):
            wrong.append(f"{sample}: {told}, PyTorch gives {dtype} {tuple(value.shape)}")
            continue
        got = torch.tensor(given[index]).to(value.dtype)
        near, least = CLOSE.get(dtype, (0.0, 0.0) if dtype[0] in "iub" else (2e-2, 1e-3))
        if not torch.allclose(got, value, rtol=near, atol=least, equal_nan=True):
            wrong.append(f"{sample}: {told} has other values than PyTorch's")
    return wrong


def wrong_kernels(sample: Sample, found: Taken, folder: Path, device: str) -> list[str]:
    """What is wrong with the kernels of a sample."""
    from nostall.fusion.codegen.runtime.stitched_graph import stitch
    from tests.unit.fusion.codegen.accuracy import Stray, guarded, judge

    stitched = stitch(found.captured.graph, folder=folder)
    inputs = [x.to(device) for x in found.inputs(sample.inputs)]
    try:
        outputs = guarded(stitched)(*inputs)
    except Stray as stray:
        return [f"{sample}: {stray}"]
    except Exception as error:  # the others are looked at all the same
        return [f"{sample}: {type(error).__name__}: {error}"]
    return [f"{sample}: {text}" for text in judge(stitched, inputs, outputs)]


@dataclass
class Told:
    """How many samples came to what, the operators that were compared, and what is wrong."""

    seen: Counter[str]
    operators: set[str]
    wrong: list[str]


def compared(every: Iterator[Sample]) -> Told:
    """Graphs of samples beside PyTorch."""
    return _told(every, unlike_pytorch, "graphs")


def run(every: Iterator[Sample], folder: Path, device: str) -> Told:
    """Kernels of samples beside their graphs."""

    def wrong(sample: Sample, found: Taken) -> list[str] | str:
        if any(node.dtype == "float64" for node in found.captured.graph):
            return "fp64, which kernels do not compute"
        return wrong_kernels(sample, found, folder, device)

    return _told(every, wrong, "kernels")


def _told(
    every: Iterator[Sample], look: Callable[[Sample, Taken], list[str] | str], what: str
) -> Told:
    told = Told(Counter(), set(), [])
    for sample in every:
        found = taken(sample)
        wrong = found if isinstance(found, str) else look(sample, found)
        if isinstance(wrong, str):
            told.seen[wrong] += 1
            continue
        told.seen[what] += 1
        told.operators.add(sample.operator)
        told.wrong += wrong
    return told


def main() -> None:
    from nostall.fusion.testing.triton_interpreter import prepare

    folder, each, part, parts = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    gpu = torch.cuda.is_available()
    warnings.simplefilter("ignore")
    if not gpu:
        prepare()
    names = set(list(operators())[part::parts])
    kernels = samples(names, COMPILED if gpu else INTERPRETED, each)
    found = [
        compared(samples(names, REFERENCE, each)),
        run(kernels, folder, "cuda" if gpu else "cpu"),
    ]
    print(
        json.dumps(
            {
                "seen": sum((told.seen for told in found), Counter()),
                "operators": [sorted(told.operators) for told in found],
                "wrong": [text for told in found for text in told.wrong],
            }
        )
    )


if __name__ == "__main__":
    main()
