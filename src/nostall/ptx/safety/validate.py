"""Entry points of the validator: prove that a candidate computes what the original computes.

A candidate is accepted if

- its directives, declarations, labels and functions are the original's (:mod:`.frame`,
  :mod:`.blocks`), apart from kernel names, register budgets and cache hints;
- each block has the original's instructions, and each of them reads the same values, memory and
  effects as there; at the end of the block all registers, dead ones too, memory and effects are
  equal (:mod:`.execution`).

By induction over the executed blocks both texts then compute the same.  What this relies on:

- **Weak loads** may be exchanged, even of one location.  No axiom of the PTX memory model orders
  two weak reads of a thread: SC-per-location is about sets of pairwise morally strong operations,
  and a weak read and another thread's write are not morally strong (PTX ISA, memory consistency
  model; Lustig et al., ASPLOS 2019).  A weak load and a store of one space keep their order, and
  so does each weak access with all strong ones, fences and barriers.
- **State spaces** with explicit names are disjoint; a generic address may be in each of them.
- **ld.const, ld.global.nc** and kernel parameters are constant during a grid; only
  ``griddepcontrol``, calls and unknown instructions order the first two.
- **Contraction**: whether ptxas makes an FMA of ``mul.f32`` and ``add.f32`` without ``.rn`` may
  depend on their order; PTX allows both, so bits are compared on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.ptx.safety import frame, pseudo_registers
from nostall.ptx.safety.blocks import Block, cut_blocks, jump_targets
from nostall.ptx.safety.compound import Compound
from nostall.ptx.safety.declarations import (
    Declared,
    Header,
    declared_names,
    is_declaration,
    read_header,
)
from nostall.ptx.safety.execution import Machine
from nostall.ptx.safety.explain import BlockPair, content_finding, layout_finding, value_finding
from nostall.ptx.safety.function import FunctionReader
from nostall.ptx.safety.instruction import Instruction
from nostall.ptx.safety.opcodes import Effect
from nostall.ptx.safety.reader import (
    ModuleItem,
    Unreadable,
    line_of,
    normalise,
    read_module,
    strip_comments,
)
from nostall.ptx.safety.scope import MODULE_PATH, Registers, Scope
from nostall.ptx.safety.verdict import Finding, Verdict

MAX_FINDINGS = 20
"""Findings of a verdict; a wrong block makes one."""


def validate(original: str, candidate: str) -> Verdict:
    """Check whether the PTX text ``candidate`` computes what ``original`` does.

    A candidate that cannot be read is refused.  Raises :class:`~nostall.core.errors.BadInput` if
    the original cannot be read, or if an argument is no text.
    """
    return Validator(original).check(candidate)


class Validator:
    """Checks candidates against one original, which is read and executed once."""

    def __init__(self, original: str) -> None:
        """Raises :class:`~nostall.core.errors.BadInput` if ``original`` cannot be read."""
        self._text = strip_comments(_require_text(original, "original"))
        self._dynamic_budget = frame.has_dynamic_budget(self._text)
        try:
            self._items = read_module(self._text)
            scope = _module_scope(self._items)
            functions = [i for i in self._items if i.kind == "function"]
            self._functions = [_Function(item, scope) for item in functions]
        except Unreadable as error:
            line = line_of(self._text, error.offset)
            raise BadInput(
                f"line {line} of the original PTX cannot be read: {error.reason}; pass a PTX text "
                "that ptxas accepts"
            ) from error

    @property
    def unknown_opcodes(self) -> Counter[str]:
        """Opcodes of the original that the validator has no rule for, without calls."""
        return Counter(
            i.opcode
            for function in self._functions
            for i in function.leaves()
            if i.effect is Effect.UNKNOWN and i.opcode.partition(".")[0] != "call"
        )

    def check(self, candidate: str) -> Verdict:
        """The verdict about a candidate."""
        stripped = strip_comments(_require_text(candidate, "candidate"))
        text = stripped
        try:
            renaming = frame.undo_renaming(self._text, stripped)
            text = renaming.text
            items = read_module(text)
            frame.compare_items(self._items, items, text)
            return self._check_functions(items, text, renaming.differences)
        except Unreadable as error:
            line = line_of(text, error.offset)
            end = text.find("\n", error.offset)
            excerpt = normalise(text[error.offset : end if end >= 0 else None])
            finding = Finding("unreadable", "", line, excerpt, error.reason)
        except frame.NotAllowed as difference:
            finding = difference.finding
        return Verdict((finding,))

    def _check_functions(
        self, items: list[ModuleItem], text: str, differences: tuple[str, ...]
    ) -> Verdict:
        findings: list[Finding] = []
        checked = 0
        new_items = [item for item in items if item.kind == "function"]
        for function, item in zip(self._functions, new_items, strict=True):
            differences += self._compare_headers(function, item, text)
            result = function.compare(item, text)
            findings += result.findings
            differences += result.differences
            checked += result.checked
        return Verdict(tuple(findings[:MAX_FINDINGS]), differences, checked)

    def _compare_headers(self, function: _Function, item: ModuleItem, text: str) -> tuple[str, ...]:
        """Allowed differences between two function headers."""
        old, old_budget = frame.split_budget(function.item.text)
        new, new_budget = frame.split_budget(item.text)
        name, line = function.header.name, line_of(text, item.offset)
        budgets = frame.budget_differences(name, old_budget, new_budget)
        if old != new or (budgets and not function.header.is_entry):
            reason = f"the original's header is {old}; headers must be equal"
            raise frame.NotAllowed(Finding("header", name, line, new, reason))
        if budgets and self._dynamic_budget:
            reason = (
                f"{budgets[0]}; the module uses setmaxnreg, which may then wait for ever, so the "
                "register budget must be the original's"
            )
            raise frame.NotAllowed(Finding("register-budget", name, line, new, reason))
        return budgets


@dataclass(frozen=True, slots=True)
class _Result:
    """The comparison of one function."""

    findings: list[Finding]
    differences: tuple[str, ...]
    checked: int


class _Function:
    """One function of the original, executed symbolically."""

    def __init__(self, item: ModuleItem, module: Scope) -> None:
        self.item = item
        self.header: Header = read_header(item)
        self._reader = FunctionReader(module, self.header.parameters, item)
        placed = self._reader.place(item)
        self._targets = jump_targets(placed)
        self.blocks = cut_blocks(placed, self._targets, item.offset)
        compounds = self._reader.compounds
        parts = [self.blocks, *(c.blocks for c in compounds)]
        self._machine = _machine([i for blocks in parts for b in blocks for i in b.instructions])
        self._executions = [self._machine.execute(b.instructions) for b in self.blocks]
        self._compound_executions = {
            c.instruction.number: [self._machine.execute(b.instructions) for b in c.blocks]
            for c in compounds
        }
        self._reader.freeze(self._is_equal)
        self._hints = sorted(_spellings(self.blocks))
        self._all_numbers = frozenset(i.number for b in self.blocks for i in b.instructions)

    def compare(self, item: ModuleItem, text: str) -> _Result:
        """Compare a candidate's version of the function; ``text`` is the candidate's."""
        blocks = cut_blocks(self._reader.place(item), self._targets, item.offset)
        findings: list[Finding] = []
        for old, execution, new in zip(self.blocks, self._executions, blocks, strict=False):
            pair = BlockPair(old, execution, new, self.header.name, text)
            finding = self._compare_blocks(pair)
            if finding is not None:
                findings.append(finding)
        if len(blocks) != len(self.blocks) and not findings:
            line = line_of(text, item.offset)
            reason = f"the function has {len(blocks)} blocks; the original has {len(self.blocks)}"
            findings.append(Finding("layout", self.header.name, line, "", reason))
        hints = sorted(_spellings(blocks))
        differences = () if findings else self._hint_differences(hints)
        return _Result(findings, differences, len(hints))

    def _compare_blocks(self, pair: BlockPair) -> Finding | None:
        if pair.original.layout != pair.candidate.layout:
            return layout_finding(pair)
        instructions, execution = pair.candidate.instructions, pair.execution
        if sorted(i.number for i in instructions) != execution.instructions:
            return content_finding(pair, self._all_numbers)
        position = self._machine.follow(instructions, execution)
        if position is None:
            return None
        return value_finding(pair, position, self._machine, self._reader.registers)

    def _is_equal(self, compound: Compound, blocks: Sequence[Block]) -> bool:
        """Whether blocks with the signature of a compound statement compute the same."""
        executions = self._compound_executions[compound.instruction.number]
        return all(
            self._machine.follow(block.instructions, execution) is None
            for block, execution in zip(blocks, executions, strict=True)
        )

    def _hint_differences(self, hints: list[tuple[int, str]]) -> tuple[str, ...]:
        if hints == self._hints:
            return ()
        changed = sum((Counter(hints) - Counter(self._hints)).values())
        return (f"{self.header.name} has other cache hints at {changed} loads and stores",)

    def leaves(self) -> Iterator[Instruction]:
        """All instructions, those of compound statements instead of these."""
        return _leaves(i for block in self.blocks for i in block.instructions)


def _leaves(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        if instruction.inner:
            yield from _leaves(instruction.inner)
        else:
            yield instruction


def _spellings(blocks: Iterable[Block]) -> Iterator[tuple[int, str]]:
    """(number, hints) of each instruction."""
    for instruction in _leaves(i for block in blocks for i in block.instructions):
        yield instruction.number, instruction.hints


def _machine(instructions: list[Instruction]) -> Machine:
    """The machine for a function: accesses of asynchronous operands read their state as well."""
    in_flight = frozenset[int]().union(*(i.in_flight for i in instructions))
    reads: dict[int, tuple[int, ...]] = {}
    writes: dict[int, tuple[int, ...]] = {}
    for instruction in instructions:
        known = instruction.reads
        is_access = not in_flight.isdisjoint((*instruction.reads, *instruction.writes))
        if is_access and pseudo_registers.ASYNCHRONOUS not in known:
            known = (*known, pseudo_registers.ASYNCHRONOUS)
        reads[instruction.number] = known
        writes[instruction.number] = instruction.writes
    return Machine(reads, writes)


def _module_scope(items: list[ModuleItem]) -> Scope:
    """The names that the module declares outside functions."""
    declared: list[Declared] = []
    for item in items:
        if item.kind in ("function", "prototype"):
            declared.append(Declared(read_header(item).name, "function"))
        elif item.kind == "directive" and is_declaration(item.text):
            declared += declared_names(item.text, item.offset)
    return Scope(None, MODULE_PATH, Registers(), tuple(declared))


def _require_text(value: object, role: str) -> str:
    if not isinstance(value, str):
        raise BadInput(
            f"the {role} is a {type(value).__name__}; pass the PTX text itself, for a file "
            "Path(...).read_text()"
        )
    return value
