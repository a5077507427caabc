"""Verify a cubin that was made by a recipe: its PTX, its assembly and its machine code."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.ptx.schedule.levers import Levers
from nostall.sass import Verdict, validate, verify
from nostall.sass.binary.code_hash import code_sha256
from nostall.tuning.assembler.proof import make_check
from nostall.tuning.assembler.recipes.recipe import Recipe, hash_text, move_instructions, reassemble
from nostall.tuning.assembler.space import make_space


@dataclass(frozen=True)
class RecipeVerdict:
    """Whether a cubin is the safe result of a recipe."""

    objection: str
    """Why the cubin is refused; empty if it is safe."""
    checked: int
    """Native instructions that were checked."""
    is_rebuilt: bool
    """Whether a ptxas of this machine made the same machine code from the proved PTX."""
    note: str
    """Why the cubin was not built again; empty if it was."""

    @property
    def safe(self) -> bool:
        return not self.objection


def verify_recipe(
    recipe: Recipe, ptx: str, cubin: bytes, installed: list[Assembler] | None = None
) -> RecipeVerdict:
    """Check that ``cubin`` is the safe result of ``recipe`` for ``ptx``.

    - The PTX in its new order is proved equal to ``ptx``.
    - A ptxas of the recipe's version makes the same machine code from it.  If this machine has
      none, the verdict says so: then the cubin's link to its PTX rests on the recipe alone.
    - The verifier of machine code finds no hazard in the kernel, and proves moves of native
      instructions after the assembly, if there are any.

    ``installed``: versions of ptxas (None: those that are found).
    """
    verdict = kernel_verdict(cubin, recipe.kernel)

    def refuse(objection: str) -> RecipeVerdict:
        return RecipeVerdict(objection, verdict.checked, False, "")

    if code_sha256(cubin) != recipe.code:
        return refuse("the cubin's machine code is not that of the recipe (another sha256)")
    if verdict.findings:
        return refuse(f"the verifier of machine code rejects it: {verdict.findings[0]}")
    try:
        if objection := prove_ptx(recipe, ptx):
            return refuse(objection)
        note = _rebuild_any(recipe, ptx, find_assemblers() if installed is None else installed)
    except BadInput as error:
        return refuse(str(error))
    return RecipeVerdict("", verdict.checked, not note, note)


def prove_ptx(recipe: Recipe, ptx: str) -> str:
    """Why the PTX of a recipe is not proved equal to ``ptx``, or an empty text.

    Raises :class:`BadInput` if the recipe is not for this PTX.
    """
    if hash_text(ptx) != recipe.ptx:
        raise BadInput(
            f"the recipe is for another PTX (sha256 {recipe.ptx[:12]}, not {hash_text(ptx)[:12]}); "
            "give the PTX that was tuned"
        )
    space = make_space(ptx, recipe.kernel, Levers())
    state = space.load(recipe.state)
    text = space.text(state)
    if hash_text(text) != recipe.candidate_ptx:
        return "the order in the recipe gives another PTX; tune the kernel again"
    # The user who tuned the kernel with a trigger stated that its dependents wait.
    check = make_check(ptx, dependents_wait="trigger" in state.dependent_launch)
    objection = check(text) if text != ptx else ""
    return f"the PTX validator rejects the new order: {objection}" if objection else ""


def kernel_verdict(cubin: bytes, kernel: str) -> Verdict:
    """The verdict on one kernel; findings in other functions of the file do not count."""
    verdict = validate(cubin)
    findings = tuple(f for f in verdict.findings if f.function == kernel)
    return Verdict(findings, verdict.checked)


def _rebuild_any(recipe: Recipe, ptx: str, installed: list[Assembler]) -> str:
    """Build the recipe with any ptxas of its version; returns why that is not possible here.

    Program files of one version differ by package, so the file's hash need not agree.  Raises
    :class:`BadInput` if a result differs from the recipe.
    """
    same = [a for a in installed if a.version == recipe.ptxas_version]
    same.sort(key=lambda assembler: assembler.sha256 != recipe.ptxas)
    if not same and recipe.schedule is not None:
        raise BadInput(
            f"its moves of native instructions cannot be verified without ptxas "
            f"{recipe.ptxas_version}; install it"
        )
    if not same:
        known = ", ".join(a.version for a in installed) or "(none)"
        return (
            f"the recipe needs ptxas {recipe.ptxas_version}, and this machine has {known}; the "
            "cubin that was measured is verified as it is"
        )
    assembled = reassemble(recipe, ptx, lambda version: same[0], same_file=False)
    verdict = verify(assembled, move_instructions(recipe, assembled))
    if not verdict.safe:
        raise BadInput(f"the verifier rejects its moves: {verdict.findings[0]}")
    return ""
