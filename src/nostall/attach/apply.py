"""``nostall apply``: the environment in which an unchanged program picks results up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nostall.attach import gpu_name
from nostall.attach.delivery import LOG, MODELLED
from nostall.core.errors import BadInput, NostallError
from nostall.sass.binary import toolchain
from nostall.store.folder import home

MANAGER = "nostall_triton_cache:Manager"
_SHIM = Path(__file__).resolve().parent / "shim"


def environment(
    inherited: Mapping[str, str], *, modelled: bool = False, log: Path | None = None
) -> dict[str, str]:
    """``inherited`` with what makes Triton and Inductor ask the store; children inherit it too.

    Raises :class:`BadInput` when another cache manager is in use: only one can be.
    """
    taken = inherited.get("TRITON_CACHE_MANAGER")
    if taken not in (None, "", MANAGER):
        raise BadInput(
            f"TRITON_CACHE_MANAGER is {taken!r} already, and Triton takes one only; unset it, or "
            "use @nostall.optimize in the program"
        )
    paths = [p for p in inherited.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(_SHIM)]
    wanted = {
        "TRITON_CACHE_MANAGER": MANAGER,
        "PYTHONPATH": os.pathsep.join([str(_SHIM), *paths]),
        "NOSTALL_HOME": str(home(inherited).absolute()),
        # It would load cubins from Triton's cache folder directly, past any cache manager.
        "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
        MODELLED: "1" if modelled or inherited.get(MODELLED) == "1" else "0",
    }
    if log is not None:
        wanted[LOG] = str(log.absolute())
    gpu = inherited.get(gpu_name.VARIABLE) or installed_gpu()
    if gpu is not None:
        wanted[gpu_name.VARIABLE] = gpu
    return {**inherited, **wanted}


def installed_gpu() -> str | None:
    """The name that all GPUs of this machine have, or None when they differ or cannot be asked.

    Processes with a CUDA context ask it themselves; this is for workers that have none.
    """
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        lines = toolchain.run(query, "nvidia-smi").splitlines()
    except NostallError:
        return None
    names = {line.strip() for line in lines if line.strip()}
    return names.pop() if len(names) == 1 else None
