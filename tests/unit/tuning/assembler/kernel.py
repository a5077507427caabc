"""A small kernel with its PTX, workers in this process, and a device whose times are given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from nostall.core import Buffer, LaunchSpec
from nostall.gpu import Outcome, Timing
from nostall.ptx.assemble.builder import Builder
from nostall.ptx.assemble.command import plain_command
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import Assembler
from nostall.sass.binary.code_hash import code_sha256
from nostall.tuning.assembler import job, objective
from nostall.tuning.sources.source import Source

_LOADS = "".join(f"	ld.global.f32 	%f{n}, [%rd3+{4 * n}];\n" for n in range(1, 7))
_WORK = "".join(
    f"	mul.rn.f32 	%f{n + 6}, %f{n}, 0f4{n}400000;\n"
    f"	sqrt.approx.f32 	%f{n + 12}, %f{n + 6};\n"
    for n in range(1, 7)
)
_STORES = "".join(f"	st.global.f32 	[%rd3+{4 * n}], %f{n + 12};\n" for n in range(1, 7))
PTX = f"""\
.version 8.0
.target sm_80
.address_size 64

.visible .entry scale(
	.param .u64 scale_param_0
)
.reqntid 128
{{
	.reg .b32 	%r<3>;
	.reg .f32 	%f<20>;
	.reg .b64 	%rd<4>;
	ld.param.u64 	%rd1, [scale_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 32;
	add.s64 	%rd3, %rd1, %rd2;
{_LOADS}{_WORK}{_STORES}	ret;
}}
"""
LAUNCH = LaunchSpec(
    grid=(4, 1, 1),
    block=(128, 1, 1),
    args=(Buffer(name="x", dtype="f32", shape=(1024,), role="inout"),),
)
ORIGINAL_S = 1e-5


def make_source(assembler: Assembler) -> Source:
    """The kernel as ``assembler`` makes it."""
    with TemporaryDirectory() as folder:
        run = run_ptxas(assembler, PTX, plain_command(PTX).arguments(), Path(folder))
    assert run.status == "assembled", run.detail
    provenance = MappingProxyType({"compiler": "test", "ptxas": assembler.version})
    return Source(run.cubin, "scale", LAUNCH, "test.ptx", provenance, PTX)


class InlineWorkers:
    """Replaces the pool of processes: runs tasks in this process, at once."""

    workers = 2

    def __init__(self, make: Callable[[], Builder], task: object, workers: int | None) -> None:
        self.builder = make()
        self.tasks = 0

    def submit_task(self, task: Callable[[Any, Any], Any], argument: Any) -> Future[Any]:
        self.tasks += 1
        future: Future[Any] = Future()
        future.set_result(task(self.builder, argument))
        return future

    def __enter__(self) -> InlineWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.builder.close()


@dataclass
class TimedDevice:
    """A device on which the time of a cubin depends on its code: 0.9 to 1.1 of the original's."""

    original: bytes
    info: Mapping[str, str] = field(default_factory=lambda: {"gpu": "Fake"})
    wrong_part: float = 0.0
    """Part of the codes whose outputs differ."""
    confirms: bool = True
    """Whether the final comparison agrees with the search."""
    evaluated: list[bytes] = field(default_factory=list)
    compared: list[bytes] = field(default_factory=list)

    def factor(self, cubin: bytes) -> float:
        if code_sha256(cubin) == code_sha256(self.original):
            return 1.0
        return 0.9 + 0.2 * int(code_sha256(cubin)[:4], 16) / 0xFFFF

    def is_wrong(self, cubin: bytes) -> bool:
        return hashlib.sha256(code_sha256(cubin).encode()).digest()[0] < 256 * self.wrong_part

    def evaluate(self, cubin: bytes) -> Outcome:
        self.evaluated.append(cubin)
        if cubin != self.original and self.is_wrong(cubin):
            return Outcome("wrong", detail="4 words differ", phase_seconds={"check": 0.001})
        return Outcome("timed", self._timing(self.factor(cubin), 5), phase_seconds={"time": 0.002})

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        self.compared.append(cubin)
        timing = self._timing(self.factor(cubin) if self.confirms else 1.0, rounds)
        return Outcome("timed", Timing(timing.original, timing.candidate, timing.original))

    @staticmethod
    def _timing(factor: float, samples: int) -> Timing:
        return Timing((ORIGINAL_S,) * samples, (ORIGINAL_S * factor,) * samples)


def run_inline(monkeypatch: Any) -> None:
    """Let the workers of searches run in this process.

    The verifier of machine code runs on the result only, because nvdisasm takes long to start.
    """
    monkeypatch.setattr(job, "BuildPool", InlineWorkers)
    monkeypatch.setattr(objective, "find_hazards", lambda builder, cubin: "")


def open_inline(
    source: Source, installed: Sequence[Assembler], monkeypatch: Any
) -> AbstractContextManager[job.Setup]:
    """The setup of a search whose workers run in this process; see :func:`run_inline`."""
    run_inline(monkeypatch)
    return job.open_setup(source, installed)
