"""Recipe of a cubin: the PTX, the moves and the exact run of ptxas that make it again."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from nostall.core.errors import BadInput
from nostall.core.launch import StrictModel
from nostall.ptx.assemble.builder import BuildSpec
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import Assembler, find_assembler
from nostall.ptx.schedule.levers import Levers
from nostall.sass import Program
from nostall.sass.binary.code_hash import code_sha256
from nostall.sass.schedule import ScheduleSpace
from nostall.store.provenance import Sha256
from nostall.tuning.assembler.candidate import Candidate, finish_cubin
from nostall.tuning.assembler.space import make_space

_OTHER_VERSION = "it was made by another version of nostall; tune the kernel again"


class OriginalBuild(StrictModel):
    """How ptxas makes the original cubin from its PTX."""

    ptxas_version: str
    arguments: tuple[str, ...]
    """Options of ptxas, without the files."""


class Recipe(StrictModel):
    """How a cubin is made again.  All hashes are sha256."""

    schema_version: Literal[1] = 1
    kernel: str
    """Name of the kernel in the PTX and in the cubin."""
    ptx: Sha256
    """The compiler's PTX."""
    state: str
    """The order and the settings, as the space of PTX programs writes them."""
    candidate_ptx: Sha256
    """The PTX with that order."""
    ptxas_version: str
    ptxas: Sha256
    """The program file of ptxas."""
    arguments: tuple[str, ...]
    """Options of ptxas, without the files."""
    assembled_code: Sha256
    """What the GPU runs of the assembled cubin; see :func:`code_sha256`."""
    schedule: str | None = None
    """Moves of native instructions after the assembly, as their space writes them."""
    code: Sha256
    """What the GPU runs of the result."""
    original: OriginalBuild | None = None
    """None if no ptxas was found that makes the original's code from the PTX."""

    def to_bytes(self) -> bytes:
        """The content of the JSON file."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    def with_ptx(self, ptx: str) -> bytes:
        """The content of a recipe file of the store; see :class:`StoredRecipe`."""
        return StoredRecipe(recipe=self, ptx=ptx).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, label: str) -> Recipe:
        """Parse the content of a JSON file; ``label`` names it in messages.

        Raises :class:`BadInput`, which names the field, if the content is invalid.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise BadInput(
                f"{label} is not a recipe: {field}: {first['msg']}; make it again with "
                "`nostall tune --strategy assembler`"
            ) from error


class StoredRecipe(StrictModel):
    """A recipe with the PTX it starts from, so that it can be verified alone."""

    schema_version: Literal[1] = 1
    recipe: Recipe
    ptx: str
    """The compiler's PTX."""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StoredRecipe:
        """Parse the content of a file.  Raises :class:`BadInput` if it is invalid."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise BadInput(f"the recipe is invalid: {field}: {first['msg']}") from error


def make_recipe(
    spec: BuildSpec,
    candidate: Candidate,
    schedule: str | None = None,
    cubin: bytes | None = None,
    *,
    reproduces: bool = False,
) -> Recipe:
    """The recipe of a candidate; ``schedule`` and ``cubin`` are those after moves of its SASS.

    ``reproduces``: whether the first assembler makes the original's code from the PTX.
    """
    own = OriginalBuild(
        ptxas_version=spec.assemblers[0].version, arguments=spec.command.arguments()
    )
    assembler = spec.assembler(candidate.state.assembler)
    return Recipe(
        kernel=spec.kernel,
        ptx=hash_text(spec.ptx),
        state=candidate.state.dump(),
        candidate_ptx=candidate.ptx_sha256,
        ptxas_version=assembler.version,
        ptxas=assembler.sha256,
        arguments=spec.arguments(candidate.state),
        assembled_code=candidate.code_sha256,
        schedule=schedule,
        code=code_sha256(candidate.cubin if cubin is None else cubin),
        original=own if reproduces else None,
    )


def rebuild(
    recipe: Recipe,
    ptx: str,
    find: Callable[[str], Assembler] = find_assembler,
    *,
    same_file: bool = True,
) -> bytes:
    """Make the cubin of a recipe again, and check each hash on the way.

    The result has the machine code of the recipe; whether it is safe is the caller's question.
    Arguments and errors are those of :func:`reassemble`.
    """
    return move_instructions(recipe, reassemble(recipe, ptx, find, same_file=same_file))


def reassemble(
    recipe: Recipe,
    ptx: str,
    find: Callable[[str], Assembler] = find_assembler,
    *,
    same_file: bool = True,
) -> bytes:
    """Assemble the PTX of a recipe; the cubin before moves of its native instructions.

    ``find`` finds ptxas by its version.  Without ``same_file``, another program file of that
    version is used as well, because packages of one version differ.  Raises :class:`BadInput` if
    the PTX, the assembler or a result differs from the recipe, and
    :class:`~nostall.core.errors.MissingPart` without that ptxas.
    """
    _require(recipe.ptx, hash_text(ptx), "the PTX", "give the PTX that was tuned")
    assembler = find(recipe.ptxas_version)
    advice = f"install the ptxas {recipe.ptxas_version} that made it"
    if same_file:
        _require(recipe.ptxas, assembler.sha256, f"{assembler.path}", advice)
    space = make_space(ptx, recipe.kernel, Levers())
    state = space.load(recipe.state)
    text = space.text(state)
    _require(recipe.candidate_ptx, hash_text(text), "the PTX in its new order", _OTHER_VERSION)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        run = run_ptxas(assembler, text, recipe.arguments, Path(folder))
    if run.status != "assembled":
        raise BadInput(f"the recipe of {recipe.kernel!r} cannot be assembled: {run.detail}")
    cubin = finish_cubin(run.cubin, state, recipe.kernel)
    _require(recipe.assembled_code, code_sha256(cubin), "the assembled code", _OTHER_VERSION)
    return cubin


def move_instructions(recipe: Recipe, assembled: bytes) -> bytes:
    """The result of a recipe from its assembled cubin: moves of native instructions, if any.

    Raises :class:`BadInput` if the result differs from the recipe.
    """
    cubin = assembled
    if recipe.schedule is not None:
        program = Program.from_cubin(assembled)
        schedules = ScheduleSpace(program, program.kernel(recipe.kernel))
        cubin = schedules.impose(schedules.load(recipe.schedule)).to_cubin()
    _require(recipe.code, code_sha256(cubin), "the result's code", _OTHER_VERSION)
    return cubin


def _require(expected: str, actual: str, what: str, advice: str) -> None:
    if expected != actual:
        raise BadInput(
            f"the recipe cannot be followed: {what} has sha256 {actual[:12]}, but the recipe says "
            f"{expected[:12]}; {advice}"
        )


def hash_text(text: str) -> str:
    """The sha256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()
