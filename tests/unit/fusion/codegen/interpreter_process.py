"""Run a module in a process with Triton's interpreter, which is enabled before the import.

``python -m tests.unit.fusion.codegen.interpreter_process`` imports PyTorch and Triton once, which
takes seconds, and forks a process for each module that standard input names.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[4]


def run_interpreted(module: str, *arguments: object) -> Any:
    """The JSON that ``python -m module arguments`` prints, with Triton's interpreter enabled."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("out", "err")]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        request = [module, list(map(str, arguments)), files, dict(environment)]
        print(json.dumps(request), file=server.stdin, flush=True)
        code = server.stdout.readline().strip()
        out, err = (Path(file).read_text() if Path(file).exists() else "" for file in files)
    assert code == "0", f"exit code {code or 'of the server'}: {err[-3000:]}"
    return json.loads(out)


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__],
        cwd=_ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # the end of its input ends it
    return server


def _serve() -> None:
    import nostall.fusion.fuse  # noqa: F401 (PyTorch and Triton with it)

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


if __name__ == "__main__":
    _serve()
