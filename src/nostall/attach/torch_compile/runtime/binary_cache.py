"""Load compiled binaries from Triton's cache without Triton's front end.

To look up a binary, Triton reads, parses and hashes the source of the kernel and of everything that
it calls.  A process with a stored selection would do so for each kernel in its first step.  So the
resulting cache key is stored under everything else that Triton derives it from (the kernel's record
stands for the source), with the parts of the source that a launch needs.
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
from nostall.attach.torch_compile.store.kernel_store import KernelStore, code_version
from nostall.attach.torch_compile.store.records import BinariesRecord, BinaryRecord, KernelRecord

_log = logging.getLogger("nostall")


def load(record: KernelRecord, device: torch.device) -> list[Any] | None:
    """The compiled and loaded kernels of a record's launches, as another process recorded them.

    None if there are none, or if something hooks into Triton's compilation.
    """
    try:
        if _has_compile_hooks():
            return None
        known = KernelStore().load(BinariesRecord, _key(record, device))
        return None if known is None else load_described(known)
    except Exception as error:  # Triton's internals; Triton itself can still look the binary up
        _log.debug("nostall: binaries are not loaded: %s", error, exc_info=error)
        return None


def describe(binaries: Sequence[Any]) -> BinariesRecord | None:
    """A record by which :func:`load` finds these binaries; None if they cannot be described."""
    try:
        return BinariesRecord(binaries=tuple(map(_binary_record, binaries)))
    except Exception as error:  # Triton's internals; the next process goes through Triton
        _log.debug("nostall: binaries are not recorded: %s", error, exc_info=error)
        return None


def load_described(record: BinariesRecord) -> list[Any]:
    """The binaries of a record, loaded from Triton's cache.  Raises whatever Triton raises."""
    return [_load_binary(binary) for binary in record.binaries]


def remember(record: KernelRecord, device: torch.device, binaries: BinariesRecord) -> None:
    """Store the record of a kernel's binaries, so that :func:`load` finds them."""
    KernelStore().save(_key(record, device), binaries)


def _key(record: KernelRecord, device: torch.device) -> str:
    """Hash of everything that a binary's cache key and its launch depend on."""
    backend = compiler.make_backend(driver.active.get_current_target())
    variables = sorted(compiler.get_cache_invalidating_env_vars().items())
    parts = [triton_key(), backend.hash(), str(variables), str(torch.__version__)]
    parts += [device_name(device), code_version()]
    return hashlib.sha256(record.json + "\n".join(parts).encode()).hexdigest()


def _binary_record(binary: Any) -> BinaryRecord:
    source = binary.src
    (file,) = [name for name in binary.metadata_group if name.endswith(".json")]
    signature = tuple(source.signature.items())
    constants = tuple(source.constants.items())
    record = BinaryRecord(name=binary.hash, file=file, signature=signature, constants=constants)
    if BinaryRecord.read(record.json) != record:
        raise ValueError(f"signature {signature} and constants {constants} are not plain values")
    return record


def _load_binary(record: BinaryRecord) -> Any:
    group = get_cache_manager(record.name).get_group(record.file)
    if not group or record.file not in group:
        raise FileNotFoundError(f"Triton's cache has no {record.file} of {record.name}")
    # The attributes of a source that Triton's launchers read.
    source = SimpleNamespace(signature=dict(record.signature), constants=dict(record.constants))
    kernel = compiler.CompiledKernel(source, group, record.name)
    kernel._init_handles()
    return kernel


def _has_compile_hooks() -> bool:
    """Whether Triton would not simply take the usual binary from its cache.

    That is so if its interpreter or a debug mode is on, the cache is off, binaries are overridden,
    or hooks or listeners observe compilations.
    """
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
