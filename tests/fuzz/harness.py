"""What becomes of a mutant: an outcome, the time it took, and anything that must not happen.

Batches run in a child process whose address space is limited, so that a parser that believes an
absurd size meets ``MemoryError`` instead of the machine's end.
"""

from __future__ import annotations

import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

from nostall.core.errors import BadBinary
from nostall.sass.binary.attributes import attributes
from nostall.sass.binary.cubin import Cubin, disassemblable
from nostall.sass.binary.elf import SHT_CUDA_INFO
from nostall.sass.program.program import Program
from nostall.sass.safety.verify import validate_program
from tests.fuzz.mutants import CONTAINER, CONTENT, Mutant, Original, mutate

ROOT = Path(__file__).resolve().parents[2]
NVCC = ROOT / "tests" / "corpus" / "nvcc"
SMALL = 20_000
"""Bytes of the largest original that goes through the vendor's tool."""

OWN_SECONDS = 5.0
TOOL_SECONDS = 150.0
MEMORY = 1 << 30
"""Bytes of address space that a batch may use on top of the interpreter's own."""


class Hang(BaseException):
    """A mutant took longer than it may."""


@dataclass
class Report:
    """Outcomes of a batch; ``failures`` describe what must not happen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest: dict[str, Any] = field(default_factory=lambda: {"seconds": 0.0})
    peak_rss_mib: float = 0.0

    def add(self, other: Report) -> None:
        """Take another batch in."""
        self.outcomes += other.outcomes
        self.kinds += other.kinds
        self.failures += other.failures
        self.slowest = max(self.slowest, other.slowest, key=lambda s: s["seconds"])
        self.peak_rss_mib = max(self.peak_rss_mib, other.peak_rss_mib)

    def fail(self, mutant: Mutant, what: str) -> None:
        """Note what must not happen, with all that repeats it."""
        how = {"seed": mutant.seed, "of": mutant.of, "how": mutant.how}
        self.failures.append({**how, "what": what})


@lru_cache
def originals(largest: int | None = None) -> tuple[Original, ...]:
    """The committed cubins, the refused ones included."""
    paths = sorted([*NVCC.glob("*.cubin"), *(ROOT / "examples" / "nvcc").glob("*.cubin")])
    found = [Original.read(path) for path in paths]
    return tuple(o for o in found if largest is None or len(o.data) <= largest)


def own_mutant(seed: int) -> Mutant:
    """A mutant for nostall's own parsers."""
    return mutate(originals(), CONTAINER, seed)


def tool_mutant(seed: int) -> Mutant:
    """A mutant for the whole way through nvdisasm and the verifier."""
    return mutate(originals(SMALL), CONTENT, seed)


def through_own(data: bytes) -> str:
    """Everything that reads a cubin's bytes without the vendor's tools."""
    cubin = Cubin.parse(data)
    for section in cubin.elf.sections:
        if section.type == SHT_CUDA_INFO:
            for entry in attributes(cubin.elf, section):
                assert len(entry.payload) <= len(data)
    assert len(disassemblable(data, cubin.sm)) == len(data)
    for text in cubin.texts:
        assert text.at + text.size <= len(data)
        assert all(r.at + r.width <= len(data) and r.offset < text.size for r in text.records)
    return "parsed"


def through_tool(data: bytes) -> str:
    """nvdisasm, the program, its bytes again, and the validator's verdict."""
    program = Program.from_cubin(data)
    assert program.to_cubin() == data
    return "parsed, safe" if validate_program(program).safe else "parsed, refused"


def batch(which: str, seeds: Iterable[int]) -> Report:
    """Outcomes of the mutants of these seeds, in this process."""
    make, judge, limit = _ways()[which]
    report = Report()
    before = signal.signal(signal.SIGALRM, _alarm)
    try:
        for seed in seeds:
            mutant = make(seed)
            report.kinds[mutant.how.partition("+")[0]] += 1
            start = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                outcome = judge(mutant.data)
            except BadBinary as error:
                outcome = type(error).__name__
                if not str(error).strip():
                    report.fail(mutant, f"{outcome} without a message")
            except Hang:
                outcome = "hang"
                report.fail(mutant, f"no end after {limit} s")
            except Exception as error:
                outcome = "crash"
                last = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(last.filename).name}:{last.lineno}"
                report.fail(mutant, f"{type(error).__name__} at {place}: {str(error)[:200]}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            seconds = time.perf_counter() - start
            report.outcomes[outcome] += 1
            if seconds > report.slowest["seconds"]:
                report.slowest = {
                    "seconds": round(seconds, 4),
                    "seed": seed,
                    "of": mutant.of,
                    "how": mutant.how,
                    "outcome": outcome,
                }
    finally:
        signal.signal(signal.SIGALRM, before)
    report.peak_rss_mib = _peak_mib()
    return report


def _peak_mib() -> float:
    """The most memory this process ever held.  Not ``ru_maxrss``: that begins with the memory of
    the process which started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def limited(which: str, seeds: range, size: int = 1000) -> Iterable[Report]:
    """Batches of ``size`` seeds, in a child with a limit on memory; yields one report each."""
    context = get_context("spawn")
    start = seeds.start
    while start < seeds.stop:
        part = range(start, min(start + size, seeds.stop))
        with ProcessPoolExecutor(1, mp_context=context, initializer=_limit_memory) as pool:
            try:
                report = pool.submit(batch, which, part).result()
            except BrokenProcessPool:
                report = Report(Counter({"crash": len(part)}))
                report.failures.append({"seeds": [part.start, part.stop], "what": "child died"})
        yield report
        start = part.stop


def _ways() -> dict[str, tuple[Callable[[int], Mutant], Callable[[bytes], str], float]]:
    return {
        "own": (own_mutant, through_own, OWN_SECONDS),
        "tool": (tool_mutant, through_tool, TOOL_SECONDS),
    }


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
