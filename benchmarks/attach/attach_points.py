"""Do results reach the GPU?  Every attachment point, on a real one.

    python -m benchmarks run attach.attach_points --out benchmarks/attach/results/attach_points.json

Tunes one kernel for a few seconds and records it; then runs ``attach_program.py`` in each way and
looks at the bytes that were handed to the driver, at the result (bit by bit, against the run
without nostall), and at Triton's cache (no optimised cubin may be in it).  Where the search finds
no gain, and for torch.compile's kernel, a random legal schedule is recorded as modelled and asked
for with ``--modelled``: what is tested is the way, not the gain.  Times nothing.  Needs a GPU,
Triton and PyTorch; cuda.core and CuPy are left out where they are not installed.  Exit code 1 when
any way fails.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.harness.result_file import save
from nostall import __version__
from nostall.gpu import Kernel, LocalGpu
from nostall.sass import Program, verify
from nostall.sass.binary import toolchain
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal
from nostall.store import Provenance, Row, Store, Verification
from nostall.store.artefacts import content_hash
from nostall.tuning.job import Settings, tune
from nostall.tuning.source import Source, compile_triton
from nostall.tuning.store_records import record_result

ROOT = Path(__file__).resolve().parents[2]
USER_PROGRAM = Path(__file__).with_name("user_program.py")
APPLY = [sys.executable, "-m", "nostall", "apply", "--modelled", "--"]


@dataclass(frozen=True)
class AttachCheck:
    """One attachment point and what was found there.  ``asked``: the optimised cubins that had to
    be loaded; ``loaded``: all that were."""

    way: str
    asked: list[str]
    loaded: list[str]
    equal: bool
    cache_clean: bool
    note: str = ""

    @property
    def good(self) -> bool:
        return set(self.asked) <= set(self.loaded) and self.equal and self.cache_clean


class AttachRuns:
    """A store, a Triton cache and a folder for each run, all temporary."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.store = Store(folder / "home")
        self.environment = {
            **os.environ,
            "NOSTALL_HOME": str(self.store.root),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])
            ),
        }
        self.errors: dict[str, str] = {}

    def run(
        self,
        way: str,
        mode: str,
        *,
        apply: bool = False,
        allow_modelled: bool = True,
        changes: dict[str, str] | None = None,
    ) -> Path:
        """Run the program; the folder it wrote to.  ``allow_modelled``: modelled records count."""
        folder = self.folder(way)
        modelled = {"NOSTALL_MODELLED": "1" if allow_modelled else "0"}
        changed = {**self.environment, **modelled, **(changes or {})}
        command = [sys.executable, str(USER_PROGRAM), mode, str(folder)]
        done = subprocess.run(
            [*APPLY, *command] if apply else command,
            env=changed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
            check=False,
        )
        if done.returncode:
            self.errors[way] = (done.stderr.strip().splitlines() or ["?"])[-1]
        return folder

    def folder(self, way: str) -> Path:
        folder = self.root / "runs" / way.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def cubins(self) -> set[Path]:
        """All cubins in Triton's and Inductor's caches."""
        caches = (self.root / "triton", self.root / "inductor")
        return {file for cache in caches for file in cache.rglob("*.cubin")}

    def clean(self) -> bool:
        """No optimised cubin is in a cache."""
        optimised = {row.optimised for row in self.store.rows()}
        return not any(_sha256(file) in optimised for file in self.cubins())

    def check(self, way: str, folder: Path, plain: Path, asked: list[str]) -> AttachCheck:
        equal = False
        if (folder / "result.npy").exists() and (plain / "result.npy").exists():
            one, two = (np.load(path / "result.npy").tobytes() for path in (folder, plain))
            equal = one == two
        return AttachCheck(
            way, asked, _loaded(folder), equal, self.clean(), self.errors.get(way, "")
        )


def record_measured(
    runs: AttachRuns, source: Source, seconds: float
) -> tuple[Row | None, dict[str, str]]:
    """The record of a measured gain, if one of three seeds finds any; the GPU as found."""
    assert source.launch is not None
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        for seed in range(3):
            settings = Settings("anneal", seed, seconds, objective="gpu")
            tuned = tune(source, Anneal(), settings, device=gpu)
            if tuned.improved:
                return record_result(runs.store, source, settings, tuned, gpu.info), dict(gpu.info)
        return None, dict(gpu.info)


def record_random_schedule(store: Store, original: bytes, origin: str, moves: int = 40) -> Row:
    """A random legal schedule, verified and recorded as modelled (with no gain)."""
    program = Program.from_cubin(original)
    function = program.kernels[0]
    space, rng = ScheduleSpace(program, function), np.random.default_rng(0)
    state = space.start()
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is not None:
            state = space.apply(state, move)
    optimised = space.impose(state).to_cubin()
    verdict = verify(original, optimised)
    return store.record(
        original,
        optimised,
        Provenance(
            original=content_hash(original),
            optimised=content_hash(optimised),
            kernel=function.name,
            origin=origin,
            architecture=f"sm_{program.sm}",
            kind="modelled",
            ratio=1.0,
            gpu=None,
            device={},
            toolchain={},
            launch=None,
            verified=Verification(
                safe=verdict.safe,
                checked=verdict.checked,
                nostall=__version__,
                nvdisasm=toolchain.version("nvdisasm"),
            ),
            comparison=None,
            settings={"strategy": "random walk", "moves": moves},
            notes=("recorded to test the way, not for a gain",),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
    )


def run_all(runs: AttachRuns, source: Source, row: Row) -> list[AttachCheck]:
    """All attachment points; the plain run comes first, its result is what is right."""
    assert source.launch is not None
    allow_modelled, twin = row.kind == "modelled", [row.optimised]
    plain = runs.run("plain", "plain", allow_modelled=False)
    found = [runs.check("plain", plain, plain, [row.original])]

    def add(way: str, folder: Path, asked: list[str] | None = None) -> None:
        found.append(runs.check(way, folder, plain, twin if asked is None else asked))

    add("apply", runs.run("apply", "plain", apply=True))
    cold = {"TRITON_CACHE_DIR": str(runs.root / "triton" / "cold")}
    add("apply, cold cache", runs.run("apply, cold cache", "plain", apply=True, changes=cold))
    add("apply, worker process", runs.run("apply, worker process", "worker", apply=True))
    add("decorator", runs.run("decorator", "decorated", allow_modelled=allow_modelled))
    add(
        "decorator, autotune",
        runs.run("decorator, autotune", "autotune", allow_modelled=allow_modelled),
    )
    for host in filter(_installed, ("cuda.core", "cupy")):
        way = f"load, {host}"
        (runs.folder(way) / "original").write_bytes(source.cubin)
        (runs.folder(way) / "shared").write_text(str(source.launch.shared))
        add(way, runs.run(way, host, allow_modelled=allow_modelled))
    other = {"NOSTALL_HOME": str(runs.root / "empty")}
    folder = runs.run("decorator, first call", "first-call", allow_modelled=False, changes=other)
    kept = [r.optimised for r in Store(runs.root / "empty").rows()]
    add("decorator, first call", folder, [row.original, *kept])
    found += run_torch_compile(runs)
    add("plain again", runs.run("plain again", "plain", allow_modelled=False), [row.original])
    return found


def run_torch_compile(runs: AttachRuns) -> list[AttachCheck]:
    """An unchanged program with torch.compile, run as usual first (with Inductor's static launcher,
    past which nothing is seen); then with every kernel that it compiled exchanged."""
    before = runs.cubins()
    plain = runs.run("torch.compile", "compiled", allow_modelled=False)
    new = {_sha256(file): file.read_bytes() for file in runs.cubins() - before}
    found = [runs.check("torch.compile", plain, plain, [])]
    optimised_of = {
        sha256: record_random_schedule(runs.store, data, "torch.compile").optimised
        for sha256, data in new.items()
    }
    way = "apply, torch.compile"
    after = runs.run(way, "compiled", apply=True)
    loaded = set(_loaded(after))
    # Of several configurations Inductor launches one; whatever it launches has to be exchanged.
    asked = [twin for twin in optimised_of.values() if twin in loaded]
    if not asked or loaded & set(optimised_of):
        asked = list(optimised_of.values()) or ["a kernel of torch.compile"]
    return [*found, runs.check(way, after, plain, asked)]


def _installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        print(f"{module} is not installed: left out")
    return found


def _loaded(folder: Path) -> list[str]:
    log = folder / "loaded"
    return log.read_text().split() if log.exists() else []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _table(found: list[AttachCheck]) -> None:
    print(f"{'way':24} {'optimised bytes loaded':24} {'result':10} {'cache':8}")
    for way in found:
        hit = len(set(way.asked) & set(way.loaded))
        print(
            f"{way.way:24} {f'{hit} of {len(set(way.asked))}':24} "
            f"{'equal' if way.equal else 'DIFFERS':10} {'clean' if way.cache_clean else 'DIRTY':8} "
            f"{'' if way.good else 'FAILED ' + way.note}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="of search, per seed")


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="nostall-attach-") as folder:
        runs = AttachRuns(Path(folder))
        source = compile_triton(ROOT / "examples" / "rmsnorm.py", "rmsnorm", None, "sm_90")
        row, gpu = record_measured(runs, source, options.seconds)
        row = row or record_random_schedule(runs.store, source.cubin, source.origin)
        found = run_all(runs, source, row)
    _table(found)
    body = [{**asdict(way), "good": way.good} for way in found]
    save(options.out, gpu=gpu, record={"kind": row.kind, "ratio": row.ratio}, ways=body)
    return 0 if all(way.good for way in found) else 1
