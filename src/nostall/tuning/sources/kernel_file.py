"""Python files with Triton kernels: import a file in isolation, find a kernel and its launch."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nostall.core.errors import BadInput, BadLaunch
from nostall.core.launch import LaunchSpec
from nostall.core.text.suggest import did_you_mean, listed

MAX_MESSAGE_LENGTH = 300
"""Characters of an error message that :func:`root_cause` returns."""


@contextlib.contextmanager
def import_file(path: Path) -> Iterator[ModuleType]:
    """Import a file, and on exit remove it and the neighbouring files it imported from Python.

    The module has the name of an ordinary import, because Triton writes the name into the symbols
    of functions that are not inlined: another name would give other bytes.  A file with relative
    imports is imported as the module of its package.  Raises :class:`BadInput` if the file is
    missing, is not Python, or fails to import.
    """
    if not path.is_file():
        raise BadInput(f"there is no file {path}; give the Python file that holds the kernel")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} is not a Python file; give a .py file, or a .cubin")
    module = importlib.util.module_from_spec(spec)
    modules_before, path_before = dict(sys.modules), list(sys.path)
    sys.modules[path.stem] = module
    root = folder = path.parent.absolute()
    sys.path.insert(0, str(folder))
    try:
        try:
            try:
                spec.loader.exec_module(module)
            except ImportError as error:
                if "no known parent package" not in str(error) or not _is_package(root):
                    raise
                root = folder.resolve()
                while _is_package(root):
                    root = root.parent
                sys.path.insert(0, str(root))
                parts = (folder.resolve() / path.stem).relative_to(root).parts
                module = importlib.import_module(".".join(parts))
        except (Exception, SystemExit) as error:  # the user's file may raise anything
            raise BadInput(
                f"cannot import {path}: {type(error).__name__}: {root_cause(error)}; "
                "the file must be importable on its own"
            ) from error
        yield module
    finally:
        # What a package imports from other folders stays, and so does an installed package:
        # extension modules such as PyTorch's cannot be imported twice.
        package_root = root if root != folder and str(root) not in path_before else None
        new = set(sys.modules) - set(modules_before)
        for name in [name for name in new if _is_neighbour(name, folder, package_root)]:
            del sys.modules[name]
        if path.stem in modules_before:
            sys.modules[path.stem] = modules_before[path.stem]
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        if root != folder:
            with contextlib.suppress(ValueError):
                sys.path.remove(str(root))


def _is_neighbour(name: str, folder: Path, package_root: Path | None) -> bool:
    """Whether a module is in ``folder``, or in ``package_root`` or a package there."""
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return False
    parent = Path(file).parent
    if package_root is not None and parent in (package_root, package_root / top):
        return True
    return name == top and parent == folder and Path(file).stem != "__init__"


def _is_package(folder: Path) -> bool:
    return Path(folder, "__init__.py").is_file()


def _unwrap(triton: Any, value: object) -> Any:
    """The jit function inside ``autotune`` and ``heuristics`` decorators, or None."""
    while not isinstance(value, triton.JITFunction) and hasattr(value, "fn"):
        value = value.fn
    return value if isinstance(value, triton.JITFunction) else None


def find_jit_function(triton: Any, module: ModuleType, path: Path, name: str) -> Any:
    """The ``@triton.jit`` function ``name`` of a module.

    Raises :class:`BadInput` with the names of the module's kernels if there is none.
    """
    value = getattr(module, name, None)
    function = None if value is None else _unwrap(triton, value)
    if function is not None:
        return function
    kernels = [
        key
        for key, item in vars(module).items()
        if (kernel := _unwrap(triton, item)) is not None and kernel.fn.__module__ == module.__name__
    ]
    reason = (
        f" has no kernel {name!r}" if value is None else f": {name!r} is not a @triton.jit function"
    )
    raise BadInput(
        f"{path}{reason}; its kernels are: {listed(kernels)}{did_you_mean(name, kernels)}"
    )


def find_launch(module: ModuleType, path: Path, name: str) -> LaunchSpec:
    """The entry ``name`` of the module's table ``LAUNCHES``.

    Raises :class:`BadLaunch` if there is none, or if it is not a launch specification.
    """
    table = getattr(module, "LAUNCHES", None)
    if not isinstance(table, Mapping) or name not in table:
        known = list(map(str, table)) if isinstance(table, Mapping) else []
        raise BadLaunch(
            f"no launch is given for {path.name}:{name}; its LAUNCHES has: {listed(known)}"
            f"{did_you_mean(name, known)}; `nostall init` writes a launch file for --launch, or "
            f"add LAUNCHES[{name!r}] = LaunchSpec(...) to {path.name}"
        )
    entry = table[name]
    if isinstance(entry, LaunchSpec):
        return entry
    return LaunchSpec.parse(entry, f"{path.name}: LAUNCHES[{name!r}]")


def root_cause(error: BaseException) -> str:
    """The most useful line of an error.

    Triton's errors state the reason in their innermost cause.  A line of an external tool (LLVM,
    ptxas) is preferred, else the last line is taken.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^\t")]
    tool_lines = [line for line in lines if re.search(r"(; error|fatal)\s*:", line)]
    line = next(iter(tool_lines or lines[::-1]), type(error).__name__)
    return line if len(line) <= MAX_MESSAGE_LENGTH else f"{line[: MAX_MESSAGE_LENGTH - 3]}..."
