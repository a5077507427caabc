"""Binaries that Triton's cache has, found without Triton's front end.

To find a binary Triton reads, parses and hashes the source of its kernel and what that calls.  A
program that runs an earlier choice would do so for each of its kernels before its first step is
over.  So the name that came out is kept under all that Triton made it from, but for the source,
which the kernel's record names; and what the launch needs to know of the source.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager, triton_key

from nostall.attach.torch_compile.graph_key import device_name
from nostall.attach.torch_compile.store.kernel_store import Kept, code_version
from nostall.attach.torch_compile.store.records import BinariesRecord, BinaryRecord, KernelRecord

_log = logging.getLogger("nostall")


def find(record: KernelRecord, device: torch.device) -> list[Any] | None:
    """The compiled kernels of a record's launches, loaded, as another process had them run here;
    None where there are none, or somebody wants to see how kernels are compiled."""
    try:
        if _hooked():
            return None
        known = Kept().answer(BinariesRecord, _key(record, device))
        return None if known is None else again(known)
    except Exception as error:  # Triton's own way is always there
        _log.debug("nostall: binaries are not found: %s", error, exc_info=error)
        return None


def told(binaries: Sequence[Any]) -> BinariesRecord | None:
    """What another process has to know to :func:`find` these; None where that cannot be said."""
    try:
        return BinariesRecord(binaries=tuple(map(_told, binaries)))
    except Exception as error:  # they run all the same; the next process asks Triton
        _log.debug("nostall: binaries are not kept: %s", error, exc_info=error)
        return None


def again(known: BinariesRecord) -> list[Any]:
    """As :func:`find` gives them.  Raises whatever Triton does."""
    return [_compiled(one) for one in known.binaries]


def keep(record: KernelRecord, device: torch.device, known: BinariesRecord) -> None:
    """From now on they are found."""
    Kept().keep(_key(record, device), known)


def _key(record: KernelRecord, device: torch.device) -> str:
    """All that a binary's name and its launch depend on."""
    backend = compiler.make_backend(driver.active.get_current_target())
    variables = sorted(compiler.get_cache_invalidating_env_vars().items())
    parts = [triton_key(), backend.hash(), str(variables), str(torch.__version__)]
    parts += [device_name(device), code_version()]
    return hashlib.sha256(record.json + "\n".join(parts).encode()).hexdigest()


def _told(binary: Any) -> BinaryRecord:
    source, (file,) = binary.src, [one for one in binary.metadata_group if one.endswith(".json")]
    signature = tuple(source.signature.items())
    constants = tuple(source.constants.items())
    found = BinaryRecord(name=binary.hash, file=file, signature=signature, constants=constants)
    if BinaryRecord.read(found.json) != found:
        raise ValueError(f"signature {signature} and constants {constants} are not plain")
    return found


def _compiled(known: BinaryRecord) -> Any:
    group = get_cache_manager(known.name).get_group(known.file)
    if not group or known.file not in group:
        raise FileNotFoundError(f"Triton's cache has no {known.file} of {known.name}")
    # What Triton's launchers look at of a source.
    source = SimpleNamespace(signature=dict(known.signature), constants=dict(known.constants))
    found = compiler.CompiledKernel(source, group, known.name)
    found._init_handles()
    return found


def _hooked() -> bool:
    """Whether something hooks into how Triton compiles, asks for other binaries than usual, or
    nothing is to come from the cache."""
    compilation, runtime = knobs.compilation, knobs.runtime
    hooks = ("jit_cache_hook", "jit_post_compile_hook", "add_stages_inspection_hook")
    return bool(
        runtime.interpret
        or compilation.always_compile
        or compilation.override
        or compilation.listener
        or getattr(runtime, "debug", False)
        or getattr(compilation, "instrumentation_mode", "")
        or any(getattr(runtime, name, None) is not None for name in hooks)
    )
