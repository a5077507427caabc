"""One question for all attachment points: is there something better than these exact bytes?

A program that runs must go on running: whatever is wrong with the store, the answer is then the
original, and the reason is said once per process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from nostall.attach import gpu_name
from nostall.attach.warning import warn_once
from nostall.core.versions import TRITON_VERSIONS, knows_triton
from nostall.store import Found, Store
from nostall.store.artefacts import name

MODELLED = "NOSTALL_MODELLED"
LOG = "NOSTALL_ATTACH_LOG"


def deliver(
    original: bytes,
    where: str,
    *,
    architecture: str | None = None,
    gpu: str | None = None,
    kernel: str | None = None,
    modelled: bool = False,
) -> Found | None:
    """The optimised cubin that may be used in place of ``original``, or None; never raises.

    ``where`` names the attachment point in the log; without ``gpu`` the current one is asked.
    Modelled records count with ``modelled`` or ``NOSTALL_MODELLED=1``.
    """
    try:
        looked = Store().lookup(
            original,
            architecture=architecture,
            gpu=gpu or gpu_name.current(),
            kernel=kernel,
            modelled=modelled or os.environ.get(MODELLED) == "1",
        )
    except Exception as error:  # the user's program is worth more than any gain
        warn_once(f"the store cannot be used, originals run: {error}")
        return None
    if looked.found is None:
        for reason in looked.refused:
            warn_once(f"the original of {name(original)[:12]} runs: {reason}")
    _note(where, original, looked.found)
    return looked.found


def fits_triton(version: str) -> bool:
    """Whether this Triton may be attached to; if not, it is said once and originals run."""
    if knows_triton(version):
        return True
    warn_once(
        f"Triton {version} is not known to this version of nostall ({TRITON_VERSIONS[0]} to "
        f"{TRITON_VERSIONS[-1]} are); nothing is attached, originals run"
    )
    return False


def _note(where: str, original: bytes, found: Found | None) -> None:
    """One line of JSON in the file that ``NOSTALL_ATTACH_LOG`` names: what was handed out."""
    path = os.environ.get(LOG)
    if not path:
        return
    line = {
        "process": os.getpid(),
        "where": where,
        "original": name(original),
        "delivered": found.row.optimised if found is not None else None,
        "record": found.row.id if found is not None else None,
        "kind": found.row.kind if found is not None else None,
    }
    try:
        with Path(path).open("a") as log:
            log.write(json.dumps(line) + "\n")
    except OSError as error:
        warn_once(f"cannot write {path} ({LOG}): {error.strerror}")
