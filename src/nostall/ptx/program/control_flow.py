"""Branches of a function: labels that they name, scopes that they leave, loops that they close."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nostall.ptx.program.body import Body, Directive, Label, Nested, walk
from nostall.ptx.program.declarations import LIST


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """What the branches of one function do."""

    referenced: frozenset[int]
    """Offsets of the labels that an instruction or a list of targets names."""
    open_scopes: frozenset[int]
    """Offsets of the opening braces of scopes that control leaves by a branch, return or exit."""
    branching_scopes: frozenset[int]
    """Offsets of the opening braces of scopes that have a branch inside."""
    loops: tuple[tuple[int, int], ...]
    """Text ranges from a label to the last branch back to it."""

    def depth(self, offset: int) -> int:
        """Number of loops around the character at ``offset``."""
        return sum(start <= offset < end for start, end in self.loops)


def analyse_control_flow(body: Body) -> ControlFlow:
    """The branches of a function."""
    referenced: set[int] = set()
    open_scopes: set[int] = set()
    branching: set[int] = set()
    last_branch: dict[int, int] = {}
    lists = _target_lists(body)
    for item, chain in walk(body.root):
        if isinstance(item, Label):
            continue
        if isinstance(item, Directive):
            referenced |= {label.start for label, _ in _named_labels(item.words, chain)}
            continue
        instruction = body.instructions[item]
        named = _named_labels(instruction.words, chain)
        referenced |= {label.start for label, _ in named}
        if not instruction.ends_block:
            continue
        branching |= {scope.start for scope in chain}
        is_closed = instruction.base == "bra" and len(named) == 1
        depth = named[0][1] if is_closed else -1
        open_scopes |= {scope.start for scope in chain[depth + 1 :]}
        targets = {label.start for label, _ in named} | _list_targets(instruction.words, lists)
        for target in targets:
            if target < instruction.start:
                last_branch[target] = max(last_branch.get(target, 0), instruction.end)
    return ControlFlow(
        frozenset(referenced),
        frozenset(open_scopes),
        frozenset(branching),
        tuple(sorted(last_branch.items())),
    )


def _named_labels(words: Iterable[str], chain: tuple[Nested, ...]) -> list[tuple[Label, int]]:
    """Labels that ``words`` name, each with the nesting depth of the braces that have it."""
    found = []
    for word in sorted(words):
        for depth in range(len(chain) - 1, -1, -1):
            label = chain[depth].labels.get(word)
            if label is not None:
                found.append((label, depth))
                break
    return found


def _target_lists(body: Body) -> dict[str, set[int]]:
    """Name of a list of targets -> offsets of its labels."""
    lists: dict[str, set[int]] = {}
    name: str | None = None
    for item, chain in walk(body.root):
        if not isinstance(item, Directive):
            name = None
        elif item.declared and item.declared[0].space == LIST:
            name = item.declared[0].name
        elif name is not None:
            lists[name] = {label.start for label, _ in _named_labels(item.words, chain)}
            name = None
    return lists


def _list_targets(words: Iterable[str], lists: dict[str, set[int]]) -> set[int]:
    return set().union(*(lists[word] for word in words if word in lists))
