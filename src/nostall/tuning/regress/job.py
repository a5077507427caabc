"""Job of ``nostall regress``: compare two binaries of a kernel and look for what was lost.

Of an older ptxas: PTX that it accepts, the proof that nothing newer is used, and known faults.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nostall.core import Budget, LaunchSpec
from nostall.core.errors import BadInput, MissingPart, NostallError
from nostall.ptx.assemble.builder import BuildSpec
from nostall.ptx.assemble.command import Command
from nostall.ptx.assemble.known_faults import describe_faults, known_faults
from nostall.ptx.assemble.ptxas import PtxasRun, run_ptxas
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
from nostall.ptx.program.module import parse
from nostall.ptx.schedule.state import PtxState
from nostall.sass.binary.code_hash import code_sha256, rename_kernel
from nostall.sass.binary.cubin import Cubin
from nostall.store import Row, Store
from nostall.tuning.assembler.candidate import hazards
from nostall.tuning.assembler.commands import find_command
from nostall.tuning.assembler.description import describe_levers
from nostall.tuning.assembler.job import make_levers
from nostall.tuning.assembler.proof import make_check
from nostall.tuning.assembler.recipes.recipe import Recipe, StoredRecipe, make_recipe
from nostall.tuning.assembler.space import make_space
from nostall.tuning.regress.losses import Loss, find_losses, name_causes, shares
from nostall.tuning.regress.properties import Properties, read_properties
from nostall.tuning.regress.recover import Goal, Recovery, recover
from nostall.tuning.sources.source import Source

_VERSION = re.compile(r"^(\s*\.version\s+)(\d+\.\d+)", re.MULTILINE)
_HIGHEST = re.compile(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'")
"""What ptxas says of PTX of a newer version than its own."""


@dataclass(frozen=True)
class Assembled:
    """A run of ptxas on PTX whose ``.version`` it accepts."""

    run: PtxasRun
    lowered: str = ""
    """How ``.version`` was lowered, such as ``9.4 → 9.2``; "" if it was not."""


@dataclass(frozen=True)
class Offer:
    """Whether an older ptxas may be used in the place of the newer one."""

    version: str
    offered: bool
    reason: str


def assemble_with(ptx: str, command: Command, assembler: Assembler, newer: Assembler) -> Assembled:
    """Assemble with ``assembler``; PTX that is too new for it gets the ``.version`` that it knows.

    That is done only with a proof by ``newer``, which refuses instructions that need more than
    their ``.version``: it makes the same machine code of both texts.  Raises :class:`BadInput`
    without the proof, and if ``assembler`` refuses the PTX.
    """
    run = _run(ptx, command, assembler)
    text, lowered = lower_version(ptx, run)
    if lowered:
        _prove(ptx, text, command, newer, lowered)
        run = _run(text, command, assembler)
    if run.status != "assembled":
        raise BadInput(f"ptxas {assembler.version} refuses this PTX: {run.detail}; give another")
    return Assembled(run, lowered)


def lower_version(ptx: str, run: PtxasRun) -> tuple[str, str]:
    """The PTX with the ``.version`` that a run of ptxas asks for, and the change in words.

    The words are empty if the run did not refuse the PTX's ``.version``.
    """
    highest, present = _HIGHEST.search(run.detail), _VERSION.search(ptx)
    if highest is None or present is None:
        return ptx, ""
    version = highest.group(1)
    text = f"{ptx[: present.start(2)]}{version}{ptx[present.end(2) :]}"
    return text, f"{present.group(2)} → {version}"


def _prove(ptx: str, text: str, command: Command, newer: Assembler, lowered: str) -> None:
    before, after = (_run(each, command, newer) for each in (ptx, text))
    if after.status != "assembled":
        raise BadInput(
            f"PTX .version {lowered} is not possible: {after.detail}; give a newer baseline"
        )
    if code_sha256(before.cubin) != code_sha256(after.cubin):
        raise BadInput(
            f"PTX .version {lowered} is not proved to mean the same: ptxas {newer.version} makes "
            "other machine code of it; give a newer baseline"
        )


def _run(ptx: str, command: Command, assembler: Assembler) -> PtxasRun:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        return run_ptxas(assembler, ptx, command.arguments(), Path(folder))


def offer_older(
    ptx: str, kernel: str, command: Command, older: Assembler, newer: Assembler
) -> Offer:
    """Whether ``older`` may assemble the kernel: no known wrong code, and the verifier agrees."""
    faults = known_faults(parse(ptx), older.version, command.target)
    if faults:
        return Offer(older.version, False, f"it is reported to make {describe_faults(faults)}")
    if version_numbers(older.version) >= version_numbers(newer.version):
        return Offer(older.version, False, f"it is not older than ptxas {newer.version}")
    try:
        assembled = assemble_with(ptx, command, older, newer)
    except BadInput as error:
        return Offer(older.version, False, str(error))
    if found := hazards(assembled.run.cubin, kernel):
        return Offer(older.version, False, f"the verifier rejects its machine code: {found}")
    reason = "no wrong code is known for the patterns of this kernel"
    if assembled.lowered:
        reason += (
            f"; it needs PTX .version {assembled.lowered}, of which ptxas {newer.version} makes "
            "the same machine code"
        )
    return Offer(older.version, True, reason)


_TARGET = "--gpu-name="
Answer = Literal["same code", "no loss", "recovered", "in part", "not recoverable", "not searched"]
"""``in part``: a candidate is nearer to the older binary, but still has a loss."""


@dataclass(frozen=True)
class Binary:
    """One binary of a kernel."""

    label: str
    """Such as ``ptxas 13.2.86``, or a file."""
    cubin: bytes
    properties: Properties
    assembler: Assembler | None = None
    """The ptxas that made it here, if one did."""


@dataclass(frozen=True)
class Case:
    """A kernel with its two binaries."""

    source: Source
    command: Command | None
    """How its PTX is assembled; None without PTX."""
    older: Binary
    newer: Binary


@dataclass(frozen=True)
class Report:
    """What was lost, why, and what the search found."""

    case: Case
    losses: tuple[Loss, ...]
    causes: tuple[str, ...]
    recovery: Recovery | None = None
    """None if there was nothing to look for, or no PTX to search."""
    offer: Offer | None = None
    """The last resort; None if there is no older ptxas, or nothing to recover."""
    recipe: Recipe | None = None
    """How the best candidate is made again."""
    text: str = field(default="", repr=False)
    """The PTX of the best candidate."""

    @property
    def answer(self) -> Answer:
        """The result in one word."""
        if not self.losses:
            older, newer = self.case.older.properties, self.case.newer.properties
            return "same code" if older.words == newer.words else "no loss"
        if self.recovery is None:
            return "not searched" if self.case.command is not None else "not recoverable"
        if self.recovery.best is None:
            return "not recoverable"
        return "recovered" if self.recovery.recovered else "in part"

    def shares(self) -> dict[str, float]:
        """The part of each loss that the best candidate does not have."""
        best = self.recovery.best if self.recovery is not None else None
        older, newer = self.case.older.properties, self.case.newer.properties
        return shares(self.losses, older, best.properties if best is not None else newer)

    def left(self) -> tuple[Loss, ...]:
        """The losses of the best candidate."""
        best = self.recovery.best if self.recovery is not None else None
        return find_losses(self.case.older.properties, best.properties) if best else self.losses

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON document."""
        case, recovery = self.case, self.recovery
        document: dict[str, Any] = {
            "kernel": case.source.kernel,
            "origin": case.source.origin,
            "answer": self.answer,
            "losses": [{"name": x.name, "older": x.older, "newer": x.newer} for x in self.losses],
            "causes": list(self.causes),
            "older": {"label": case.older.label, **case.older.properties.to_json()},
            "newer": {"label": case.newer.label, **case.newer.properties.to_json()},
            "search": None,
            "older_assembler": None,
        }
        if recovery is not None:
            best = recovery.best
            document["search"] = {
                "recovered": self.shares(),
                "left": list(map(str, self.left())),
                "changes": describe_levers(best.candidate.state) if best else [],
                "candidates": dict(recovery.counts),
                "seconds": round(recovery.seconds, 2),
                "stopped": recovery.stopped,
                "found": best.properties.to_json() if best else None,
            }
        if self.offer is not None:
            document["older_assembler"] = vars(self.offer)
        return document


def find_ptxas(name: str, installed: Sequence[Assembler] | None = None) -> Assembler:
    """The ptxas with this version (or the start of one, such as 13.2), or in this file.

    Raises :class:`BadInput` if a file is no ptxas, and :class:`MissingPart` without the version.
    """
    if Path(name).is_file():
        if not os.access(name, os.X_OK):
            raise BadInput(
                f"{name} is no program; give the path of a ptxas, its version, or a .cubin"
            )
        return Assembler.of(Path(name).absolute())
    found = find_assemblers() if installed is None else installed
    wanted = version_numbers(name)
    matches = [a for a in found if wanted and version_numbers(a.version)[: len(wanted)] == wanted]
    if not matches:
        known = ", ".join(a.version for a in found) or "(none)"
        raise MissingPart(
            f"no ptxas {name} is installed; installed versions are {known}; give one of them or "
            "the path of a ptxas: pip download --no-deps nvidia-cuda-nvcc==13.2.86 has one"
        )
    return max(matches, key=lambda a: version_numbers(a.version))


def newer_binary(
    source: Source, ptxas: Assembler | None, installed: Sequence[Assembler] | None = None
) -> tuple[Command | None, Binary]:
    """The kernel as ``ptxas`` makes it (None: the compiler's own), and its command."""
    if source.ptx is None:
        if ptxas is not None:
            raise BadInput(
                f"{source.origin} has no PTX to assemble with ptxas {ptxas.version}; leave --ptxas "
                "out, or give a Triton kernel or a .ptx file"
            )
        properties = read_properties(source.cubin, source.kernel, source.launch)
        return None, Binary(Path(source.origin).name, source.cubin, properties)
    candidates = [ptxas] if ptxas is not None else installed
    compiler = find_command(source, find_assemblers() if candidates is None else candidates)
    assembler = compiler.assemblers[0]
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        run = run_ptxas(assembler, source.ptx, compiler.command.arguments(), Path(folder))
    return compiler.command, _binary(source, assembler, run)


def older_by_ptxas(
    source: Source, command: Command | None, ptxas: Assembler, newer: Binary
) -> Binary:
    """The kernel as an older ptxas makes it."""
    if source.ptx is None or command is None or newer.assembler is None:
        raise BadInput(
            f"{source.origin} has no PTX to assemble with ptxas {ptxas.version}; give the older "
            "binary: --baseline old.cubin"
        )
    assembled = assemble_with(source.ptx, command, ptxas, newer.assembler)
    return _binary(source, ptxas, assembled.run)


def older_by_cubin(source: Source, cubin: bytes, label: str) -> Binary:
    """An older binary of the kernel from a file or a store.

    The only kernel of the file may have another name: ptxas chooses by it.
    """
    parsed, new = Cubin.parse(cubin), Cubin.parse(source.cubin).sm
    if parsed.sm != new:
        raise BadInput(
            f"{label} is for sm_{parsed.sm}, and {source.origin} for sm_{new}; give a binary for "
            f"sm_{new}"
        )
    name = source.kernel
    kernels = [text.name for text in parsed.texts if text.is_kernel]
    if len(kernels) == 1 and kernels[0] != name:
        label, name = f"{label}:{kernels[0]}", kernels[0]
        if len(source.kernel) <= len(name):  # a launch needs the source's name
            cubin, name = rename_kernel(cubin, name, source.kernel), source.kernel
    return Binary(label, cubin, read_properties(cubin, name, source.launch))


def _binary(source: Source, assembler: Assembler, run: PtxasRun) -> Binary:
    resources = run.resources.get(source.kernel)
    spilled = resources.spill_bytes if resources else None
    properties = read_properties(run.cubin, source.kernel, source.launch, spill_bytes=spilled)
    return Binary(f"ptxas {assembler.version}", run.cubin, properties, assembler)


def newest_record(store: Store, source: Source) -> Row:
    """The newest record of a kernel; raises :class:`BadInput` if the store has none."""
    kernel, architecture = source.kernel, f"sm_{Cubin.parse(source.cubin).sm}"
    rows = [r for r in store.rows() if (r.kernel, r.architecture) == (kernel, architecture)]
    if not rows:
        known = ", ".join(sorted({row.kernel for row in store.rows()})[:5]) or "nothing"
        raise BadInput(
            f"the store at {store.root} has no record of {kernel!r} for {architecture}; it has: "
            f"{known}; `nostall tune TARGET --objective gpu` records one"
        )
    return max(rows, key=lambda row: row.created)


def stored_cases(
    store: Store, ptxas: Assembler | None, installed: Sequence[Assembler] | None = None
) -> Iterator[Case | str]:
    """The newest record of each kernel beside what a ptxas makes of its PTX now.

    ``ptxas``: None for the newest installed one.  A text says why a record cannot be compared.
    """
    found = find_assemblers() if installed is None else installed
    if ptxas is None and not found:
        raise MissingPart("no ptxas is installed; pip install triton, or set CUDA_HOME")
    assembler = ptxas or max(found, key=lambda a: version_numbers(a.version))
    newest: dict[tuple[str, str], Row] = {}
    for row in sorted(store.rows(), key=lambda row: row.created):
        newest[row.kernel, row.architecture] = row
    for row in newest.values():
        try:
            yield _stored_case(store, row, assembler)
        except NostallError as error:
            yield f"record {row.id[:12]}, {row.kernel}: {error}"


def _stored_case(store: Store, row: Row, assembler: Assembler) -> Case:
    contents = store.contents(row)
    label = f"record {row.id[:12]}"
    if contents.recipe is None:
        raise BadInput("it has no PTX; give the kernel: nostall regress TARGET")
    stored = StoredRecipe.from_bytes(contents.recipe)
    launch = contents.provenance.launch
    source = Source(
        contents.original,
        row.kernel,
        LaunchSpec.parse(launch, label) if launch is not None else None,
        label,
        contents.provenance.toolchain,
        stored.ptx,
    )
    command = _stored_command(stored.recipe)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        run = run_ptxas(assembler, stored.ptx, command.arguments(), Path(folder))
    if run.status != "assembled":
        raise BadInput(run.detail)
    older = older_by_cubin(source, contents.original, f"{label}, as compiled")
    return Case(source, command, older, _binary(source, assembler, run))


def _stored_command(recipe: Recipe) -> Command:
    """The compiler's command in a recipe: its arguments without the winner's."""
    own = len(PtxState.load(recipe.state).options)
    arguments = recipe.arguments[: len(recipe.arguments) - own]
    targets = [a.partition("=")[2] for a in arguments if a.startswith(_TARGET)]
    if len(targets) != 1:
        raise BadInput("its recipe names no architecture; tune the kernel again")
    return Command(tuple(a for a in arguments if not a.startswith(_TARGET)), targets[0])


def compare(case: Case, budget: Budget | None, seed: int = 0) -> Report:
    """Compare the binaries; with a budget, search the newer ptxas's input for what was lost.

    An older ptxas is looked at only if the search does not recover everything.
    """
    older, newer = case.older.properties, case.newer.properties
    losses = find_losses(older, newer)
    report = Report(case, losses, tuple(name_causes(older, newer)))
    if not losses or budget is None or case.command is None or case.newer.assembler is None:
        return report
    ptx = case.source.ptx
    assert ptx is not None
    source = case.source
    levers = make_levers(source.kernel, newer.registers, source.launch, [case.newer.assembler])
    spec = BuildSpec(
        ptx,
        source.kernel,
        case.command,
        (case.newer.assembler,),
        partial(make_space, levers=levers),
        make_check,
    )
    space = make_space(ptx, source.kernel, levers)
    found = recover(spec, space, Goal(older, newer, losses, source.launch), budget, seed)
    report = replace(report, recovery=found)
    if found.best is not None:
        candidate = found.best.candidate
        text = space.text(candidate.state)
        report = replace(report, recipe=make_recipe(spec, candidate), text=text)
    if found.recovered or case.older.assembler is None:
        return report
    offer = offer_older(
        ptx, source.kernel, case.command, case.older.assembler, case.newer.assembler
    )
    return replace(report, offer=offer)
