"""Compare results of an earlier run with today's tables of compiler output.

    python -m benchmarks.sass.distances.recompare build/distances.zip \\
        benchmarks/sass/results/measured_distances.json.gz

The archive has the distances that compilers left, so write it anew first.  Measurements stay as
they are.  Pairs that the archive does not have are dropped, because their kernels have changed.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import load, text
from benchmarks.sass.distances.archive import Archive
from benchmarks.sass.distances.measured_distances import compared
from nostall.core.files.atomic import write_atomically


def recompared(content: Mapping[str, Any], plan: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of a result file, compared with the distances in ``plan``."""
    by_name = {row["pair"]: dict(row) for row in plan}
    rows = [
        compared(row, by_name[row["pair"]]) for row in content["rows"] if row["pair"] in by_name
    ]
    above = [row["pair"] for row in rows if row.get("above_sighting")]
    return {**content, "above_sighting": above, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="files to rewrite (.json.gz)")
    options = parser.parse_args(arguments)
    plan = Archive.read(options.archive).plan
    for path in options.results:
        content = recompared(load(path), plan)
        write_atomically(path, gzip.compress(text(content).encode(), mtime=0))
        print(f"{path}: {len(content['rows'])} pairs, above {len(content['above_sighting'])}")


if __name__ == "__main__":
    main()
