"""Mine latency tables from wheels and libraries.

    python -m tools.mining read --state FOLDER WHEEL ...     mine, or continue a run
    python -m tools.mining tables --state FOLDER --out src/nostall/sass/safety/floors

``read`` takes wheels, shared objects, fatbins and cubins.  It draws a random sample of the
functions of each architecture, drops duplicates, and mines all sources in turn until its time is
over; the same command continues from the last checkpoint.  ``tables`` writes the tables of the
functions that were mined until then.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from importlib import resources
from pathlib import Path

from nostall.core.errors import BadInput, NostallError
from tools.mining.archive import source_name
from tools.mining.run import Options, mine
from tools.mining.store import Store
from tools.mining.tables import write_tables


def held_out() -> frozenset[str]:
    """Names of the sources that judge the verifier and must not be mined."""
    text = resources.files("tools.mining").joinpath("libraries.toml").read_text()
    parts = tomllib.loads(text)
    return frozenset((*parts["held_out"], *parts["blind"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.mining")
    commands = parser.add_subparsers(dest="command", required=True)
    read = commands.add_parser("read", help="mine wheels and libraries, or continue")
    read.add_argument("--state", type=Path, required=True, help="the folder of the run")
    read.add_argument("--seconds", type=float, default=float("inf"), help="time to mine for")
    read.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    read.add_argument(
        "--limit", type=int, default=3000, help="functions of each source and architecture"
    )
    read.add_argument(
        "--max-size", type=int, default=6000, help="instructions of the largest function"
    )
    read.add_argument("--seed", type=int, default=0, help="seed of the random order")
    read.add_argument("files", nargs="+", type=Path, help="wheels, libraries, fatbins or cubins")
    tables = commands.add_parser("tables", help="write tables of the functions mined so far")
    tables.add_argument("--state", type=Path, required=True, help="the folder of the run")
    tables.add_argument("--out", type=Path, required=True, help="the folder of the tables")
    return parser


def main() -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args()
    try:
        if options.command == "tables":
            write_tables(Store(options.state, 0).checkpoint, options.out)
            return 0
        refused = sorted({source_name(f) for f in options.files} & held_out())
        if refused:
            raise BadInput(
                f"{', '.join(refused)} is held out: it judges the verifier, so it must not be "
                "mined; leave it out, or change libraries.toml"
            )
        store = Store(options.state, options.seed)
        how = Options(options.limit, options.max_size, options.seconds, options.workers)
        mine(options.files, store, how)
    except NostallError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
