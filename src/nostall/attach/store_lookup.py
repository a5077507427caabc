"""Look up the optimised replacement of a cubin in the store, for all attachment points.

The user's program must keep running: if the store cannot be used, the program runs the original
and the reason is logged once per process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from nostall.attach import gpu_name
from nostall.attach.warning import warn_once
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.store import Store, StoredCubin
from nostall.store.artefacts import content_hash

MODELLED = "NOSTALL_MODELLED"
"""Environment variable: 1 also allows records that were never measured."""
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
    try:
        lookup = Store().lookup(
            original,
            architecture=architecture,
            gpu=gpu or gpu_name.current(),
            kernel=kernel,
            modelled=modelled or os.environ.get(MODELLED) == "1",
            dependent=dependent,
        )
    except Exception as error:  # any error: without nostall the user's program would run
        warn_once(f"the store cannot be used, originals run: {error}")
        return None
    if lookup.cubin is None:
        for reason in lookup.rejections:
            warn_once(f"the original of {content_hash(original)[:12]} runs: {reason}")
    _log_lookup(where, original, lookup.cubin)
    return lookup.cubin


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
