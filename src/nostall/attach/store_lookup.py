"""Look up the optimised replacement of a cubin in the store, for all attachment points.

The user's program must keep running: if the store cannot be used, the program runs the original
and the reason is logged once per process.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from nostall.attach import gpu_name
from nostall.attach.warning import warn_once
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.store import Store, StoredCubin
from nostall.store.artefacts import CUBIN, content_hash

MODELLED = "NOSTALL_MODELLED"
"""Environment variable: 1 also allows records that were never measured."""
_EXACT_VERSION = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
_RELEASE = re.compile(rb"\x04\x37\x04\x00([\x50-\xff])\0\0\0")
"""The note of ptxas 13.0 and later, and the attribute of all with ten times the release."""
LOG = "NOSTALL_ATTACH_LOG"
"""Environment variable: a file to which each look-up appends one line of JSON."""


def find_replacement(
    original: bytes,
    where: str,
    *,
    architecture: str | None = None,
    gpu: str | None = None,
    kernel: str | None = None,
    modelled: bool = False,
    dependent: bool = False,
) -> StoredCubin | None:
    """The optimised cubin to use in place of ``original``, or None; never raises.

    ``where`` names the attachment point in the log.  ``gpu`` defaults to the current GPU.
    ``modelled``, or ``NOSTALL_MODELLED=1``, also allows records that were never measured.
    ``dependent``: whether the attachment point can make dependent launches.
    """
    modelled = modelled or os.environ.get(MODELLED) == "1"
    try:
        store, gpu = Store(), gpu or gpu_name.current()
        lookup = store.lookup(
            original,
            architecture=architecture,
            gpu=gpu,
            kernel=kernel,
            modelled=modelled,
            dependent=dependent,
        )
        if lookup.cubin is None and not lookup.rejections:
            _warn_of_other_compiler(store, original, gpu, modelled)
    except Exception as error:  # any error: without nostall the user's program would run
        warn_once(f"the store cannot be used, originals run: {error}")
        return None
    if lookup.cubin is None:
        for reason in lookup.rejections:
            warn_once(f"the original of {content_hash(original)[:12]} runs: {reason}")
    _log_lookup(where, original, lookup.cubin)
    return lookup.cubin


def _warn_of_other_compiler(store: Store, original: bytes, gpu: str | None, modelled: bool) -> None:
    """Say so if the kernel has records, but all of them of what other compilers made."""
    rows = [
        row
        for row in store.rows()
        if f".text.{row.kernel}\0".encode() in original
        and (modelled if row.kind == "modelled" else row.gpu == gpu)
    ]
    triton = getattr(sys.modules.get("triton"), "__version__", "")
    here, there = _made_by(original, f"triton {triton}" if triton else ""), ""
    for row in rows:
        compiler = store.provenance(row).toolchain.get("compiler", "")
        is_known = bool(triton) and compiler.startswith("triton ")
        there = _made_by(store.artefacts.get(row.original, CUBIN), compiler if is_known else "")
        if there in here:
            return
    if rows:
        row = rows[-1]
        warn_once(
            f"{row.kernel} runs as {here} made it: the store's record {row.id[:12]} "
            f"({row.ratio:.3f}x) is of {there}; search again with `nostall tune`, or see what "
            "changed with `nostall regress --baseline store`"
        )


def _made_by(cubin: bytes, compiler: str) -> str:
    """The ptxas that made a cubin, and the compiler that called it if it is known."""
    exact, release = _EXACT_VERSION.search(cubin), _RELEASE.search(cubin)
    number = release[1][0] if release is not None else 0
    version = exact[1].decode() if exact is not None else f"{number // 10}.{number % 10}"
    return " of ".join(filter(None, (f"ptxas {version}", compiler)))


def check_triton_version(version: str) -> bool:
    """Whether nostall supports this Triton version; logs a warning if not."""
    if supports_triton(version):
        return True
    warn_once(
        f"Triton {version} is not supported by this version of nostall ({TRITON_VERSIONS[0]} to "
        f"{TRITON_VERSIONS[-1]} are); nothing is attached, originals run"
    )
    return False


def _log_lookup(where: str, original: bytes, cubin: StoredCubin | None) -> None:
    """Append one line of JSON to the file that ``NOSTALL_ATTACH_LOG`` names."""
    path = os.environ.get(LOG)
    if not path:
        return
    line = {
        "process": os.getpid(),
        "where": where,
        "original": content_hash(original),
        "delivered": cubin.row.optimised if cubin is not None else None,
        "record": cubin.row.id if cubin is not None else None,
        "kind": cubin.row.kind if cubin is not None else None,
        "source": cubin.row.source if cubin is not None else None,
        "dependent_launch": cubin.dependent if cubin is not None else None,
    }
    try:
        with Path(path).open("a") as log:
            log.write(json.dumps(line) + "\n")
    except OSError as error:
        warn_once(f"cannot write {path} ({LOG}): {error.strerror}")
