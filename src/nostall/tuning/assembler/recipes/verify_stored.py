"""Verify a record of the store whose cubin was assembled anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nostall.core.errors import BadInput
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.sass.binary.code_hash import code_sha256
from nostall.tuning.assembler.recipes.recipe import StoredRecipe
from nostall.tuning.assembler.recipes.reverify import verify_recipe


@dataclass(frozen=True)
class Reassembly:
    """Whether a cubin is what ptxas makes of the PTX of its original."""

    objection: str
    """Why the cubin is refused; empty if it is safe."""
    unproved: str
    """What this machine cannot check; empty if the cubin and its original were made again."""
    checked: int = 0
    """Native instructions that were checked."""


def verify_stored(
    data: bytes, original: bytes, optimised: bytes, installed: Sequence[Assembler] | None = None
) -> Reassembly:
    """Verify a record whose cubin was assembled anew.

    The new order of the PTX is proved equal, ptxas makes ``optimised`` from it, and ptxas makes
    ``original`` from the PTX as it was; else the PTX might be that of another kernel.

    ``installed``: versions of ptxas (None: those that are found).  Raises :class:`BadInput` if
    ``data`` is not a recipe.
    """
    stored = StoredRecipe.from_bytes(data)
    known = list(find_assemblers() if installed is None else installed)
    verdict = verify_recipe(stored.recipe, stored.ptx, optimised, known)
    if not verdict.safe:
        return Reassembly(verdict.objection, "")
    try:
        unproved = verdict.note or _unproved_original(stored, original, known)
    except BadInput as error:
        return Reassembly(str(error), "")
    return Reassembly("", unproved, verdict.checked)


def _unproved_original(stored: StoredRecipe, original: bytes, known: Sequence[Assembler]) -> str:
    """Why it is not known that ``original`` is what ptxas makes of the PTX, or an empty text.

    Raises :class:`BadInput` if ptxas makes another cubin.
    """
    build = stored.recipe.original
    if build is None:
        return "no ptxas of the machine that tuned it made the original from its PTX"
    same = [a for a in known if a.version == build.ptxas_version]
    if not same:
        return f"the original needs ptxas {build.ptxas_version}, which this machine lacks"
    with TemporaryDirectory(prefix="nostall-") as folder:
        run = run_ptxas(same[0], stored.ptx, build.arguments, Path(folder))
    if run.status != "assembled" or code_sha256(run.cubin) != code_sha256(original):
        raise BadInput("the PTX in its recipe is not that of the original cubin")
    return ""
