"""Who compiles a graph, and everything in it that is not stitched: Inductor, or eager PyTorch.

Both cut the joint graph by the min-cut partition, so the plain and the stitched version of a graph
save equal tensors for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from nostall.attach.torch_compile.rewrite.inductor_pass import (
    PASS,
    Observer,
    ObservingPass,
    StitchPass,
    stitching,
)
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.store.kernel_store import Kept
from nostall.core import collector

Compiled = Callable[..., Any]


MEASURING = (
    "max_autotune",
    "max_autotune_gemm",
    "benchmark_fusion",
    "benchmark_combo_kernel",
    "triton.autotune_at_compile_time",
)
"""Options with which Inductor measures kernels while it compiles."""
PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    PASS,
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_partitioner_fn",
)
"""Options that are functions of the program's own."""


class Host(Protocol):
    """Compiles a Dynamo graph, forward and backward.  The module is taken over."""

    @property
    def unsent(self) -> str:
        """Why no other process can compile for this one, into a cache that both look into and
        without measuring on a GPU that is busy; empty where one can."""
        ...

    @property
    def uncaptured(self) -> Host:
        """The same without CUDA graphs inside, for who captures runs."""
        ...

    def plain(
        self, module: GraphModule, inputs: Sequence[Any], observe: Observer | None = None
    ) -> Compiled:
        """As the user's mode has it.  ``observe`` is shown the graphs that would be stitched, where
        they are compiled and do not come from a cache."""
        ...

    def stitched(
        self, module: GraphModule, inputs: Sequence[Any], selection: Selection, done: Stitching
    ) -> Compiled:
        """The same with stitched kernels; the backward pass is compiled at once, too."""
        ...


@dataclass(frozen=True)
class InductorHost:
    """``patches`` is what ``mode=`` and ``options=`` mean for Inductor's configuration."""

    patches: Mapping[str, Any]

    @property
    def unsent(self) -> str:
        from torch._inductor import config

        def value(name: str) -> Any:
            if name in self.patches:
                return self.patches[name]
            for part in (holder := config, *name.split("."))[1:]:
                holder = getattr(holder, part, None)
            return holder

        if any(value(name) is not None for name in PASSES):
            return "a pass of the program's own is among Inductor's"
        if not value("fx_graph_cache") or value("force_disable_caches"):
            return "Inductor's cache is off"
        measuring = [name for name in MEASURING if value(name)]
        return f"Inductor measures while it compiles ({measuring[0]})" if measuring else ""

    @property
    def uncaptured(self) -> InductorHost:
        """The same without CUDA graphs inside, for who captures runs."""
        return InductorHost({**self.patches, "triton.cudagraphs": False})

    def plain(
        self, module: GraphModule, inputs: Sequence[Any], observe: Observer | None = None
    ) -> Compiled:
        """Raises :class:`Unavailable` where there is no compiler for what Inductor writes."""
        from torch._inductor.compile_fx import compile_fx

        patches = dict(self.patches)
        if observe is not None and self._before is None:
            patches[PASS] = ObservingPass(observe)
        else:
            collector.resume()  # nobody tells whether a cache has the graph
        try:
            found: Compiled = compile_fx(module, inputs, config_patches=patches)
        except Exception as error:  # all but a missing compiler is raised again
            if (missing := _missing(error)) is not None:
                raise Unavailable(missing) from error
            raise
        return found

    def stitched(
        self, module: GraphModule, inputs: Sequence[Any], selection: Selection, done: Stitching
    ) -> Compiled:
        from torch._inductor.compile_fx import compile_fx

        from nostall.attach.torch_compile.rewrite import direct_call

        direct_call.register()
        patches = {**self.patches, PASS: StitchPass(selection, self._before)}
        with stitching(done), _whole():
            found: Compiled = compile_fx(module, inputs, config_patches=patches)
        return found

    @property
    def _before(self) -> Any:
        """A pass that the user has put where ours goes."""
        from torch._inductor import config

        return self.patches.get(PASS) or getattr(config, PASS)


class Unavailable(Exception):
    """Inductor cannot compile here at all; the text says what it lacks."""


def _missing(error: BaseException | None) -> str | None:
    """The part of the machine that Inductor says is missing, in an error or in its causes."""
    from torch._inductor.exc import GPUTooOldForTriton, InvalidCxxCompiler, TritonMissing

    while error is not None:
        if isinstance(error, (InvalidCxxCompiler, TritonMissing, GPUTooOldForTriton)):
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def _whole() -> Any:
    """Compile the backward pass together with the forward: no step has to wait for it."""
    import torch._functorch.config as functorch

    return functorch.patch(force_non_lazy_backward_lowering=True)


@dataclass(frozen=True)
class EagerHost:
    """Where Inductor is not available: ATen operators one by one, beside the stitched kernels."""

    unsent: str = field(default="PyTorch's operators run one by one", init=False)

    @property
    def uncaptured(self) -> EagerHost:
        return self

    def plain(
        self, module: GraphModule, inputs: Sequence[Any], observe: Observer | None = None
    ) -> Compiled:
        return self._compiled(module, inputs, observe or (lambda graph: None))

    def stitched(
        self, module: GraphModule, inputs: Sequence[Any], selection: Selection, done: Stitching
    ) -> Compiled:
        from nostall.attach.torch_compile.rewrite.rewrite import rewrite

        def change(graph: GraphModule) -> None:
            collector.resume()
            rewrite(graph, Kept(), selection, done)

        with _whole():
            return self._compiled(module, inputs, change)

    def _compiled(
        self, module: GraphModule, inputs: Sequence[Any], change: Callable[[GraphModule], None]
    ) -> Compiled:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        from nostall.fusion.capture.trace import decompositions

        def compiler(graph: GraphModule, _: Sequence[Any]) -> Any:
            change(graph)
            return make_boxed_func(graph.forward)

        found: Compiled = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions(),
        )(module, inputs)
        return found


def inductor_patches(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``mode=`` and ``options=`` of ``torch.compile`` set; errors are PyTorch's own."""
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options or {}), None).config)
