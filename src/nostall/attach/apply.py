"""Environment of ``nostall apply``, in which an unchanged program uses optimised cubins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nostall.attach import gpu_name
from nostall.attach.store_lookup import LOG, MODELLED
from nostall.core.errors import BadInput, NostallError
from nostall.sass.binary import toolchain
from nostall.store.folder import home

CACHE_MANAGER = "nostall_triton_cache:Manager"
_SHIM = Path(__file__).resolve().parent / "shim"


def environment(
    inherited: Mapping[str, str], *, modelled: bool = False, log: Path | None = None
) -> dict[str, str]:
    """``inherited`` with variables that make Triton and Inductor use the store.

    ``modelled`` also allows records that were never measured.  ``log`` is the file for
    ``NOSTALL_ATTACH_LOG``.  Child processes of the program inherit all of this.

    Raises :class:`BadInput` if another Triton cache manager is set, because Triton takes only one.
    """
    current = inherited.get("TRITON_CACHE_MANAGER")
    if current not in (None, "", CACHE_MANAGER):
        raise BadInput(
            f"TRITON_CACHE_MANAGER is {current!r} already, and Triton takes one only; unset it, or "
            "use @nostall.optimize in the program"
        )
    paths = [p for p in inherited.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(_SHIM)]
    variables = {
        "TRITON_CACHE_MANAGER": CACHE_MANAGER,
        "PYTHONPATH": os.pathsep.join([str(_SHIM), *paths]),
        "NOSTALL_HOME": str(home(inherited).absolute()),
        # Inductor's static launcher reads cubins from Triton's cache folder without asking the
        # cache manager.
        "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
        MODELLED: "1" if modelled or inherited.get(MODELLED) == "1" else "0",
    }
    if log is not None:
        variables[LOG] = str(log.absolute())
    gpu = inherited.get(gpu_name.VARIABLE) or installed_gpu()
    if gpu is not None:
        variables[gpu_name.VARIABLE] = gpu
    return {**inherited, **variables}


def installed_gpu() -> str | None:
    """The name of this machine's GPUs, or None if they differ or nvidia-smi fails.

    Compile workers need it: unlike processes with a CUDA context, they cannot query the name.
    """
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        lines = toolchain.run(query, "nvidia-smi").splitlines()
    except NostallError:
        return None
    names = {line.strip() for line in lines if line.strip()}
    return names.pop() if len(names) == 1 else None
