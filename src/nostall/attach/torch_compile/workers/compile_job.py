"""Jobs of a worker process: compile a graph by Inductor, so that PyTorch's caches contain it.

Keys of Inductor's cache (``FxGraphCache``) cover everything that a compilation depends on:
operators, sizes, Inductor's configuration and the backend's pass.  So the user's process, which
compiles the same graph later, finds the result; a result for any other setting is never found and
only costs time.

Keys of AOTAutograd's cache cover what is traced, and only the part of a process's state that
PyTorch considers.  So only candidates are written to it: they are compared with Inductor's version
before they run.

Another job finds the graphs that Inductor compiles for a graph of Dynamo. If PyTorch has the code
in its caches, Inductor does not run its passes in the process, so nostall does not see the graphs
whose kernels it measures. That is so when Dynamo compiles a function again for another guard, and
in a run after one that ended before a version was selected.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from nostall.attach.torch_compile.graph_copies import clone_graph
from nostall.attach.torch_compile.measure.baselines import copy_graph
from nostall.attach.torch_compile.rewrite.compilers import InductorCompiler
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.workers.cpu_time import MAX_COMPILERS
from nostall.attach.torch_compile.workers.torch_state import NotOffloadable, TorchState

TensorLayout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device, bool]
"""Shape, strides, dtype, device, and whether the tensor requires a gradient."""
ALIGNMENT = 16
"""Bytes; Inductor generates other code for inputs at addresses that are no multiple of them."""
STATIC_ATTRIBUTE, SOURCE_ATTRIBUTE = "_dynamo_static_input_type", "_dynamo_source"
"""Attributes that Dynamo sets: on parameters, whose address never changes, and on all inputs."""


_pickle_lock = threading.Lock()
"""Held while PyTorch's graph pickler runs in the user's process: it changes process-wide state."""


def _reset_after_fork() -> None:
    """A forked process does not have the thread that may hold the lock."""
    global _pickle_lock
    _pickle_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(frozen=True)
class CompileJob:
    """A compilation of a graph, forward and backward."""

    module: GraphModule
    # A :data:`TensorLayout` for each tensor; other inputs as they are.
    inputs: tuple[Any, ...]
    # Changes of Inductor's configuration.
    patches: dict[str, Any]
    # Kernels to insert; None compiles the graph as it is.
    kernel_filter: KernelFilter | None
    state: TorchState = field(default_factory=TorchState.capture)

    def serialize(self) -> bytes:
        """Bytes for :meth:`run`.

        Raises :class:`NotOffloadable` if the graph contains something that cannot be pickled.
        """
        from torch.fx._graph_pickler import GraphPickler, Options

        nodes = self.module.graph.find_nodes(op="placeholder")
        attributes = [(getattr(node, SOURCE_ATTRIBUTE, None), _static_type(node)) for node in nodes]
        rest = (self.inputs, self.patches, self.kernel_filter, self.state)
        pickling = Options(ops_filter=None, node_metadata_key_filter=lambda key: False)
        try:
            # Pickling modifies a module, so a copy is pickled.
            with _pickle_lock:
                content = (clone_graph(self.module), attributes, *rest)
                return bytes(GraphPickler.dumps(content, pickling))
        except Exception as error:  # a graph may hold any object
            raise NotOffloadable(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def run(data: bytes) -> RewriteResult:
        """Compile a serialized job.

        Returns what became of the graphs; empty if they were in the cache already.
        """
        result = RewriteResult()
        with compilation(data) as job:
            if job.kernel_filter is None:
                job.compiler.compile_baseline(job.module, job.inputs)
            else:
                job.compiler.compile_candidate(job.module, job.inputs, job.kernel_filter, result)
        return result


@dataclass(frozen=True)
class Compilation:
    """A compilation in a worker whose process has the state of the user's."""

    compiler: InductorCompiler
    module: GraphModule
    # Fake tensors, and other inputs as they are.
    inputs: list[Any]
    kernel_filter: KernelFilter | None


@contextlib.contextmanager
def compilation(data: bytes) -> Iterator[Compilation]:
    """What a serialized :class:`CompileJob` compiles; the process has the job's state meanwhile."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx  # noqa: F401, as graphs call operators it defines
    from torch._inductor import config as inductor
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from nostall.attach.torch_compile.runtime import chunked_loss  # noqa: F401, the same

    mode = FakeTensorMode(shape_env=ShapeEnv())
    content: Any = GraphPickler.loads(data, mode)
    module, attributes, inputs, patches, kernel_filter, state = content
    module = clone_graph(module)
    nodes = module.graph.find_nodes(op="placeholder")
    for node, (source, static_type) in zip(nodes, attributes, strict=True):
        setattr(node, SOURCE_ATTRIBUTE, source)
        if static_type is not None:
            node.meta["tensor_dict"] = {STATIC_ATTRIBUTE: static_type}
    with contextlib.ExitStack() as stack:
        stack.enter_context(state.restored(autograd_cache=kernel_filter is not None))
        threads = min(MAX_COMPILERS, inductor.compile_threads or MAX_COMPILERS)
        stack.enter_context(inductor.patch(compile_threads=threads))
        _set_example_values(module, inputs, mode)
        stack.enter_context(tracing(TracingContext(mode)))
        fakes = [_fake(value, mode) for value in inputs]
        yield Compilation(InductorCompiler(patches), module, fakes, kernel_filter)


def describe_inputs(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs of a :class:`CompileJob` that stand for these inputs.

    Raises :class:`NotOffloadable` if layouts do not describe them completely: inputs that share
    memory, misaligned inputs, dynamic sizes, and objects other than tensors and numbers.
    """
    described: list[Any] = []
    storages: set[int] = set()
    for value in inputs:
        if not isinstance(value, Tensor):
            if not isinstance(value, (int, float, bool, type(None))):
                raise NotOffloadable(f"an input is {type(value).__name__}")
            described.append(value)
            continue
        storage = value.untyped_storage()._cdata
        if storage in storages:
            raise NotOffloadable("inputs share memory")
        storages.add(storage)
        sizes = (*value.shape, *value.stride())
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise NotOffloadable("a size is dynamic")
        if value.storage_offset() * value.element_size() % ALIGNMENT:
            raise NotOffloadable("an input is misaligned")
        shape, strides = tuple(value.shape), tuple(value.stride())
        described.append((shape, strides, value.dtype, value.device, value.requires_grad))
    return tuple(described)


def _set_example_values(module: GraphModule, inputs: Sequence[Any], mode: Any) -> None:
    """Set ``meta["example_value"]`` of every node, as Dynamo does.

    AOTAutograd's cache key needs it, to see whose methods are called.
    """

    class Recorder(Interpreter):  # type: ignore[misc]
        def run_node(self, node: torch.fx.Node) -> Any:
            node.meta["example_value"] = value = super().run_node(node)
            return value

    # Optional: without the values AOTAutograd's cache is not used, but Inductor's is.
    with contextlib.suppress(Exception), mode:
        Recorder(module).run(*(_fake(value, mode) for value in inputs))


def _static_type(node: torch.fx.Node) -> str | None:
    static_type: str | None = node.meta.get("tensor_dict", {}).get(STATIC_ATTRIBUTE)
    return static_type


def _fake(value: Any, mode: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    shape, strides, dtype, device, requires_grad = value
    with mode:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return tensor.requires_grad_(requires_grad)


@dataclass(frozen=True)
class ObserveJob:
    """Find Inductor's graphs, forward and backward, of a graph of Dynamo."""

    # Compiles the graph without kernels.
    job: CompileJob

    def serialize(self) -> bytes:
        """Bytes for :meth:`run`; raises :class:`NotOffloadable` as :class:`CompileJob` does."""
        return self.job.serialize()

    @staticmethod
    def run(data: bytes) -> tuple[bytes, ...]:
        """The graphs for :func:`read_graph`, in the order in which Inductor compiles them."""
        import torch._functorch.config as functorch
        from torch._inductor import config as inductor

        graphs: list[bytes] = []
        with (
            compilation(data) as job,
            inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            functorch.patch(enable_remote_autograd_cache=False),
        ):
            job.compiler.find_graphs(
                job.module, job.inputs, lambda module: graphs.append(_graph_bytes(module))
            )
        return tuple(graphs)


def read_graph(data: bytes) -> GraphModule:
    """A graph of :meth:`ObserveJob.run`, whose nodes have fake tensors."""
    from torch._inductor import inductor_prims  # noqa: F401, as graphs call operators it defines
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with _pickle_lock:
        module: GraphModule = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    return module


def _graph_bytes(module: GraphModule) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    options: Any = Options(ops_filter=None, node_metadata_key_filter=lambda key: key == "val")
    # Pickling modifies a module, so a copy is pickled.
    return bytes(GraphPickler.dumps(copy_graph(module), options))
