"""Snapshot of PyTorch's process-wide state, so that a worker compiles like the user's process."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _len_torch_dispatch_stack

FOLDER_VARIABLES = ("NOSTALL_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Environment variables with the folders of the store and of the compile caches."""


class NotOffloadable(Exception):
    """A job cannot be done by a worker process; the message says why."""


def cache_folders() -> dict[str, str | None]:
    """Values of :data:`FOLDER_VARIABLES`; None if a variable is not set."""
    return {name: os.environ.get(name) for name in FOLDER_VARIABLES}


def set_cache_folders(folders: Mapping[str, str | None]) -> bool:
    """Set the variables in this process; returns whether any of them changed."""
    before = cache_folders()
    for name, value in folders.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return cache_folders() != before


@dataclass(frozen=True)
class TorchState:
    """Configuration, modes and flags of PyTorch in one process."""

    # Saved configurations of Inductor and of AOTAutograd.
    inductor: bytes
    functorch: bytes
    # As :func:`cache_folders` returns them.
    folders: dict[str, str | None]
    # Index of the current GPU; None if CUDA is not initialized.
    device: int | None
    # Whether gradients are recorded, and whether inference mode is on.
    grad: bool
    inference: bool
    # (dtype, whether it is on) by type of device.
    autocast: dict[str, tuple[torch.dtype, bool]]
    # Values of :data:`_FLAGS`.
    flags: tuple[Any, ...]
    # As :func:`_pickle_module` returns it.
    pickle_module: str

    @classmethod
    def capture(cls) -> TorchState:
        """The state of this process.

        Raises :class:`NotOffloadable` if a mode is active that changes what PyTorch's functions do.
        """
        import torch._functorch.config as functorch
        from torch._inductor import config as inductor

        if _len_torch_dispatch_stack() or _function_modes():
            raise NotOffloadable("a mode is on that changes what PyTorch's functions do")
        initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            inductor=inductor.save_config(),
            functorch=functorch.save_config(),
            folders=cache_folders(),
            device=torch.cuda.current_device() if initialized else None,
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast={
                kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in ("cuda", "cpu")
            },
            flags=tuple(read() for read, _ in _FLAGS),
            pickle_module=_pickle_module(),
        )

    @contextlib.contextmanager
    def restored(self, *, autograd_cache: bool) -> Iterator[None]:
        """Set this process, a worker, to the state.

        Only the modes are reset at the end; configuration, folders and flags stay until the next
        job.  ``autograd_cache``: whether AOTAutograd may use its cache.
        """
        import torch._functorch.config as functorch
        from torch._inductor import config as inductor

        inductor.load_config(self.inductor)
        functorch.load_config(self.functorch)
        set_cache_folders(self.folders)
        if self.device is not None:
            torch.cuda.set_device(self.device)
        for (read, write), value in zip(_FLAGS, self.flags, strict=True):
            if read() != value:  # writing some flags has side effects even if the value is equal
                write(value)
        _set_pickle_module(self.pickle_module)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, (dtype, enabled) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if not autograd_cache:
                stack.enter_context(functorch.patch(enable_autograd_cache=False))
            yield


def _function_modes() -> int:
    """Number of active function modes, without that of :func:`torch.set_default_device`."""
    modes = torch.overrides._get_current_function_mode_stack()
    return sum(not isinstance(mode, DeviceContext) for mode in modes)


def _pickle_module() -> str:
    """Name of the module under which pickle serializes ``torch.contiguous_format``.

    Pickle uses the first imported module that has the attribute, and AOTAutograd's cache keys
    contain that name.
    """
    words = (word for _, word, _ in pickletools.genops(pickle.dumps(torch.contiguous_format)))
    return next(word for word in words if isinstance(word, str))


def _set_pickle_module(name: str) -> None:
    """Make :func:`_pickle_module` return this name, by a module that need not exist here."""
    if _pickle_module() == name:
        return
    first = sys.modules.get(name) or ModuleType(name)
    first.torch = torch  # type: ignore[attr-defined]
    others = {other: module for other, module in sys.modules.items() if other != name}
    sys.modules.clear()
    sys.modules.update({name: first, **others})


_CUDA = torch.backends.cuda
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    *(
        (partial(getattr, _CUDA.matmul, name), partial(setattr, _CUDA.matmul, name))
        for name in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        )
    ),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
)
"""Pairs of functions that read and write a flag."""
