"""``python -m benchmarks list | run NAME --out FILE | steps FILE --out FOLDER | page NAME``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module

from benchmarks.harness import steps
from benchmarks.registry import BENCHMARKS, Benchmark, find
from nostall.core.errors import NostallError
from nostall.core.files.atomic import write_atomically

PAGES = {
    "readme": "front.readme",
    "demo": "front.demo",
    "explanation": "front.explanation",
    "schema": "harness.schema",
    "sass": "sass.pages.measured",
    "sass-modelled": "sass.pages.modelled",
    "issue-distances": "sass.pages.issue_distances",
    "verifier-evidence": "sass.pages.evidence",
    "assembler": "ptx.page",
    "learning": "learning.page",
    "fusion": "fusion.page",
    "fusion-coverage": "fusion.coverage",
    "fusion-chains": "fusion.chains.page",
    "fusion-unseen": "fusion.unseen.page",
    "fusion-cost-model": "fusion.cost_model.page",
    "torch-compile": "torch_compile.page",
    "serving": "serving.page",
    "parallel": "parallel.page",
    "optimize": "optimizing.page",
    "workload": "workload.page",
    "learners": "learners.page",
}
"""Modules with ``PAGE`` and its ``text()`` (pages of ``docs/results``), or with ``write()``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 if the benchmark's answer is no, or 2 for wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A benchmark's own options follow its name, so that `run NAME --help` shows them.
    if len(words) >= 2 and words[0] == "run" and not words[1].startswith("-"):
        return _run(words[1], words[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="verb", required=True)
    listing = commands.add_parser("list", help="all benchmarks with question, needs and results")
    listing.add_argument("--format", choices=("table", "json"), default="table")
    running = commands.add_parser("run", help="run one benchmark: run NAME [its options]")
    running.add_argument("name", help="see `list`")
    stepping = commands.add_parser(
        "steps", help="run a file of benchmarks on all GPUs, each with its time limit"
    )
    steps.add_options(stepping)
    paging = commands.add_parser("page", help="write a page of docs/results from committed results")
    paging.add_argument("name", choices=(*PAGES, "all"))
    options = parser.parse_args(words)
    if options.verb == "list":
        return _list(options.format)
    if options.verb == "run":
        return _run(options.name, [])
    if options.verb == "steps":
        return _guarded(lambda: steps.main(options))
    return _page(list(PAGES) if options.name == "all" else [options.name])


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        benchmark = find(name)
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    module = benchmark.load()
    parser = make_parser(benchmark)
    module.add_options(parser)
    return _guarded(lambda: module.main(parser.parse_args(arguments)) or 0)


def _guarded(action: Callable[[], int]) -> int:
    """The exit status of an action, also if it raises one of nostall's errors."""
    try:
        return action()
    except NostallError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code


def make_parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    """A parser with the benchmark's question; ``add_options`` of the benchmark extends it."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks run {benchmark.name}",
        description=f"{benchmark.question} Needs: {benchmark.needs}.",
    )


def _list(output_format: str) -> int:
    if output_format == "json":
        print(json.dumps([asdict(benchmark) for benchmark in BENCHMARKS], indent=1))
        return 0
    width = max(len(benchmark.name) for benchmark in BENCHMARKS)
    for benchmark in BENCHMARKS:
        print(f"{benchmark.name:{width}}  {benchmark.needs:20}  {benchmark.question}")
    return 0


def _page(names: Sequence[str]) -> int:
    for name in names:
        module = import_module(f"benchmarks.{PAGES[name]}")
        if hasattr(module, "write"):
            module.write()
        else:
            write_atomically(module.PAGE, module.text().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
