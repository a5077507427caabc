"""Mutations of Python source: small changes that tests should notice.

A mutation replaces one piece of the text, so that all other lines stay as they are.  Annotations,
decorators, docstrings, assertions, strings and the arguments of raised errors are left alone: a
change there has no effect, or only one on the wording.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_COMPARISONS = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"),
    ast.Eq: ("!=",), ast.NotEq: ("==",), ast.In: ("not in",), ast.NotIn: ("in",),
    ast.Is: ("is not",), ast.IsNot: ("is",),
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.Pow: "*", ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&",
    ast.BitXor: "|", ast.MatMult: "*",
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_STATEMENTS = (ast.AugAssign, ast.Raise, ast.Delete)


@dataclass(frozen=True, order=True)
class Mutation:
    """One replacement in one file."""

    file: str
    """Path from the root of the repository."""
    start: int
    """Position of the replaced text in the file, in characters."""
    end: int
    operator: str
    """Kind of the change, such as ``comparison``."""
    new: str

    def apply(self, text: str) -> str:
        """The text of the file with the mutation."""
        return text[: self.start] + self.new + text[self.end :]


def sample(root: Path, folder: Path, count: int, seed: int) -> tuple[dict[str, Mutation], int]:
    """(``count`` seeded mutations of the modules below a folder by name, number of all of them).

    A name is a hash of the seed and of the changed line, and the sample is the smallest names: a
    smaller count gives the beginning of the same sample, and a change of the source elsewhere
    leaves the others in it.
    """
    named: dict[str, Mutation] = {}
    texts: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        file = path.relative_to(root).as_posix()
        texts[file] = path.read_text()
        named |= _named(texts[file], mutations(file, texts[file]), seed)
    ordered = ((name, named[name]) for name in sorted(named))
    legal = ((n, m) for n, m in ordered if _parses(m.apply(texts[m.file])))
    return dict(islice(legal, count)), len(named)


def _named(text: str, every: Sequence[Mutation], seed: int) -> dict[str, Mutation]:
    """Mutations of one file by name; equal changes of equal lines are told apart by their order."""
    seen: Counter[str] = Counter()
    named = {}
    for mutation in every:
        start = text.rfind("\n", 0, mutation.start) + 1
        line = text[start:].partition("\n")[0]
        column = mutation.start - start - (len(line) - len(line.lstrip()))
        key = repr((seed, mutation.file, line.strip(), column, mutation.operator, mutation.new))
        name = hashlib.sha256(f"{key} {seen[key]}".encode()).hexdigest()[:12]
        seen[key] += 1
        named[name] = mutation
    return named


def mutations(file: str, text: str) -> list[Mutation]:
    """All mutations of a module, in the order of the text."""
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    found = {Mutation(file, start, end, name, new) for start, end, name, new in finder.found}
    return sorted(found)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    """Collects (start, end, operator, new text) of a module."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[tuple[int, int, str, str]] = []
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._encoded = text.splitlines(keepends=True)

    def _position(self, line: int, column: int) -> int:
        """``ast`` counts columns in bytes of UTF-8."""
        return self._lines[line - 1] + len(self._encoded[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._position(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self._position(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def _source(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.text[start:end]

    def _add(self, node: ast.AST, operator: str, new: str) -> None:
        self.found.append((*self._span(node), operator, new))

    def _between(self, left: ast.AST, right: ast.AST, old: str, operator: str, new: str) -> None:
        """Replace the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        at = self.text.find(old, start, end)
        if at >= 0:
            self.found.append((at, at + len(old), operator, new))

    def visit(self, node: ast.AST) -> None:
        """Find the mutations of a node and of its children, except where a change has no effect."""
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.ImportFrom | ast.Import):
            return
        find = getattr(self, f"find_{type(node).__name__.lower()}", None)
        if find is not None:
            find(node)
        if isinstance(node, _STATEMENTS):
            self._add(node, "statement removed", "pass")
        if isinstance(node, ast.Raise):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def find_compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for at, operator in enumerate(node.ops):
            for new in _COMPARISONS[type(operator)]:
                old = _text_of(operator)
                self._between(operands[at], operands[at + 1], old, "comparison", new)

    def find_binop(self, node: ast.BinOp) -> None:
        if any(_is_text(side) for side in (node.left, node.right)) or _names_types(node):
            return
        new = _ARITHMETIC[type(node.op)]
        self._between(node.left, node.right, _text_of(node.op), "arithmetic", new)

    def find_augassign(self, node: ast.AugAssign) -> None:
        old = f"{_text_of(node.op)}="
        self._between(node.target, node.value, old, "arithmetic", f"{_ARITHMETIC[type(node.op)]}=")

    def find_boolop(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for at, operand in enumerate(node.values):
            if at:
                self._between(node.values[at - 1], operand, old, "boolean", new)
            rest = [self._source(v) for k, v in enumerate(node.values) if k != at]
            self._add(node, "operand removed", f"({f' {old} '.join(rest)})")

    def find_unaryop(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._add(node, "unary removed", f"({self._source(node.operand)})")

    def find_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "constant", f"{node.value + 1}")
            if node.value > 0:
                self._add(node, "constant", f"{node.value - 1}")
        elif isinstance(node.value, float):
            self._add(node, "constant", repr(node.value * 2 if node.value else 1.0))

    def find_if(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if "TYPE_CHECKING" not in self._source(node.test):
            self._add(node.test, "condition", f"(not ({self._source(node.test)}))")

    find_while = find_if

    def find_ifexp(self, node: ast.IfExp) -> None:
        self._add(node, "branch", f"({self._source(node.body)})")
        self._add(node, "branch", f"({self._source(node.orelse)})")

    def find_expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom):
            self._add(node, "statement removed", "pass")

    def find_assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add(node, "statement removed", "pass")

    def find_break(self, node: ast.Break) -> None:
        self._add(node, "loop", "continue")

    def find_continue(self, node: ast.Continue) -> None:
        self._add(node, "loop", "break")

    def find_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._add(condition, "filter removed", "True")

    def find_call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            self._add(node.func, "call", _CALLS[node.func.id])
        for at, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                kept = [
                    *(self._source(argument) for argument in node.args),
                    *(self._source(k) for k in node.keywords[:at] + node.keywords[at + 1 :]),
                ]
                new = f"{self._source(node.func)}({', '.join(kept)})"
                self._add(node, "argument removed", new)


def _text_of(operator: ast.AST) -> str:
    """The text of an operator, as in the source."""
    left = ast.Name("a", ast.Load())
    if isinstance(operator, ast.cmpop):
        node: ast.expr = ast.Compare(left, [operator], [left])
    else:
        node = ast.BinOp(left, operator, left)  # type: ignore[arg-type]
    return ast.unparse(node)[2:-2]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _names_types(node: ast.BinOp) -> bool:
    """Whether ``a | b`` seems to be a union of types: names in capitals, or built-in types."""
    sides = [side for side in (node.left, node.right) if not isinstance(side, ast.BinOp)]
    return isinstance(node.op, ast.BitOr) and any(
        (isinstance(side, ast.Constant) and side.value is None)
        or (isinstance(side, ast.Subscript) and isinstance(side.value, ast.Name))
        or ast.unparse(side).rpartition(".")[2] in ("int", "str", "float", "bytes", "bool")
        or (ast.unparse(side).rpartition(".")[2][:1].isupper() and not ast.unparse(side).isupper())
        for side in sides
    )
