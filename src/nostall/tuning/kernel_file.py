"""The Python file that holds a Triton kernel: imported on its own, searched for the kernel."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from nostall.core.errors import BadInput, BadLaunch
from nostall.core.launch import LaunchSpec


@contextlib.contextmanager
def imported(path: Path) -> Iterator[ModuleType]:
    """Import a file on its own, and forget it and the files beside it that it imported.

    Its name is the one that an ordinary import gives: Triton writes it into the symbols of
    functions that are not inlined, so another name would give other bytes.
    """
    if not path.is_file():
        raise BadInput(f"there is no file {path}; give the Python file that holds the kernel")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} is not a Python file; give a .py file, or a .cubin")
    module = importlib.util.module_from_spec(spec)
    before = dict(sys.modules)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever the user's file raises
            raise BadInput(
                f"cannot import {path}: {type(error).__name__}: {root_cause(error)}; "
                "it has to be importable on its own"
            ) from error
        yield module
    finally:
        for name in set(sys.modules) - set(before):
            file = getattr(sys.modules[name], "__file__", None)
            if "." not in name and file is not None and Path(file).parent == path.parent:
                del sys.modules[name]
        if path.stem in before:
            sys.modules[path.stem] = before[path.stem]
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent))


def _unwrapped(triton: Any, value: object) -> Any:
    """The jit function under ``autotune`` and ``heuristics`` decorators, or None."""
    while not isinstance(value, triton.JITFunction) and hasattr(value, "fn"):
        value = value.fn
    return value if isinstance(value, triton.JITFunction) else None


def jit_function(triton: Any, module: ModuleType, path: Path, name: str) -> Any:
    value = getattr(module, name, None)
    function = None if value is None else _unwrapped(triton, value)
    if function is not None:
        return function
    there = [
        key
        for key, item in vars(module).items()
        if (found := _unwrapped(triton, item)) is not None
        and found.fn.__module__ == module.__name__
    ]
    reason = (
        f"has no kernel {name!r}" if value is None else f": {name!r} is not a @triton.jit function"
    )
    raise BadInput(f"{path} {reason}; its kernels are: {', '.join(there) or '(none)'}")


def launch_in(module: ModuleType, path: Path, name: str) -> LaunchSpec:
    table = getattr(module, "LAUNCHES", None)
    if not isinstance(table, Mapping) or name not in table:
        known = ", ".join(map(str, table)) if isinstance(table, Mapping) and table else "(none)"
        raise BadLaunch(
            f"no launch is given for {path.name}:{name}; its LAUNCHES has: {known}; give a launch "
            f"file (spec.toml) or add LAUNCHES[{name!r}] = LaunchSpec(...) to {path.name}"
        )
    entry = table[name]
    if isinstance(entry, LaunchSpec):
        return entry
    try:
        return LaunchSpec.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "launch"
        raise BadLaunch(f"{path.name}: LAUNCHES[{name!r}]: {where}: {first['msg']}") from error


def root_cause(error: BaseException) -> str:
    """The line that says most; Triton's own errors have the reason in their innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^\t")]
    by_tool = [line for line in lines if re.search(r"(; error|fatal)\s*:", line)]
    chosen = next(iter(by_tool or lines[::-1]), type(error).__name__)
    return chosen if len(chosen) <= 300 else f"{chosen[:297]}..."
