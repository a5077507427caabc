"""Do walks on a CPU and verify their ends, so that a GPU only executes them.

    python -m benchmarks.sass.gpu_walks.prepare --out build/walks.json.gz --measured-latencies

A second run with the same options continues. ``sass.random_walks_on_gpu --prepared`` reads the
file.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import load, save
from benchmarks.sass.gpu_walks.walks import (
    Task,
    WalkEnd,
    kernel_names,
    open_space,
    original,
    tasks_of,
    walk_to_end,
)
from nostall.core.errors import BadInput
from nostall.sass import Program
from nostall.sass.safety import verify_program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--walks", type=int, default=5, help="of each kind, per kernel")
    parser.add_argument("--moves", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured-latencies", action="store_true")
    parser.add_argument("--largest", type=int, default=120_000, help="bytes of the largest cubin")
    parser.add_argument("--match", default="", help="only kernels with this in their name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    options = parser.parse_args()
    began = monotonic()
    settings = {
        key: getattr(options, key) for key in ("walks", "moves", "seed", "measured_latencies")
    }
    rows: dict[str, Any] = {}
    if options.out.is_file():
        earlier = load(options.out)
        if earlier["settings"] != settings:
            raise BadInput(
                f"{options.out} has walks with {earlier['settings']}, not {settings}; give another "
                "--out, or the same options"
            )
        rows = earlier["kernels"]
    for name in kernel_names(options.largest, options.match):
        if name in rows or monotonic() - began > options.seconds:
            continue
        rows[name] = prepared(name, **settings)
        save(options.out, settings=settings, kernels=rows)
        refused = [end for end in rows[name]["ends"] if end["findings"]]
        print(f"{name}: {len(rows[name]['ends'])} walks, {len(refused)} refused", flush=True)


def prepared(
    name: str, *, walks: int, moves: int, seed: int, measured_latencies: bool
) -> dict[str, Any]:
    """The ends of all walks of a kernel, with the verifier's findings."""
    space = open_space(name, measured_latencies=measured_latencies)
    ends = []
    for task in tasks_of(name, walks, moves, seed):
        end = walk_to_end(space, task)
        candidate = space.impose(space.load(end.state)).to_cubin()
        verdict = verify_program(
            space.program, Program.from_cubin(candidate), measured_latencies=measured_latencies
        )
        ends.append(
            {
                "task": list(end.task),
                "state": end.state,
                "cycles": list(end.cycles),
                "findings": [str(finding) for finding in verdict.findings[:3]],
            }
        )
    return {"sha256": hashlib.sha256(original(name)).hexdigest(), "ends": ends}


def read_ends(row: dict[str, Any], name: str) -> list[WalkEnd]:
    """The ends of a kernel in a prepared file; raises :class:`BadInput` for another cubin."""
    if row["sha256"] != hashlib.sha256(original(name)).hexdigest():
        raise BadInput(f"{name}: the walks were prepared for another cubin; prepare them again")
    return [
        WalkEnd(Task(*end["task"]), end["state"], (end["cycles"][0], end["cycles"][1]))
        for end in row["ends"]
    ]


if __name__ == "__main__":
    main()
