"""Run programs in forks of a process that has imported PyTorch, which takes seconds.

``python -m tests.unit.fusion.codegen.interpreter_process MODULE`` imports a module once and forks a
process for each program that standard input names.  Triton's interpreter is enabled before the
import.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[4]


def run_interpreted(module: str, *arguments: object) -> Any:
    """The JSON that ``python -m module arguments`` prints, with Triton's interpreter enabled."""
    server = _server("nostall.fusion.fuse", "TRITON_INTERPRET")  # imports PyTorch and Triton
    code, out, err = _ask(server, module, arguments, os.environ | {"TRITON_INTERPRET": "1"})
    assert code == "0", f"exit code {code or 'of the server'}: {err[-3000:]}"
    return json.loads(out)


def run_watched(script: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Output of a user's program with nostall's start-up module and one thread.

    Its hooks run before the program, as PyTorch is imported, and not at the program's import.
    """
    server = _server("torch._dynamo", "")
    code, out, err = _ask(server, str(script), (), environment)
    assert code == "0", f"exit code {code or 'of the server'}: {err[-3000:]}"
    return out, err


def _ask(
    server: subprocess.Popen[str], program: str, words: Iterable[object], variables: Any
) -> tuple[str, str, str]:
    """Exit code, output and errors of a program."""
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("out", "err")]
        request = [program, list(map(str, words)), files, dict(variables)]
        print(json.dumps(request), file=server.stdin, flush=True)
        code = server.stdout.readline().strip()
        out, err = (Path(file).read_text() if Path(file).exists() else "" for file in files)
    return code, out, err


@cache
def _server(imported: str, enabled: str) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__, imported],
        cwd=_ROOT,
        env=os.environ | ({enabled: "1"} if enabled else {"OMP_NUM_THREADS": "1"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # the end of its input ends it
    return server


def _serve() -> None:
    importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        module, arguments, files, environment = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(module, arguments, files, environment)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(module: str, arguments: list[str], files: list[str], environment: dict[str, str]) -> None:
    """Run the module as ``python -m`` does, and end this process."""
    code = 0
    try:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ |= environment
        sys.argv[1:] = arguments
        if module.endswith(".py"):
            _watch()
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch() -> None:
    """Begin as ``nostall.attach.start_shim`` does, and run the hooks of what is imported."""
    from nostall.attach.import_hooks import AfterImport
    from nostall.attach.program import start

    start.install()
    finder = sys.meta_path[0]
    assert isinstance(finder, AfterImport)
    for name in [name for name in finder.hooks if name in sys.modules]:
        finder.hooks.pop(name)(sys.modules[name])


if __name__ == "__main__":
    _serve()
