"""Running the user's program with one of the Tritons, a store and a Triton cache of its own."""

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
class Ran:
    """What a program loaded (sha256, in order) and said; ``lines`` is all that it printed."""

    loaded: list[str]
    lines: list[dict[str, Any]]
    err: str


@dataclass
class World:
    """A user's machine.  ``twins`` maps the sha256 of originals to those of their variants."""

    place: Path
    triton: str
    store: Store
    twins: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.place / "cache"

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_ATTACH)}
        old = [str(OLD_TRITON)] if self.triton == "3.6" else []
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([*old, str(ROOT / "src")]),
            "TRITON_CACHE_DIR": str(self.cache),
            "NOSTALL_HOME": str(self.store.root),
            "NOSTALL_GPU": GPU,
            **changes,
        }

    def run(self, mode: str, *args: str, apply: bool = False, **changes: str) -> Ran:
        inherited = self.environment(**changes)
        chosen = environment(inherited) if apply else inherited
        done = subprocess.run(
            [sys.executable, PROGRAM, mode, *args],
            env=chosen,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        said = [line for line in done.stderr.splitlines() if line.startswith("nostall: ")]
        return Ran([x["sha256"] for x in lines], lines, "\n".join(said))

    def files(self) -> dict[str, bytes]:
        """Triton's cache, whole."""
        return {
            str(path.relative_to(self.cache)): path.read_bytes() if path.is_file() else b""
            for path in self.cache.rglob("*")
        }


def make(place: Path, triton: str) -> World:
    """A machine whose Triton cache is warm, and whose store knows the program's kernels."""
    world = World(place, triton, Store(place / "home"))
    kept = place / "kept"
    kept.mkdir()
    world.run("autotune", str(kept))
    for path in sorted(kept.iterdir()):
        row = keep_variant(world.store, path.read_bytes())
        world.twins[row.original] = row.optimised
    assert len(world.twins) == 2
    return world


def emptied(world: World) -> None:
    shutil.rmtree(world.cache)
    world.cache.mkdir()
