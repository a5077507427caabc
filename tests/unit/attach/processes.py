"""Runs of a user's program with a version of Triton, a store and a Triton cache of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nostall.attach.apply import environment
from nostall.store import Store
from tests.corpus.catalogue import OLD_TRITON, ROOT
from tests.unit.attach.variants import GPU, keep_variant

PROGRAM = Path(__file__).with_name("program.py")
_ATTACH = ("NOSTALL_", "TRITON_", "TORCHINDUCTOR_")


@dataclass(frozen=True)
class ProgramRun:
    """What a program loaded and printed."""

    # sha256 of the loaded binaries, in order.
    loaded: list[str]
    # Parsed lines of standard output.
    lines: list[dict[str, Any]]
    # nostall's lines on standard error.
    messages: str


@dataclass
class Machine:
    """A user's machine."""

    folder: Path
    # Version of Triton.
    triton: str
    store: Store
    # sha256 of the optimised variant of each original, by the original's.
    variants: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def environment(self, **changes: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_ATTACH)}
        old = [str(OLD_TRITON)] if self.triton == "3.6" else []
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join([*old, str(ROOT / "src")]),
            "TRITON_CACHE_DIR": str(self.cache),
            "NOSTALL_HOME": str(self.store.root),
            "NOSTALL_GPU": GPU,
            **changes,
        }

    def run(self, mode: str, *args: str, apply: bool = False, **changes: str) -> ProgramRun:
        inherited = self.environment(**changes)
        applied = environment(inherited) if apply else inherited
        process = subprocess.run(
            [sys.executable, PROGRAM, mode, *args],
            env=applied,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        lines = [json.loads(line) for line in process.stdout.splitlines()]
        messages = [x for x in process.stderr.splitlines() if x.startswith("nostall: ")]
        return ProgramRun([x["sha256"] for x in lines], lines, "\n".join(messages))

    def files(self) -> dict[str, bytes]:
        """All files of Triton's cache."""
        return {
            str(path.relative_to(self.cache)): path.read_bytes() if path.is_file() else b""
            for path in self.cache.rglob("*")
        }


def make_machine(folder: Path, triton: str) -> Machine:
    """A machine with a warm Triton cache, and variants of the program's kernels in its store."""
    machine = Machine(folder, triton, Store(folder / "home"))
    binaries = folder / "kept"
    binaries.mkdir()
    machine.run("autotune", str(binaries))
    for path in sorted(binaries.iterdir()):
        row = keep_variant(machine.store, path.read_bytes())
        machine.variants[row.original] = row.optimised
    assert len(machine.variants) == 2
    return machine


def empty_cache(machine: Machine) -> None:
    shutil.rmtree(machine.cache)
    machine.cache.mkdir()
