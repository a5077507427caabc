"""Compilers for a Dynamo graph: Inductor, or AOTAutograd with eager operators as a fallback.

Both split the joint graph by the min-cut partition, so the baseline and the candidate of a graph
save equal tensors for the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from nostall.attach.torch_compile.rewrite.inductor_pass import (
    PASS_OPTION,
    GraphObserver,
    ObservingPass,
    StitchPass,
    collect_result,
)
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.core import garbage_collector

CompiledGraph = Callable[..., Any]

MEASURING_OPTIONS = (
    "max_autotune",
    "max_autotune_gemm",
    "benchmark_fusion",
    "benchmark_combo_kernel",
    "triton.autotune_at_compile_time",
)
"""Options with which Inductor measures kernels on the GPU while it compiles."""
TUNING_OPTIONS = ("max_autotune_pointwise", "coordinate_descent_tuning")
"""Options with which Inductor's generated kernels measure their block sizes when they first run;
its mode max-autotune sets the second, and the first for all kernels."""
CUSTOM_PASS_OPTIONS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    PASS_OPTION,
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_partitioner_fn",
)
"""Options that hold functions of the user, which a worker process does not have."""


def has_searched_blocks() -> bool:
    """Whether Inductor's cache has block sizes that a search has found.

    If it has none, each kernel that is compiled with :data:`TUNING_OPTIONS` searches, without a
    limit of time, when it first runs.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    for file in Path(cache_dir()).glob("*/*.best_config"):
        with contextlib.suppress(OSError):
            if b'"found_by_coordesc": true' in file.read_bytes():
                return True
    return False


@dataclass(frozen=True)
class InductorCompiler:
    """Compiles a Dynamo graph by ``torch._inductor.compile_fx``, which may modify the graph."""

    # Changes of Inductor's configuration by ``mode=`` and ``options=``.
    patches: Mapping[str, Any]

    def value(self, name: str) -> Any:
        """The value of an option of Inductor."""
        from torch._inductor import config

        if name in self.patches:
            return self.patches[name]
        for part in (holder := config, *name.split("."))[1:]:
            holder = getattr(holder, part, None)
        return holder

    @property
    def local_only_reason(self) -> str:
        """Why a worker process cannot compile for this compiler; empty if one can.

        A worker needs a shared compile cache, and must not measure on the GPU, which is busy.
        """
        if any(self.value(name) is not None for name in CUSTOM_PASS_OPTIONS):
            return "the user's own passes are part of Inductor's configuration"
        if not self.value("fx_graph_cache") or self.value("force_disable_caches"):
            return "Inductor's cache is off"
        measuring = [name for name in MEASURING_OPTIONS if self.value(name)]
        return f"Inductor measures while it compiles ({measuring[0]})" if measuring else ""

    @property
    def without_cuda_graphs(self) -> InductorCompiler:
        """A copy of this compiler with CUDA graphs disabled.

        The benchmark captures its runs in a CUDA graph, and captures cannot be nested.
        """
        return InductorCompiler({**self.patches, "triton.cudagraphs": False})

    @property
    def tuned(self) -> InductorCompiler:
        """A copy of this compiler whose generated kernels measure their block sizes."""
        return InductorCompiler({**self.patches, **dict.fromkeys(TUNING_OPTIONS, True)})

    @property
    def untuned_reason(self) -> str:
        """Why :attr:`tuned` is not tried; empty if it is."""
        if self.value("coordinate_descent_tuning"):
            return "Inductor's options say so for all versions"
        if self.value("triton.cudagraphs"):
            return "Inductor's CUDA graphs are on, and kernels cannot be measured in a capture"
        if self.value("deterministic") or torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are asked for"
        return ""

    def compile_baseline(
        self, module: GraphModule, inputs: Sequence[Any], observe: GraphObserver | None = None
    ) -> CompiledGraph:
        """Compile as the user's mode and options say, without stitched kernels.

        ``observe`` is called with the graphs into which kernels would be inserted, unless the
        compiled graph comes from a cache.  Raises :class:`InductorUnavailable` if the machine
        cannot compile Inductor's code.
        """
        from torch._inductor.compile_fx import compile_fx

        patches = dict(self.patches)
        if observe is not None and self._user_pass is None:
            patches[PASS_OPTION] = ObservingPass(observe)
        else:
            garbage_collector.resume()  # without a pass it is unknown whether a cache has the graph
        try:
            compiled: CompiledGraph = compile_fx(module, inputs, config_patches=patches)
        except Exception as error:  # raised again, unless a toolchain is missing
            if (missing := _missing_toolchain(error)) is not None:
                raise InductorUnavailable(missing) from error
            raise
        return compiled

    def compile_candidate(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        kernel_filter: KernelFilter,
        result: RewriteResult,
    ) -> CompiledGraph:
        """Compile with stitched kernels, the backward pass together with the forward pass."""
        from torch._inductor.compile_fx import compile_fx

        from nostall.attach.torch_compile.rewrite import direct_call

        direct_call.use_direct_calls()
        patches = {**self.patches, PASS_OPTION: StitchPass(kernel_filter, self._user_pass)}
        with collect_result(result), backward_with_forward():
            compiled: CompiledGraph = compile_fx(module, inputs, config_patches=patches)
        return compiled

    def find_graphs(
        self, module: GraphModule, inputs: Sequence[Any], observe: GraphObserver
    ) -> None:
        """Call ``observe`` with the graphs that a baseline has; no code is generated for them."""
        from functorch.compile import make_boxed_func
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        count = 0

        def note(graph: GraphModule) -> None:
            nonlocal count
            observe(graph)
            count += 1
            raise _Observed

        def compile_until_observed(graph: GraphModule, args: Sequence[Any], **kwargs: Any) -> Any:
            before = count
            try:
                return compile_fx_inner(graph, args, **kwargs)
            except Exception:  # Inductor may raise another one in the place of _Observed
                if count == before:
                    raise
                return make_boxed_func(lambda *_: ())  # is not called

        patches = {**self.patches, PASS_OPTION: ObservingPass(note)}
        with backward_with_forward():
            compile_fx(module, inputs, compile_until_observed, config_patches=patches)

    @property
    def _user_pass(self) -> Any:
        """The user's pass for the option that the backend sets."""
        from torch._inductor import config

        return self.patches.get(PASS_OPTION) or getattr(config, PASS_OPTION)


class _Observed(Exception):
    """Ends the compilation of a graph that was observed."""


class InductorUnavailable(Exception):
    """Inductor cannot compile on this machine; the message says which toolchain is missing."""


def _missing_toolchain(error: BaseException | None) -> str | None:
    """The first line of Inductor's error about a missing toolchain, in an error or its causes."""
    from torch._inductor.exc import GPUTooOldForTriton, InvalidCxxCompiler, TritonMissing

    while error is not None:
        if isinstance(error, (InvalidCxxCompiler, TritonMissing, GPUTooOldForTriton)):
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def backward_with_forward() -> Any:
    """Compile the backward pass together with the forward pass, so that no step waits for it."""
    import torch._functorch.config as functorch

    return functorch.patch(force_non_lazy_backward_lowering=True)


@dataclass(frozen=True)
class EagerCompiler:
    """Runs ATen operators one by one beside stitched kernels, if Inductor is not available.

    Its methods are those of :class:`InductorCompiler`.
    """

    local_only_reason: str = field(default="PyTorch's operators run one by one", init=False)

    @property
    def without_cuda_graphs(self) -> EagerCompiler:
        return self

    def compile_baseline(
        self, module: GraphModule, inputs: Sequence[Any], observe: GraphObserver | None = None
    ) -> CompiledGraph:
        return self._compile(module, inputs, observe or (lambda graph: None))

    def compile_candidate(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        kernel_filter: KernelFilter,
        result: RewriteResult,
    ) -> CompiledGraph:
        from nostall.attach.torch_compile.rewrite.rewrite import insert_all

        def change(graph: GraphModule) -> None:
            garbage_collector.resume()
            insert_all(graph, KernelStore(), kernel_filter, result)

        with backward_with_forward():
            return self._compile(module, inputs, change)

    def _compile(
        self, module: GraphModule, inputs: Sequence[Any], change: Callable[[GraphModule], None]
    ) -> CompiledGraph:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        from nostall.fusion.capture.trace import decompositions

        def compiler(graph: GraphModule, _: Sequence[Any]) -> Any:
            change(graph)
            return make_boxed_func(graph.forward)

        compiled: CompiledGraph = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions(),
        )(module, inputs)
        return compiled


GraphCompiler = InductorCompiler | EagerCompiler


def inductor_patches(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Changes of Inductor's configuration by ``mode=`` and ``options=`` of ``torch.compile``.

    Raises PyTorch's own errors for unknown ones.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options or {}), None).config)
