"""Other cubins for a compiled Triton kernel, launched by Triton's own launcher.

While a variant is in use, Triton's table of compiled kernels holds nothing else, so a launch that
needs another kernel is noticed: it would compile one.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from triton.runtime.errors import OutOfResources

from nostall.core.errors import BadInput

_REFUSED = ("out of resource", "invalid argument")
"""Parts of the driver's messages for a launch that did not start; the context is intact."""


class Variants(Protocol):
    """Loads cubins in place of one kernel's."""

    def load(self, cubin: bytes) -> Any:
        """A variant.  Raises ``RuntimeError`` if the driver does not load it."""
        ...

    def using(self, variant: Any) -> Any:
        """A context in which launches of the kernel run the variant."""
        ...

    def unload(self, variant: Any) -> None:
        """Free a variant that no longer runs."""
        ...


class TritonVariants:
    """Variants of one kernel of the present GPU."""

    def __init__(self, functions: Sequence[Any], cubin: bytes, ordinal: int) -> None:
        """``functions``: Triton functions, one of which compiled ``cubin`` for the GPU ``ordinal``.

        Raises :class:`BadInput` if none did.
        """
        self._tables = [
            function.device_caches[ordinal][0]
            for function in functions
            if ordinal in function.device_caches
        ]
        found = [
            (table, compiled)
            for table in self._tables
            for compiled in table.values()
            if compiled.asm.get("cubin") == cubin
        ]
        if not found:
            raise BadInput(
                "this GPU's launch of the step compiles another kernel than the one to be tuned; "
                "search on the GPU and with the versions that will serve"
            )
        self._table, self._compiled = found[0]

    def load(self, cubin: bytes) -> Any:
        """The kernel with another cubin."""
        variant = copy.copy(self._compiled)
        variant.asm = type(self._compiled.asm)(self._compiled.asm)
        variant.asm.pop("sass", None)
        variant.asm["cubin"] = variant.kernel = cubin
        variant.module = variant.function = variant._run = None
        try:
            variant._init_handles()
        except OutOfResources as error:
            raise RuntimeError(str(error)) from error
        return variant

    @contextmanager
    def using(self, variant: Any) -> Iterator[None]:
        """Raises :class:`BadInput` at the end if a launch needed another compiled kernel."""
        cubin = self._compiled.asm["cubin"]
        saved = dict(self._table)
        same = [key for key, compiled in saved.items() if compiled.asm.get("cubin") == cubin]
        self._table.clear()
        self._table.update(dict.fromkeys(same, variant))
        try:
            yield
            if any(compiled is not variant for compiled in self._table.values()):
                raise BadInput(
                    "a checked launch compiled another kernel than the one to be tuned, so it did "
                    "not check it; please report this bug"
                )
        finally:
            self._table.clear()
            self._table.update(saved)

    def unload(self, variant: Any) -> None:
        """Free the module; newer versions of Triton do it themselves with the object."""
        module, variant.module = variant.module, None
        if module is not None:
            torch.cuda.synchronize()
            ctypes.CDLL("libcuda.so.1").cuModuleUnload(ctypes.c_void_p(module))


def is_refused_launch(error: RuntimeError) -> bool:
    """Whether an error says that a launch did not start, such as for too many registers."""
    return any(part in str(error).lower() for part in _REFUSED)
