"""Run all programs, or those that are named.

``python -m tests.unit.fusion.user_programs FOLDER [NAME ...]`` prints the wrong results of each
program as JSON. Each program stands for a kind of fault.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from tools.interpreters.triton_interpreter import prepare

from tests.unit.fusion.user_programs import calls, dtypes, indices, memory
from tests.unit.fusion.user_programs.checks import Program

PROGRAMS = {**calls.PROGRAMS, **dtypes.PROGRAMS, **indices.PROGRAMS, **memory.PROGRAMS}


def run_program(program: Program, folder: Path) -> list[str]:
    torch.manual_seed(0)
    try:
        return list(program(folder))
    except Exception as error:  # one failing program must not hide the others
        return [f"{type(error).__name__}: {str(error)[:500]}"]


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["NOSTALL_HOME"] = str(folder)
    warnings.simplefilter("ignore")
    prepare()
    names = sys.argv[2:] or PROGRAMS
    print(json.dumps({name: run_program(PROGRAMS[name], folder) for name in names}))


if __name__ == "__main__":
    main()
