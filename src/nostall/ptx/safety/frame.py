"""Frame of a module: everything outside the instructions, and which differences are allowed.

The directives, declarations, function headers and their order are the original's.  A kernel may
have another name, and its register budget (``.maxnreg``, ``.minnctapersm``) may differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.ptx.safety.reading.lexical import ModuleItem, canonical, line_of, normalise
from nostall.ptx.safety.verdict import Finding

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
