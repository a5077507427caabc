"""Compilation of a chain by torch.compile, apart from its first run; settings of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.timing import Run

Lock = Callable[[], AbstractContextManager[object]]


def compile_chain(
    chain: Chain, inputs: Sequence[Tensor], lock: Lock, options: Mapping[str, Any] | None = None
) -> Run:
    """Compile a chain with torch.compile and run it once.

    ``options``: changes of Inductor's settings; None for torch.compile's defaults.  Only the first
    run, in which Inductor measures the configurations of its kernels, holds the lock of the GPU;
    the compilation before it does not.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    config.compile_threads = 1  # each process of this benchmark would start a pool of its own
    patches = dict(options or {})

    def backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        compiled = compile_fx(module, examples, config_patches=patches)

        def locked(*arguments: Any) -> Any:
            with lock():
                result = compiled(*arguments)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                return result

        is_first = True

        def run(*arguments: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                return locked(*arguments)
            return compiled(*arguments)

        return run

    compiled_chain = torch.compile(
        lambda *tensors: chain.function(*tensors), backend=backend, dynamic=False, fullgraph=True
    )
    compiled_chain(*inputs)
    return lambda tensors: compiled_chain(*tensors)


def kernel_settings(known: set[int]) -> list[dict[str, Any]]:
    """Names and settings of Inductor's kernels that were compiled since ``known`` was filled.

    ``known``: ids of kernels that are listed already; the new ones are added.
    """
    from torch._inductor.codecache import PyCodeCache

    settings = []
    for module in list(PyCodeCache.modules):
        for name, kernel in vars(module).items():
            launchers = getattr(kernel, "launchers", None)
            if not launchers or id(kernel) in known:
                continue
            known.add(id(kernel))
            chosen = getattr(launchers[0], "config", None)
            sizes = {} if chosen is None else {**chosen.kwargs, "num_warps": chosen.num_warps}
            settings.append(
                {
                    "kernel": name,
                    "settings": sizes,
                    "registers": getattr(launchers[0], "n_regs", None),
                    "spills": getattr(launchers[0], "n_spills", None),
                }
            )
    return settings
