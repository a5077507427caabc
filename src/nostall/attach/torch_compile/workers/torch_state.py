"""How a process is set up, to set up another one alike: it decides what a graph becomes."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _len_torch_dispatch_stack

FOLDERS = ("NOSTALL_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables of the environment that say where everything is kept."""


class Unsent(Exception):
    """A compilation that no other process can do."""


def folders() -> dict[str, str | None]:
    """Where this process keeps everything, as far as it was told."""
    return {name: os.environ.get(name) for name in FOLDERS}


def put_folders(found: Mapping[str, str | None]) -> bool:
    """Have this process keep everything there; whether it did not before."""
    before = folders()
    for name, value in found.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return folders() != before


@dataclass(frozen=True)
class Surroundings:
    """Configuration, environment, modes and flags of a process.  ``owner``: :func:`_owner`."""

    inductor: bytes
    functorch: bytes
    folders: dict[str, str | None]
    device: int | None
    grad: bool
    inference: bool
    autocast: dict[str, tuple[torch.dtype, bool]]
    flags: tuple[Any, ...]
    owner: str

    @classmethod
    def here(cls) -> Surroundings:
        """Raises :class:`Unsent`."""
        import torch._functorch.config as functorch
        from torch._inductor import config as inductor

        if _len_torch_dispatch_stack() or _modes():
            raise Unsent("a mode is on in which functions of PyTorch do something else")
        started = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            inductor=inductor.save_config(),
            functorch=functorch.save_config(),
            folders=folders(),
            device=torch.cuda.current_device() if started else None,
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast={
                kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in ("cuda", "cpu")
            },
            flags=tuple(read() for read, _ in _FLAGS),
            owner=_owner(),
        )

    @contextlib.contextmanager
    def set(self, *, traced: bool) -> Iterator[None]:
        """In a process that does nothing else: most of it stays as it is set.  ``traced``: what is
        traced may be kept in AOTAutograd's cache."""
        import torch._functorch.config as functorch
        from torch._inductor import config as inductor

        inductor.load_config(self.inductor)
        functorch.load_config(self.functorch)
        put_folders(self.folders)
        if self.device is not None:
            torch.cuda.set_device(self.device)
        for (read, write), value in zip(_FLAGS, self.flags, strict=True):
            if read() != value:  # some that are written are not what they were
                write(value)
        _own(self.owner)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, (dtype, enabled) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if not traced:
                stack.enter_context(functorch.patch(enable_autograd_cache=False))
            yield


def _modes() -> int:
    """How many modes change what functions do, but for that of :func:`torch.set_default_device`."""
    modes = torch.overrides._get_current_function_mode_stack()
    return sum(not isinstance(mode, DeviceContext) for mode in modes)


def _owner() -> str:
    """The module in which pickle finds what has ``torch`` in its own name, as names of the cache
    tell: the first one that has imported it."""
    words = (word for _, word, _ in pickletools.genops(pickle.dumps(torch.contiguous_format)))
    return next(word for word in words if isinstance(word, str))


def _own(owner: str) -> None:
    """Let pickle find it there, too; the program's own modules are not here."""
    if _owner() == owner:
        return
    first = sys.modules.get(owner) or ModuleType(owner)
    first.torch = torch  # type: ignore[attr-defined]
    others = {name: module for name, module in sys.modules.items() if name != owner}
    sys.modules.clear()
    sys.modules.update({owner: first, **others})


def _reduced() -> tuple[bool, bool]:
    matmul = torch.backends.cuda.matmul
    return (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def _reduce(allowed: tuple[bool, bool]) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = allowed[0]
    matmul.allow_bf16_reduced_precision_reduction = allowed[1]


def _attention() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _attend(enabled: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    setters = (
        cuda.enable_flash_sdp,
        cuda.enable_mem_efficient_sdp,
        cuda.enable_math_sdp,
        cuda.enable_cudnn_sdp,
    )
    for enable, value in zip(setters, enabled, strict=True):
        enable(value)


_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (_reduced, _reduce),
    (_attention, _attend),
)
"""How flags of PyTorch are read, and how they are set."""
