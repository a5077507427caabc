"""Test each attachment point on a GPU: is the optimised binary loaded, and is its result equal?

    python -m benchmarks run attach.attach_points --out benchmarks/attach/results/attach_points.json

Tunes one kernel for a few seconds and records the result. Then runs ``user_program.py`` once for
each attachment point and checks the binaries that were loaded, the result (bit by bit against the
run without nostall), and that no optimised cubin is in Triton's cache. If the search finds no gain,
and for the kernel of torch.compile, a random legal schedule is recorded as modelled and enabled
with ``--modelled``: the benchmark tests the attachment, not the gain, and times nothing. Needs a
GPU, Triton and PyTorch; cuda.core and CuPy are skipped if they are not installed. The exit code is
1 if an attachment point fails.
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
from nostall.tuning.job import tune
from nostall.tuning.records.store_records import record_result
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import compile_triton

ROOT = Path(__file__).resolve().parents[2]
USER_PROGRAM = Path(__file__).with_name("user_program.py")
APPLY = [sys.executable, "-m", "nostall", "apply", "--modelled", "--"]


@dataclass(frozen=True)
class AttachCheck:
    """Result of one attachment point; the fields are keys of the result file."""

    way: str
    """Name of the attachment point."""
    asked: list[str]
    """sha256 of the cubins that have to be loaded."""
    loaded: list[str]
    """sha256 of the cubins that were loaded."""
    equal: bool
    """Whether the result has the bits of the run without nostall."""
    cache_clean: bool
    """Whether no optimised cubin is in a compiler cache."""
    note: str = ""
    """Last line of the program's errors."""

    @property
    def is_good(self) -> bool:
        return set(self.asked) <= set(self.loaded) and self.equal and self.cache_clean


class AttachRuns:
    """Runs of the user program with a temporary store, compiler caches and output folders."""

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
        """Run the program; returns its output folder.

        ``allow_modelled``: modelled records are loaded, too. ``changes``: environment variables.
        """
        folder = self.folder(way)
        modelled = {"NOSTALL_MODELLED": "1" if allow_modelled else "0"}
        changed = {**self.environment, **modelled, **(changes or {})}
        command = [sys.executable, str(USER_PROGRAM), mode, str(folder)]
        process = subprocess.run(
            [*APPLY, *command] if apply else command,
            env=changed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
            check=False,
        )
        if process.returncode:
            self.errors[way] = (process.stderr.strip().splitlines() or ["?"])[-1]
        return folder

    def folder(self, way: str) -> Path:
        """Output folder of an attachment point."""
        folder = self.root / "runs" / way.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def cubins(self) -> set[Path]:
        """All cubins in Triton's and Inductor's caches."""
        caches = (self.root / "triton", self.root / "inductor")
        return {file for cache in caches for file in cache.rglob("*.cubin")}

    def is_cache_clean(self) -> bool:
        """Whether no optimised cubin is in a cache."""
        optimised = {row.optimised for row in self.store.rows()}
        return not any(_sha256(file) in optimised for file in self.cubins())

    def check(self, way: str, folder: Path, plain: Path, asked: list[str]) -> AttachCheck:
        equal = False
        if (folder / "result.npy").exists() and (plain / "result.npy").exists():
            result, expected = (np.load(path / "result.npy").tobytes() for path in (folder, plain))
            equal = result == expected
        return AttachCheck(
            way, asked, _loaded(folder), equal, self.is_cache_clean(), self.errors.get(way, "")
        )


def record_measured(
    runs: AttachRuns, source: Source, seconds: float
) -> tuple[Row | None, dict[str, str]]:
    """Record a measured gain if one of three seeds finds one; also returns the GPU's properties."""
    assert source.launch is not None
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        for seed in range(3):
            settings = Settings("anneal", seed=seed, seconds=seconds, objective="gpu")
            tuned = tune(source, Anneal(), settings, device=gpu)
            if tuned.improved:
                return record_result(runs.store, source, settings, tuned, gpu.info), dict(gpu.info)
        return None, dict(gpu.info)


def record_random_schedule(store: Store, original: bytes, origin: str, moves: int = 40) -> Row:
    """Record a random legal schedule as modelled, after verification; it has no gain."""
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
            notes=("recorded to test the attachment, not for a gain",),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
    )


def run_all(runs: AttachRuns, source: Source, row: Row) -> list[AttachCheck]:
    """Run all attachment points; the results are compared with those of the first, plain run."""
    assert source.launch is not None
    allow_modelled, optimised = row.kind == "modelled", [row.optimised]
    plain = runs.run("plain", "plain", allow_modelled=False)
    checks = [runs.check("plain", plain, plain, [row.original])]

    def add(way: str, folder: Path, asked: list[str] | None = None) -> None:
        checks.append(runs.check(way, folder, plain, optimised if asked is None else asked))

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
    empty_store = {"NOSTALL_HOME": str(runs.root / "empty")}
    folder = runs.run(
        "decorator, first call", "first-call", allow_modelled=False, changes=empty_store
    )
    tuned = [r.optimised for r in Store(runs.root / "empty").rows()]
    add("decorator, first call", folder, [row.original, *tuned])
    checks += run_torch_compile(runs)
    add("plain again", runs.run("plain again", "plain", allow_modelled=False), [row.original])
    return checks


def run_torch_compile(runs: AttachRuns) -> list[AttachCheck]:
    """Run an unchanged program with torch.compile, without and with optimised kernels.

    The first run uses Inductor's static launcher, which bypasses the recording of loaded binaries.
    """
    before = runs.cubins()
    plain = runs.run("torch.compile", "compiled", allow_modelled=False)
    new = {_sha256(file): file.read_bytes() for file in runs.cubins() - before}
    checks = [runs.check("torch.compile", plain, plain, [])]
    optimised_by_original = {
        sha256: record_random_schedule(runs.store, data, "torch.compile").optimised
        for sha256, data in new.items()
    }
    way = "apply, torch.compile"
    after = runs.run(way, "compiled", apply=True)
    loaded = set(_loaded(after))
    # Inductor launches one of several configurations, and that one has to be replaced.
    asked = [sha256 for sha256 in optimised_by_original.values() if sha256 in loaded]
    if not asked or loaded & set(optimised_by_original):
        asked = list(optimised_by_original.values()) or ["a kernel of torch.compile"]
    return [*checks, runs.check(way, after, plain, asked)]


def _installed(module: str) -> bool:
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        print(f"{module} is not installed: skipped")
    return is_installed


def _loaded(folder: Path) -> list[str]:
    log = folder / "loaded"
    return log.read_text().split() if log.exists() else []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _print_table(checks: list[AttachCheck]) -> None:
    print(f"{'way':24} {'optimised bytes loaded':24} {'result':10} {'cache':8}")
    for way in checks:
        hit = len(set(way.asked) & set(way.loaded))
        print(
            f"{way.way:24} {f'{hit} of {len(set(way.asked))}':24} "
            f"{'equal' if way.equal else 'DIFFERS':10} {'clean' if way.cache_clean else 'DIRTY':8} "
            f"{'' if way.is_good else 'FAILED ' + way.note}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds of search for each seed"
    )


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="nostall-attach-") as folder:
        runs = AttachRuns(Path(folder))
        source = compile_triton(ROOT / "examples" / "rmsnorm.py", "rmsnorm", None, "sm_90")
        row, gpu = record_measured(runs, source, options.seconds)
        row = row or record_random_schedule(runs.store, source.cubin, source.origin)
        checks = run_all(runs, source, row)
    _print_table(checks)
    body = [{**asdict(way), "good": way.is_good} for way in checks]
    save(options.out, gpu=gpu, record={"kind": row.kind, "ratio": row.ratio}, ways=body)
    return 0 if all(way.is_good for way in checks) else 1
