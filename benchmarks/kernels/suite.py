"""What the measured suite runs over: kernels, sizes, and each one's compiler configurations.

SIP's two kernels and CuAsmRL's six at shapes that were published for them (few blocks, long loops),
each at one shape that fills an H200 as well, and three that no Triton author tuned.  Those with
matrix products come twice: with Hopper's warpgroup instructions (``wgmma``) and with the older
warp-wide ones (``mma``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.schema import Instructions, Options, Size
from benchmarks.kernels.examples import EXAMPLES
from nostall.core import BadInput, LaunchSpec
from nostall.tuning.kernel_file import import_file
from nostall.tuning.source import Source, compile_triton, load_cubin

_WITHOUT_WGMMA = "DISABLE_MMA_V3"
"""Triton's own switch; read when it compiles, no part of its options."""

Tile = tuple[int, ...]
Tiles = dict[Instructions, tuple[Tile, ...]]

_GEMM_SMALL: Tiles = {
    "wgmma": ((64, 32, 64), (64, 64, 64), (128, 32, 64), (64, 128, 64), (128, 64, 64)),
    "mma": ((32, 32, 64), (32, 64, 64), (64, 32, 64), (64, 64, 32), (64, 64, 64)),
}
_GEMM_LARGE: Tiles = {
    "wgmma": ((128, 128, 32), (128, 128, 64), (64, 256, 64), (128, 256, 64), (256, 128, 64)),
    "mma": ((64, 64, 64), (64, 128, 32), (128, 64, 32), (128, 128, 32), (128, 128, 64)),
}
# Two accumulators, so half the tile.
_GATED_LARGE: Tiles = {
    "wgmma": ((64, 128, 64), (128, 64, 64), (128, 128, 32), (128, 128, 64), (256, 64, 64)),
    "mma": ((64, 64, 32), (64, 64, 64), (64, 128, 32), (128, 64, 32), (128, 64, 64)),
}
_ATTENTION: Tiles = {
    "wgmma": ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128)),
    "mma": ((32, 32), (64, 32), (64, 64), (128, 32), (128, 64)),
}


@dataclass(frozen=True)
class Entry:
    """One kernel at one problem size, and the options that its baseline tries.

    ``problem`` are the arguments of the example file's ``launch``; a kernel of ``nvcc`` or of
    Inductor has none, comes as it is, and ``file`` is its cubin.
    """

    kernel: str
    file: Path
    problem: tuple[int, ...] = ()
    size: Size | None = None
    instructions: Instructions | None = None
    tiles: tuple[Tile | None, ...] = (None,)
    warps: tuple[int, ...] = (4,)
    stages: tuple[int, ...] = (3,)
    registers: tuple[int | None, ...] = (None,)

    @property
    def name(self) -> str:
        shape = f"-{'x'.join(map(str, self.problem))}" if self.problem else ""
        return self.kernel + shape + (f"@{self.instructions}" if self.instructions else "")

    @property
    def options(self) -> list[Options]:
        """Every combination that is tried; none for a kernel that comes as it is."""
        if not self.problem:
            return []
        chosen = product(self.tiles, self.warps, self.stages, self.registers)
        return [
            Options(tile=tile, num_warps=warps, num_stages=stages, maxnreg=registers)
            for tile, warps, stages, registers in chosen
        ]


def entries(inductor: Path | None = None) -> tuple[Entry, ...]:
    """The suite: published shapes, those that fill the GPU, the others.

    ``inductor``: a folder that ``benchmarks.kernels.inductor`` wrote.
    """
    found = [*_products(), *_rows()]
    order: dict[Size | None, int] = {"published": 0, "filling": 1}
    ranked = sorted(found, key=lambda entry: order[entry.size])
    others = [EXAMPLES / "nvcc" / f"{name}.sm_90.cubin" for name in ("transpose", "dot_product")]
    if inductor is not None:
        others += sorted(inductor.glob("*.cubin"))
    return (*ranked, *(Entry(file.name.partition(".")[0], file) for file in others))


def build(entry: Entry, options: Options | None = None) -> Source:
    """Compile one configuration for sm_90, or read the cubin of a kernel that comes as it is.

    Raises :class:`BadInput` where the compiler fails or uses other matrix instructions.
    """
    if options is None:
        return load_cubin(entry.file, None, _launch_beside(entry.file))
    with import_file(entry.file) as module:
        launch = _launch(module, entry, options)
    more = {} if options.maxnreg is None else {"maxnreg": options.maxnreg}
    with _matrix_instructions(entry.instructions):
        source = compile_triton(entry.file, entry.kernel, launch, "sm_90", options=more)
    if entry.instructions is not None:
        used = "wgmma" if "wgmma.mma_async" in (source.ptx or "") else "mma"
        if used != entry.instructions:
            raise BadInput(f"{entry.name}: this tile compiles to {used}; choose another one")
    # Plain values travel between processes.
    return replace(source, provenance=dict(source.provenance))


def _products() -> Iterator[Entry]:
    """The kernels that multiply matrices, twice each."""
    table: tuple[tuple[str, Size, tuple[int, ...], Tiles], ...] = (
        ("gemm_leakyrelu", "published", (512, 512, 2048), _GEMM_SMALL),
        ("gemm_leakyrelu", "published", (1024, 1024, 1024), _GEMM_SMALL),
        ("batched_gemm", "published", (4, 512, 512, 2048), _GEMM_SMALL),
        ("fused_feedforward", "published", (512, 512, 2048), _GEMM_SMALL),
        ("fused_attention", "published", (1, 4, 2048, 64), _ATTENTION),
        ("flash_attention", "published", (1, 4, 8192, 64), _ATTENTION),
        ("gemm_leakyrelu", "filling", (4096, 4096, 4096), _GEMM_LARGE),
        ("batched_gemm", "filling", (16, 1024, 1024, 1024), _GEMM_LARGE),
        ("fused_feedforward", "filling", (2048, 4096, 2048), _GATED_LARGE),
        ("fused_attention", "filling", (4, 16, 2048, 64), _ATTENTION),
        ("flash_attention", "filling", (1, 32, 4096, 128), _ATTENTION),
    )
    for kernel, size, problem, tiles in table:
        attention = kernel.endswith("attention")
        for instructions, chosen in tiles.items():
            narrow = (2, 4) if instructions == "mma" and size == "published" else (4, 8)
            yield Entry(
                kernel=kernel,
                file=EXAMPLES / f"{kernel}.py",
                problem=problem,
                size=size,
                instructions=instructions,
                tiles=chosen,
                warps=narrow,
                stages=(2, 3, 4) if attention or size == "filling" else (3, 4, 5),
            )


def _rows() -> Iterator[Entry]:
    """The kernels that work on rows; a block holds a row, so there is no tile to choose."""
    # Triton takes half a minute for a long row in few warps.
    table: tuple[tuple[str, Size, tuple[int, int], tuple[int, ...]], ...] = (
        ("softmax", "published", (1024, 16384), (4, 8, 16, 32)),
        ("rmsnorm", "published", (512, 512), (1, 2, 4, 8)),
        ("softmax", "filling", (4096, 8192), (4, 8, 16, 32)),
        ("rmsnorm", "filling", (4096, 8192), (4, 8, 16, 32)),
    )
    for kernel, size, problem, warps in table:
        yield Entry(
            kernel=kernel,
            file=EXAMPLES / f"{kernel}.py",
            problem=problem,
            size=size,
            warps=warps,
            registers=(None, 32, 48, 64, 96, 128),
        )


def _launch(module: Any, entry: Entry, options: Options) -> LaunchSpec:
    chosen: dict[str, Any] = {"warps": options.num_warps}
    if options.tile is not None:
        chosen |= {"tile": options.tile, "stages": options.num_stages}
    try:
        found: LaunchSpec = module.launch(*entry.problem, **chosen)
    except ValueError as error:
        raise BadInput(f"{entry.name}: {error}; choose another tile") from error
    return found


def _launch_beside(file: Path) -> LaunchSpec:
    """The launch of a cubin: NAME.toml, or NAME.json where a program wrote it."""
    name = file.name.partition(".")[0]
    made = file.parent / f"{name}.json"
    if made.exists():
        return LaunchSpec.model_validate_json(made.read_text())
    return LaunchSpec.from_toml(file.parent / f"{name}.toml")


@contextmanager
def _matrix_instructions(wanted: Instructions | None) -> Iterator[None]:
    before = os.environ.pop(_WITHOUT_WGMMA, None)
    if wanted == "mma":
        os.environ[_WITHOUT_WGMMA] = "1"
    try:
        yield
    finally:
        os.environ.pop(_WITHOUT_WGMMA, None)
        if before is not None:
            os.environ[_WITHOUT_WGMMA] = before
