"""Job of a worker process: find the graphs that Inductor compiles for a graph of Dynamo.

If PyTorch has the code in its caches, Inductor does not run its passes in the process, so nostall
does not see the graphs whose kernels it measures.  That is so when Dynamo compiles a function again
for another guard, and in a run after one that ended before a version was selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from nostall.attach.torch_compile.measure.baselines import copy_graph
from nostall.attach.torch_compile.rewrite.compilers import backward_with_forward
from nostall.attach.torch_compile.workers.compile_job import (
    CompileJob,
    compilation,
    pickling_lock,
)


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
            backward_with_forward(),
        ):
            job.compiler.compile_baseline(
                job.module, job.inputs, lambda module: graphs.append(_graph_bytes(module))
            )
        return tuple(graphs)


def read_graph(data: bytes) -> GraphModule:
    """A graph of :meth:`ObserveJob.run`, whose nodes have fake tensors."""
    from torch._inductor import inductor_prims  # noqa: F401, as graphs call operators it defines
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with pickling_lock():
        module: GraphModule = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    return module


def _graph_bytes(module: GraphModule) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    options: Any = Options(ops_filter=None, node_metadata_key_filter=lambda key: key == "val")
    # Pickling modifies a module, so a copy is pickled.
    return bytes(GraphPickler.dumps(copy_graph(module), options))
