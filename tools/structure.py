"""Print figures about the structure of the source tree: folders, import cycles, long functions.

    python -m tools.structure [--root DIR] [--format table|json]

The script parses the files and imports none of them, so it can measure another commit:
``git worktree add ../old COMMIT && python -m tools.structure --root ../old``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_LINES = 60
"""Allowed lines of a function, decorators excluded."""
MAX_PARAMETERS = 8
"""Allowed parameters of a function, ``self`` and ``cls`` excluded."""
MAX_FILE_LINES = 600
"""Allowed lines of a file."""
MAX_MODULES = 15
"""Allowed modules of a folder, without ``__init__.py`` and subfolders."""
_NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
_BROAD = {"Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Structure:
    """Figures of one source tree. Functions and handlers are listed as ``file:line name``."""

    lines: int
    """Lines of all Python files, comments and blank lines included."""
    code_lines: int
    """Lines of code: without comments, docstrings and blank lines."""
    modules: int
    """Python files, ``__init__.py`` included."""
    largest_folder: str
    """Folder with the most modules."""
    largest_folder_modules: int
    """Modules in that folder, without ``__init__.py`` and subfolders."""
    large_folders: list[str]
    """Folders with more than ``MAX_MODULES`` modules, with their number."""
    long_files: list[str]
    """Files longer than ``MAX_FILE_LINES``, with their number of lines."""
    cycles: list[list[str]]
    """Groups of modules that import each other when they are imported."""
    long_functions: list[str]
    """Functions longer than ``MAX_LINES``."""
    many_parameters: list[str]
    """Functions with more than ``MAX_PARAMETERS``, outside ``cli``, numba and Triton kernels."""
    broad_excepts: list[str]
    """Handlers and ``suppress`` calls that catch ``Exception`` or all exceptions."""


def count_code_lines(source: str) -> int:
    """Lines with a token that is neither a comment nor part of a docstring or bare string."""
    return _count_code_lines(source, ast.parse(source))


def _count_code_lines(source: str, tree: ast.AST) -> int:
    strings: set[int] = set()
    for node in _statements(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """As ``ast.walk``, without the expressions, which are most of the nodes."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        waiting.extend(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        )


def module_name(file: Path, source: Path) -> str:
    """Dotted name of the module in ``file``; ``source`` is the folder of the package."""
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Yield the modules of ``known`` that a module imports while it is imported."""
    for node in _import_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


def _import_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run on import: not in functions, not under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _import_time_nodes(child)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for imported in graph[name]:
            if imported not in index:
                visit(imported)
                low[name] = min(low[name], low[imported])
            elif imported in stack:
                low[name] = min(low[name], index[imported])
        if low[name] == index[name]:
            start = stack.index(name)
            component = sorted(stack[start:])
            del stack[start:]
            if len(component) > 1:
                result.append(component)

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return result


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in _statements(tree) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Number of parameters without ``self`` and ``cls``."""
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _is_compiled(function: Function) -> bool:
    """Whether numba or Triton compiles the function."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(
        compiler in text for text in decorators for compiler in ("njit", "triton.jit", "gluon.jit")
    )


def _caught(kind: ast.expr | None) -> set[str]:
    if kind is None:
        return {"BaseException"}
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return {ast.unparse(name) for name in names}


def broad_excepts(source: str, tree: ast.AST) -> Iterator[int]:
    """Line numbers of handlers and ``suppress`` calls that take any exception."""
    for node in ast.walk(tree) if "suppress" in source else _statements(tree):
        is_handler = isinstance(node, ast.ExceptHandler) and _caught(node.type) & _BROAD
        is_suppress = (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("suppress")
            and {ast.unparse(argument) for argument in node.args} & _BROAD
        )
        if is_handler or is_suppress:
            yield node.lineno


def large_folders(root: Path, source: Path) -> list[str]:
    """The folders below ``source`` with more than ``MAX_MODULES`` modules, with their number."""
    modules = _modules_by_folder(root, source.rglob("*.py"))
    return [f"{folder} {count}" for folder, count in modules.items() if count > MAX_MODULES]


def _modules_by_folder(root: Path, files: Iterable[Path]) -> Counter[str]:
    """Number of modules of each folder, without ``__init__.py``."""
    return Counter(
        str(file.parent.relative_to(root)) for file in files if file.name != "__init__.py"
    )


def long_files(root: Path, source: Path) -> list[str]:
    """The Python files below ``source`` with more than ``MAX_FILE_LINES`` lines."""
    counts = {file: len(file.read_text("utf-8").splitlines()) for file in source.rglob("*.py")}
    return [
        f"{file.relative_to(root)} {count}"
        for file, count in sorted(counts.items())
        if count > MAX_FILE_LINES
    ]


def measure(root: Path, source: Path) -> Structure:
    """Figures of the Python files below ``source``; paths are relative to ``root``."""
    files = sorted(source.rglob("*.py"))
    texts = {file: file.read_text("utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    names = {module_name(file, source.parent): file for file in files}
    known = set(names)
    graph = {name: set(imports(trees[file], known)) - {name} for name, file in names.items()}
    folder, modules = _modules_by_folder(root, files).most_common(1)[0]

    def listed(places: Iterable[tuple[Path, int, str]]) -> list[str]:
        return [f"{file.relative_to(root)}:{line} {name}" for file, line, name in places]

    definitions = [(file, function) for file, tree in trees.items() for function in functions(tree)]
    return Structure(
        lines=sum(len(text.splitlines()) for text in texts.values()),
        code_lines=sum(_count_code_lines(texts[file], tree) for file, tree in trees.items()),
        modules=len(files),
        largest_folder=folder,
        largest_folder_modules=modules,
        large_folders=large_folders(root, source),
        long_files=long_files(root, source),
        cycles=cycles(graph),
        long_functions=listed(
            (file, f.lineno, f.name)
            for file, f in definitions
            if (f.end_lineno or f.lineno) - f.lineno + 1 > MAX_LINES
        ),
        many_parameters=listed(
            (file, f.lineno, f.name)
            for file, f in definitions
            if parameters(f) > MAX_PARAMETERS and not _is_compiled(f) and "cli" not in file.parts
        ),
        broad_excepts=listed(
            (file, line, "except")
            for file, tree in trees.items()
            for line in broad_excepts(texts[file], tree)
        ),
    )


def table(structure: Structure) -> str:
    lines = [
        f"lines of source                         {structure.lines:,}",
        f"lines of code                           {structure.code_lines:,}",
        f"modules                                 {structure.modules}",
        f"modules in the largest folder           {structure.largest_folder_modules} "
        f"({structure.largest_folder})",
        f"folders over {MAX_MODULES} modules                 {len(structure.large_folders)}",
        f"files over {MAX_FILE_LINES} lines                    {len(structure.long_files)}",
        f"import cycles                           {len(structure.cycles)}",
        f"functions over {MAX_LINES} lines                 {len(structure.long_functions)}",
        f"functions over {MAX_PARAMETERS} parameters             {len(structure.many_parameters)}",
        f"broad excepts                           {len(structure.broad_excepts)}",
    ]
    for name in ("large_folders", "long_files", "long_functions", "many_parameters"):
        lines += ["", f"{name.replace('_', ' ')}:", *(f"  {x}" for x in getattr(structure, name))]
    lines += ["", *("cycle: " + " ".join(cycle) for cycle in structure.cycles)]
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1],
        help="root of the repository to measure; default: this one",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )
    options = parser.parse_args()
    root = options.root.resolve()
    structure = measure(root, root / "src" / "nostall")
    print(json.dumps(asdict(structure), indent=1) if options.format == "json" else table(structure))


if __name__ == "__main__":
    main()
