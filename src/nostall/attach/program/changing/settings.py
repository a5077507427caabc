"""Settings of PyTorch that hold for the whole process, switched between two steps."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nostall.attach.program.roots import Switch
from nostall.attach.program.shadow import CLASSES, Call, Finding, check_module

NAME = "scaled_dot_product_attention"
ORDERS = {
    "cudnn": ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"),
    "flash": ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"),
}
"""Back ends of attention, the first one that can compute a call before the others."""
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the allocator, the later name first."""


def matmul_precision() -> str | None:
    """What ``torch.set_float32_matmul_precision`` has set.

    None where it is not told, because the program uses PyTorch's later settings of each library.
    """
    with contextlib.suppress(Exception):
        return str(sys.modules["torch"].get_float32_matmul_precision())
    return None


class MatmulPrecision:
    """``torch.set_float32_matmul_precision("high")``; its results are not those of the original."""

    def __init__(self, value: str) -> None:
        self.value = value
        self._before: str | None = None

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        if matmul_precision() is None:
            return "the program sets the precision of products by library"
        return ""

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        if reason := self.missing():
            return Finding(CLASSES[3], reason)
        return Finding(CLASSES[3], detail="results are not compared: the inputs are rounded")

    def on(self) -> None:
        if self._before is None:
            self._before = matmul_precision()
        sys.modules["torch"].set_float32_matmul_precision(self.value)

    def off(self) -> None:
        if self._before is not None:
            sys.modules["torch"].set_float32_matmul_precision(self._before)
            self._before = None


class AttentionCalls:
    """What a program asks of PyTorch's attention while it is watched."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_half = self.is_masked = False
        self._removal: Any = None

    def install(self, module: Any) -> None:
        """Note the calls of ``module``, ``torch.nn.functional``."""
        if self._removal is not None:
            return
        original = getattr(module, NAME)
        is_compiling = sys.modules["torch"].compiler.is_compiling

        @functools.wraps(original)
        def noted(query: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and query.is_cuda:
                mask = args[2] if len(args) > 2 else kwargs.get("attn_mask")
                self.calls += 1
                self.is_half |= query.element_size() == 2
                self.is_masked |= mask is not None
            return original(query, *args, **kwargs)

        def remove() -> None:
            if getattr(module, NAME) is noted:  # else the program has put something there
                setattr(module, NAME, original)

        self._removal = remove
        setattr(module, NAME, noted)

    def remove(self) -> None:
        """Put PyTorch's function back: calls are no longer recorded."""
        if self._removal is not None:
            self._removal()
            self._removal = None

    def facts(self) -> dict[str, Any]:
        """Whether calls on a GPU are of two bytes a number, have masks, and what runs first."""
        order = attention_order()
        return {"calls": self.calls, "half": self.is_half, "masked": self.is_masked,
                "first": order[0] if order else None}  # fmt: skip


def attention_order() -> tuple[str, ...]:
    """The enabled back ends of attention in their order; empty where PyTorch does not tell."""
    torch = sys.modules["torch"]
    with contextlib.suppress(Exception):
        found = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
        return tuple(backend.name for backend in found)
    return ()


class Attention:
    """``torch.nn.attention.sdpa_kernel([...], set_priority=True)`` around all steps."""

    def __init__(self, switches: Sequence[Switch], value: str) -> None:
        self.switches, self.value = switches, value
        self._context: Any = None

    def _entered(self) -> Any:
        attention = sys.modules["torch"].nn.attention
        backends = [getattr(attention.SDPBackend, name) for name in ORDERS[self.value]]
        context = attention.sdpa_kernel(backends, set_priority=True)
        context.__enter__()
        return context

    def missing(self) -> str:
        """Why nothing would be changed, or more than the order; empty otherwise."""
        if self._context is not None:
            return ""
        if (order := attention_order()) and not set(ORDERS[self.value]) <= set(order):
            return f"the program allows only {', '.join(order)}"
        if order[: len(ORDERS[self.value])] == ORDERS[self.value]:
            return "the program has set this order"
        return "" if order else "this PyTorch does not tell the order of its back ends"

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        worst = Finding(CLASSES[1])
        if reason := self.missing():
            return worst._replace(refusal=reason)
        for switch in self.switches:
            root, seen = switch.root, calls.get(switch.number, ())
            if type(root).__name__ == "DistributedDataParallel":
                root = root.module  # a copy of the wrapper would talk to the other ranks
            # Each back end numbers the elements that it drops in its own order.
            finding = check_module(root, seen, self._version, drops=False)
            if finding.refusal:
                return finding._replace(refusal=f"{type(root).__name__}: {finding.refusal}")
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def _version(self, module: Any, _: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            context = self._entered()
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                context.__exit__(None, None, None)

        return call

    def on(self) -> None:
        if self._context is None:
            self._context = self._entered()

    def off(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


class ExpandableSegments:
    """``expandable_segments:True`` of the allocator, in memory that it asks for from then on."""

    def __init__(self) -> None:
        self._is_on = False

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        return why_not_expandable()

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        return Finding(CLASSES[0], self.missing())  # where memory lies changes no number

    def on(self) -> None:
        if not self._is_on:
            self._set(True)

    def off(self) -> None:
        if self._is_on:
            self._set(False)

    def _set(self, value: bool) -> None:
        # PyTorch takes what a text does not name back to its default.
        others = [part for part in allocator_settings().split(",") if part]
        _set_allocator(",".join([*others, f"expandable_segments:{value}"]))
        self._is_on = value
        sys.modules["torch"].cuda.empty_cache()  # else free segments of the other kind are used


def allocator_settings() -> str:
    """What the environment tells the allocator; empty without."""
    return next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")


def why_not_expandable() -> str:
    """Why ``expandable_segments`` cannot be set; empty if it can."""
    if "expandable_segments" in allocator_settings():
        return "the environment sets it"
    torch = sys.modules["torch"]
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return "no GPU is used"
    if torch.cuda.get_allocator_backend() != "native":
        return f"the allocator is {torch.cuda.get_allocator_backend()}"
    return ""


def _set_allocator(text: str) -> None:
    torch = sys.modules["torch"]
    names = "_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"
    next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))(text)


def driver_calls() -> int:
    """How often the allocator has asked the driver for memory, or given it some."""
    torch = sys.modules["torch"]
    with contextlib.suppress(Exception):
        stats = torch.cuda.memory_stats()
        return int(stats["num_device_alloc"] + stats["num_device_free"])
    return 0
