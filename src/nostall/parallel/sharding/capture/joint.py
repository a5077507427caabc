"""Joint graph of a training step: the forward pass with its loss, and all gradients, in ATen.

AOTAutograd traces both passes at once, as it does for ``torch.compile``.  Tensors are fake, so the
step may be larger than this machine's memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.core.errors import one_line
from nostall.parallel.errors import BadModel
from nostall.parallel.module.effects import refuse_changed_state, refuse_sparse
from nostall.parallel.module.graph import ROOT, ModuleWithLoss
from nostall.parallel.module.job import Job

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator with its positional and named arguments."""
_aten = torch.ops.aten
_DECOMPOSED = (
    # Means over a batch whose parts have different weights: the mean of shards' means is wrong.
    _aten.nll_loss_forward,
    _aten.nll_loss_backward,
    # DTensor has no rule for these; it has one for their parts.
    _aten.mse_loss,
    _aten.mse_loss_backward,
)


class _Traced(Exception):
    """Carries the joint graph out of AOTAutograd, which would go on and compile it."""

    def __init__(self, graph_module: GraphModule, outputs: int) -> None:
        self.graph_module, self.outputs = graph_module, outputs


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The graph of one training step of a job at one batch size."""

    graph: Graph
    graph_module: GraphModule
    parameters: dict[str, Node]
    """Placeholders of the parameters by name; a parameter with two names has its first."""
    buffers: dict[str, Node]
    inputs: dict[int, Node]
    """Placeholders of the batch by the number of the leaf among those of (inputs, targets)."""
    tangent: Node
    """Placeholder of the gradient of the loss, which is 1."""
    loss: Node
    gradients: dict[str, Node]
    """Gradients by the name of their parameter; without those of frozen or unused parameters."""


def trace_step(job: Job, samples: int) -> JointGraph:
    """Trace the training step of a job with ``samples`` samples.

    Raises :class:`BadModel` if it cannot be traced, if the loss is not a scalar, or if the forward
    pass changes a buffer or a value in Python.
    """
    module = job.module
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    leaves, structure = tree_flatten(job.example_batch(samples))
    batched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    step = ModuleWithLoss(job)

    def loss_of(own: list[Any], constant: list[Any], batch: list[Any]) -> torch.Tensor:
        values = dict(enumerate(leaves)) | dict(zip(batched, batch, strict=True))
        # The loss, too, is under these values, because it may read parameters (weight decay).
        state = zip([*parameters, *buffers], [*own, *constant], strict=True)
        named = {f"{ROOT}.{name}": value for name, value in state}
        # functional_call leaves the call's tensors in a submodule with two names.
        with _reparametrize_module(step, named, tie_weights=True, stack_weights=True):
            return step(*tree_unflatten([*values.values()], structure))

    groups = [list(parameters.values()), list(buffers.values()), [leaves[i] for i in batched]]
    try:
        graph_module, outputs = _trace(loss_of, groups, samples)
    finally:
        refuse_changed_state(step.changed)
        if step.replaced:
            raise BadModel(
                f"the forward pass replaces the buffer {step.replaced[0]}; every process would "
                "have its own, so write it without that, or call eval() on the module that does it"
            )
    graph = graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = [*parameters, *buffers]
    if outputs != 1 or len(placeholders) != len(names) + len(batched) + 1:
        raise BadModel(
            "the forward pass has an effect besides its loss: it changes a buffer (BatchNorm in "
            "training mode does), or checks values (torch.linalg.inv does); every process has its "
            "own copy, so write it without that"
        )
    results = list(graph.output_node().args[0])
    own, rest = placeholders[: len(parameters)], placeholders[len(parameters) :]
    gradients = {
        name: node for name, node in zip(parameters, results[1:], strict=False) if node is not None
    }
    if not gradients:
        raise BadModel("the loss depends on no trainable parameter; there is nothing to train")
    for name, node in gradients.items():
        refuse_sparse(name, node.meta["val"])
    return JointGraph(
        graph,
        graph_module,
        dict(zip(parameters, own, strict=True)),
        dict(zip(buffers, rest, strict=False)),
        dict(zip(batched, rest[len(buffers) :], strict=False)),
        placeholders[-1],
        results[0],
        gradients,
    )


def _trace(function: Any, groups: list[list[Any]], samples: int) -> tuple[GraphModule, int]:
    """The joint graph of a function of groups of tensors, and its number of forward results."""

    def stop(graph_module: GraphModule, _: Any, **options: Any) -> NoReturn:
        raise _Traced(graph_module, options["num_fwd_outputs"])

    def unused(graph_module: GraphModule, _: Any) -> GraphModule:
        return graph_module

    # Imports Dynamo and parts of Inductor, which a process that only runs a plan does not need.
    from torch._functorch.aot_autograd import aot_function

    decompositions = torch._decomp.get_decompositions(_DECOMPOSED)
    step = aot_function(function, unused, unused, partition_fn=stop, decompositions=decompositions)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _eager_blocks():
                step(*([_fake(tensor) for tensor in group] for group in groups))
    except _Traced as traced:
        traced.graph_module.graph.eliminate_dead_code()
        return traced.graph_module, traced.outputs
    except Exception as error:  # PyTorch and the user's code raise errors of any class
        raise BadModel(
            f"AOTAutograd cannot trace the training step at {samples} samples: {one_line(error)}; "
            "make the forward pass traceable (no branches on values of tensors)"
        ) from error
    raise BadModel("the loss depends on no trainable parameter; there is nothing to train")


@contextmanager
def _exporting() -> Iterator[None]:
    """Let ``torch.compiler.is_exporting()`` be True: libraries then branch on no tensor's values.

    ``torch.export`` sets the same flags.
    """
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    saved = {name: getattr(torch.compiler, name) for name in flags}
    try:
        for name in flags:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, value in saved.items():
            setattr(torch.compiler, name, value)


def dispatched_operators(job: Job, samples: int) -> list[Call]:
    """The operators that autograd calls in a step, in order, as DTensor receives them.

    They differ from those of the joint graph, which has some in parts.  Raises :class:`BadModel` if
    the step needs values of tensors.
    """
    calls = _Calls()
    batch = job.example_batch(samples)
    parameters = [p for p in job.module.parameters() if p.requires_grad]
    try:
        with warnings.catch_warnings(), _eager_blocks(), calls:
            warnings.simplefilter("ignore")
            torch.autograd.grad(job.run(*batch), parameters, allow_unused=True)
    except Exception as error:  # PyTorch and the user's code raise errors of any class
        raise BadModel(
            f"the training step needs values of tensors: {one_line(error)}; write it without "
            "branches on these"
        ) from error
    return calls.calls


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """Records each operator with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((operator, args, kwargs or {}))
        return operator(*args, **(kwargs or {}))


@contextmanager
def _eager_blocks() -> Iterator[None]:
    """Let tensors be fake, and compiled blocks be the eager code that they stand for."""
    with (
        _exporting(),
        torch.compiler.set_stance("force_eager"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without values; the fake mode is on."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)
