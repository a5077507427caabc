"""Fuzzing harness: runs mutants and records outcomes, times, peak memory and failures.

Batches run in a child process with a limit on its address space.  A parser that allocates an
absurd size then raises ``MemoryError`` and does not exhaust the memory of the machine.
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
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

from nostall.core.errors import BadBinary
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.cubin import Cubin, upgrade_elf_header
from nostall.sass.binary.elf import SHT_CUDA_INFO
from nostall.sass.program.program import Program
from nostall.sass.safety.verify import validate_program
from tests.fuzz.mutants import CONTAINER_MUTATIONS, CONTENT_MUTATIONS, Mutant, Original, mutate
from tests.fuzz.report import Report

ROOT = Path(__file__).resolve().parents[2]
NVCC = ROOT / "tests" / "corpus" / "nvcc"
MAX_TOOL_BYTES = 20_000
"""Bytes of the largest original whose mutants are disassembled."""

OWN_SECONDS = 5.0
"""Time limit for a mutant in nostall's own parsers."""
TOOL_SECONDS = 150.0
"""Time limit for a mutant in nvdisasm and the verifier."""
MEMORY = 1 << 30
"""Bytes of address space that a batch may use in addition to the interpreter's own."""


class MutantTimeout(BaseException):
    """A mutant exceeded its time limit."""


@lru_cache
def originals(largest: int | None = None) -> tuple[Original, ...]:
    """The committed cubins of at most ``largest`` bytes, unsupported architectures included."""
    paths = sorted([*NVCC.glob("*.cubin"), *(ROOT / "examples" / "nvcc").glob("*.cubin")])
    cubins = [Original.read(path) for path in paths]
    return tuple(o for o in cubins if largest is None or len(o.data) <= largest)


def parser_mutant(seed: int) -> Mutant:
    """The mutant of a seed for nostall's own parsers."""
    return mutate(originals(), CONTAINER_MUTATIONS, seed)


def tool_mutant(seed: int) -> Mutant:
    """The mutant of a seed for nvdisasm and the verifier."""
    return mutate(originals(MAX_TOOL_BYTES), CONTENT_MUTATIONS, seed)


def parse_cubin(data: bytes) -> str:
    """Run all code that reads a cubin without NVIDIA's tools; returns the outcome."""
    cubin = Cubin.parse(data)
    for section in cubin.elf.sections:
        if section.type == SHT_CUDA_INFO:
            for entry in parse_attributes(cubin.elf, section):
                assert len(entry.payload) <= len(data)
    assert len(upgrade_elf_header(data, cubin.sm)) == len(data)
    for text in cubin.texts:
        assert text.file_offset + text.size <= len(data)
        assert all(
            r.file_offset + r.width <= len(data) and r.offset < text.size for r in text.records
        )
    return "parsed"


def validate_cubin(data: bytes) -> str:
    """Disassemble, round-trip and validate a cubin; returns the outcome."""
    program = Program.from_cubin(data)
    assert program.to_cubin() == data
    return "parsed, safe" if validate_program(program).safe else "parsed, refused"


def run_batch(target: str, seeds: Iterable[int]) -> Report:
    """Run the mutants of these seeds in this process.

    ``target``: "own" for nostall's parsers, "tool" for nvdisasm and the verifier.
    """
    make_mutant, run, limit = _targets()[target]
    report = Report()
    before = signal.signal(signal.SIGALRM, _alarm)
    try:
        for seed in seeds:
            mutant = make_mutant(seed)
            report.kinds[mutant.mutation.partition("+")[0]] += 1
            start = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                outcome = run(mutant.data)
            except BadBinary as error:
                outcome = type(error).__name__
                if not str(error).strip():
                    report.fail(mutant, f"{outcome} without a message")
            except MutantTimeout:
                outcome = "hang"
                report.fail(mutant, f"did not finish within {limit} s")
            except Exception as error:  # any other error of the code under test is a failure
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
                    "of": mutant.original,
                    "how": mutant.mutation,
                    "outcome": outcome,
                }
    finally:
        signal.signal(signal.SIGALRM, before)
    report.peak_rss_mib = _peak_mib()
    return report


def _peak_mib() -> float:
    """Peak resident memory of this process, in MiB.

    ``ru_maxrss`` does not serve: it starts with the memory of the parent process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def run_limited(target: str, seeds: range, size: int = 1000) -> Iterable[Report]:
    """Run batches of ``size`` seeds, each in a child process with limited memory.

    Yields one report for each batch.
    """
    context = get_context("spawn")
    start = seeds.start
    while start < seeds.stop:
        part = range(start, min(start + size, seeds.stop))
        with ProcessPoolExecutor(1, mp_context=context, initializer=_limit_memory) as pool:
            try:
                report = pool.submit(run_batch, target, part).result()
            except BrokenProcessPool:
                report = Report(Counter({"crash": len(part)}))
                report.failures.append(
                    {"seeds": [part.start, part.stop], "what": "the child process died"}
                )
        yield report
        start = part.stop


def _targets() -> dict[str, tuple[Callable[[int], Mutant], Callable[[bytes], str], float]]:
    """Target -> (mutant of a seed, code under test, time limit in seconds)."""
    return {
        "own": (parser_mutant, parse_cubin, OWN_SECONDS),
        "tool": (tool_mutant, validate_cubin, TOOL_SECONDS),
    }


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise MutantTimeout


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
