"""Times of the kernels of a ``nostall fuse`` run, measured on a GPU, into its report.

``python -m benchmarks.fusion_measured RUN`` launches every binary on random inputs, by the table in
its source file, and writes median seconds into ``RUN/fusion.json`` and ``RUN/report.html``.  It
times kernels one by one: whether a program gains is for a comparison of whole programs to say.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

from nostall.core.run import write_atomically
from nostall.gpu import Kernel, LocalGpu
from nostall.report.fusion import write_page
from nostall.tuning.fusing.document import FILE, Document, load_document
from nostall.tuning.source import Source, compile_triton

Measure = Callable[[Source], tuple[float | None, str]]
"""Seconds of a launch (None where it failed), and the GPU's name."""


def measured(folder: Path, measure: Measure) -> Document:
    """The document of a run with the times that ``measure`` finds."""
    document = load_document(folder)
    sources = {name: k.source for p in document.passes for k in p.kernels for name in k.launches}
    binaries, device = [], document.measured_on
    for binary in document.binaries:
        if binary.file is None:
            binaries.append(binary)
            continue
        made = compile_triton(folder / sources[binary.name], binary.name, arch=document.arch)
        seconds, device = measure(made)
        binaries.append(binary.model_copy(update={"measured": seconds}))
    return document.model_copy(update={"binaries": tuple(binaries), "measured_on": device})


def on_this_gpu(source: Source) -> tuple[float | None, str]:
    """Median over paired launches of a kernel with itself."""
    assert source.launch is not None
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        outcome = gpu.evaluate(source.cubin)
        device = gpu.about.get("gpu", "a GPU")
    if outcome.timing is None:
        print(f"{source.kernel}: {outcome.fate}: {outcome.detail}")
        return None, device
    return median(outcome.timing.original), device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    folder = parser.parse_args().run
    document = measured(folder, on_this_gpu)
    write_atomically(folder / FILE, (document.model_dump_json(indent=1) + "\n").encode())
    for binary in document.binaries:
        if binary.measured is not None:
            print(f"{binary.name}: measured {binary.measured * 1e6:.3f} us")
    print(f"report: {write_page(folder)}")


if __name__ == "__main__":
    main()
