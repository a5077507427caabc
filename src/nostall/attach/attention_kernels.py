"""Native schedules of the attention kernels, loaded from the store when Triton compiles them."""

from __future__ import annotations

from functools import cache

from nostall.attach.optimize import optimize


@cache
def attach_attention_kernels() -> None:
    """Let the attention kernels of this process run the store's cubins, where it has some.

    A cubin of the store replaces the one that Triton compiled from the same source for the same
    shape, plan and versions, on the GPU that measured it as faster; all others run as compiled.
    Must be called before the kernels' first launch.
    """
    from nostall.serving.attention.kernel import meta_attention
    from nostall.serving.attention.reduce import reduce_splits

    for kernel in (meta_attention, reduce_splits):
        optimize(kernel)
