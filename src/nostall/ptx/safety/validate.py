"""Entry points of the validator: prove that a candidate computes what the original computes.

A candidate is accepted if

- its directives, declarations, labels and functions are the original's (:func:`compare_items`,
  :mod:`.reading.blocks`), apart from kernel names, register budgets, cache hints and instructions
  for dependent launch (:mod:`.dependent_launch`);
- each block has the original's instructions, and each of them reads the same values, memory and
  effects as there; at the end of the block all registers, dead ones too, memory and effects are
  equal (:mod:`.function_proof`).

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

Frame of a module: everything outside the instructions, and which differences are allowed.

The directives, declarations, function headers and their order are the original's.  A kernel may
have another name, and its register budget (``.maxnreg``, ``.minnctapersm``) may differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.ptx.errors import BadPtx
from nostall.ptx.safety.function_proof import FunctionProof
from nostall.ptx.safety.reading.declarations import (
    Declared,
    declared_names,
    is_declaration,
    read_header,
)
from nostall.ptx.safety.reading.lexical import (
    ModuleItem,
    Unreadable,
    canonical,
    line_of,
    normalise,
    read_module,
    strip_comments,
)
from nostall.ptx.safety.reading.opcodes import Effect
from nostall.ptx.safety.reading.scope import MODULE_PATH, Registers, Scope
from nostall.ptx.safety.verdict import Finding, Verdict

_ENTRY_NAME = re.compile(r"\.entry\s+([\w$%]+)")
_STRING_OR_NAME = re.compile(r'"[^"\n]*+"|[\w$%]++')
_BUDGET = re.compile(r"\.(maxnreg|minnctapersm)\s+(\d+)")


class NotAllowed(Exception):
    """The candidate differs from the original outside its instructions."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.reason)
        self.finding = finding


@dataclass(frozen=True, slots=True)
class Renaming:
    """A candidate's text with the original's kernel names."""

    text: str
    differences: tuple[str, ...]


def undo_renaming(original: str, candidate: str) -> Renaming:
    """Give the kernels of ``candidate`` the names that they have in ``original``.

    Both texts are without comments.  Raises :class:`NotAllowed` if the original already uses a new
    name, or if the candidate still uses an old one.
    """
    names = _ENTRY_NAME.findall(candidate)
    expected = _ENTRY_NAME.findall(original)
    new_names = dict(zip(names, expected, strict=False))
    renamed = {new: old for new, old in new_names.items() if new != old}
    if len(names) != len(expected) or not renamed:
        return Renaming(candidate, ())
    used_before = set(_STRING_OR_NAME.findall(original))
    used_after = set(_STRING_OR_NAME.findall(candidate))
    for new, old in renamed.items():
        line = line_of(candidate, candidate.find(new))
        if [new_names[n] for n in names] != expected or len(set(new_names.values())) < len(
            new_names
        ):
            reason = f"the renaming of {old} to {new} is not the same everywhere; it must be"
            raise NotAllowed(Finding("renaming", old, line, new, reason))
        if new in used_before:
            reason = f"{old} is renamed to {new}, which the original uses; take an unused name"
            raise NotAllowed(Finding("renaming", old, line, new, reason))
        if old in used_after:
            reason = f"{old} is renamed to {new}, but a reference to {old} is left; rename it too"
            raise NotAllowed(Finding("renaming", old, line, new, reason))
    text = _STRING_OR_NAME.sub(lambda m: renamed.get(m[0], m[0]), candidate)
    return Renaming(text, tuple(f"kernel {old} is named {new}" for new, old in renamed.items()))


def split_budget(header: str) -> tuple[str, dict[str, str]]:
    """(header without the register budget, directive -> value of the budget)."""
    return canonical(_BUDGET.sub(" ", header)), dict(_BUDGET.findall(header))


def budget_differences(name: str, old: dict[str, str], new: dict[str, str]) -> tuple[str, ...]:
    """The differences between two register budgets, one sentence each."""
    return tuple(
        f"kernel {name} has {_directive(key, new)} instead of {_directive(key, old)}"
        for key in ("maxnreg", "minnctapersm")
        if old.get(key) != new.get(key)
    )


def _directive(key: str, budget: dict[str, str]) -> str:
    return f".{key} {budget[key]}" if key in budget else f"no .{key}"


def compare_items(
    original: Sequence[ModuleItem], candidate: Sequence[ModuleItem], text: str
) -> None:
    """Compare everything but headers and bodies of functions; ``text`` is the candidate's.

    Raises :class:`NotAllowed` at the first difference.
    """
    for old, new in zip(original, candidate, strict=False):
        is_equal = old.kind == new.kind and (
            old.kind == "function"
            or old.text == new.text
            or canonical(old.text) == canonical(new.text)
        )
        if not is_equal:
            reason = f"the original has {_excerpt(old.text)} here; directives must be equal"
            place = line_of(text, new.offset)
            raise NotAllowed(Finding("directive", "", place, _excerpt(new.text), reason))
    if len(original) != len(candidate):
        longer, problem = (original, "lacks") if len(original) > len(candidate) else (
            candidate, "adds",
        )  # fmt: skip
        first = longer[min(len(original), len(candidate))]
        reason = f"the candidate {problem} {_excerpt(first.text)}; directives must be equal"
        line = line_of(text, candidate[-1].offset if candidate else 0)
        raise NotAllowed(Finding("directive", "", line, _excerpt(first.text), reason))


def _excerpt(text: str) -> str:
    short = normalise(text)
    return short if len(short) <= 100 else short[:97] + "..."


MAX_FINDINGS = 20
"""Findings of a verdict; a wrong block makes one."""


def validate(original: str, candidate: str, *, dependents_wait: bool = False) -> Verdict:
    """Check whether the PTX text ``candidate`` computes what ``original`` does.

    ``dependents_wait``: see :class:`Validator`.  A candidate that cannot be read is refused.
    Raises :class:`~nostall.ptx.errors.BadPtx` if the original cannot be read, and
    :class:`~nostall.core.errors.BadInput` if an argument is no text.
    """
    return Validator(original, dependents_wait=dependents_wait).check(candidate)


class Validator:
    """Checks candidates against one original, which is read and executed once."""

    def __init__(self, original: str, *, dependents_wait: bool = False) -> None:
        """``dependents_wait``: each kernel that is launched as a dependent of a kernel of this text
        waits for it, so a candidate may let them start early.

        Raises :class:`~nostall.ptx.errors.BadPtx` if ``original`` cannot be read.
        """
        self._dependents_wait = dependents_wait
        self._text = strip_comments(_require_text(original, "original"))
        try:
            self._items = read_module(self._text)
            scope = _module_scope(self._items)
            functions = [i for i in self._items if i.kind == "function"]
            self._functions = [FunctionProof(item, scope) for item in functions]
        except Unreadable as error:
            line = line_of(self._text, error.offset)
            raise BadPtx(
                f"line {line} of the original PTX cannot be read: {error.reason}; pass a PTX text "
                "that ptxas accepts"
            ) from error
        self._waiting = self._with_opcode("griddepcontrol")
        self._changing_budget = self._with_opcode("setmaxnreg")

    def _with_opcode(self, root: str) -> list[bool]:
        """Per function, whether it or a device function has an instruction of this opcode.

        A kernel may call each device function of its module.
        """
        found = [
            any(i.opcode.partition(".")[0] == root for i in function.leaves())
            for function in self._functions
        ]
        pairs = zip(self._functions, found, strict=True)
        in_callee = any(has_it for function, has_it in pairs if not function.header.is_entry)
        return [has_it or in_callee for has_it in found]

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
            renaming = undo_renaming(self._text, stripped)
            text = renaming.text
            items = read_module(text)
            compare_items(self._items, items, text)
            return self._check_functions(items, text, renaming.differences)
        except Unreadable as error:
            line = line_of(text, error.offset)
            end = text.find("\n", error.offset)
            excerpt = normalise(text[error.offset : end if end >= 0 else None])
            finding = Finding("unreadable", "", line, excerpt, error.reason)
        except NotAllowed as difference:
            finding = difference.finding
        return Verdict((finding,))

    def _check_functions(
        self, items: list[ModuleItem], text: str, differences: tuple[str, ...]
    ) -> Verdict:
        findings: list[Finding] = []
        checked = 0
        new_items = [item for item in items if item.kind == "function"]
        for number, (function, item) in enumerate(zip(self._functions, new_items, strict=True)):
            differences += self._compare_headers(number, item, text)
            may_insert = function.header.is_entry and not self._waiting[number]
            result = function.compare(item, text, may_insert, self._dependents_wait)
            findings += result.findings
            differences += result.differences
            checked += result.checked
        return Verdict(tuple(findings[:MAX_FINDINGS]), differences, checked)

    def _compare_headers(self, number: int, item: ModuleItem, text: str) -> tuple[str, ...]:
        """Allowed differences between the headers of a function.

        A kernel that changes its register count while it runs keeps its budget: the pool that
        setmaxnreg takes registers from is what the launch gives each thread, and with another one
        the instruction may wait for ever (PTX ISA, setmaxnreg).
        """
        function = self._functions[number]
        old, old_budget = split_budget(function.item.text)
        new, new_budget = split_budget(item.text)
        name, line = function.header.name, line_of(text, item.offset)
        budgets = budget_differences(name, old_budget, new_budget)
        if old != new or (budgets and not function.header.is_entry):
            reason = f"the original's header is {old}; headers must be equal"
            raise NotAllowed(Finding("header", name, line, new, reason))
        if budgets and self._changing_budget[number]:
            reason = (
                f"{budgets[0]}; the kernel uses setmaxnreg, which may then wait for ever, so the "
                "register budget must be the original's"
            )
            raise NotAllowed(Finding("register-budget", name, line, new, reason))
        return budgets


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
