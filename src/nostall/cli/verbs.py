"""Table of commands, and the command group that imports a command's module when it is used.

The modules are slow to import (planning needs networkx, tuning needs Numba).  The help page and
shell completion therefore show the summaries of this table and import nothing.

The levels say what a user has and what to begin with; the help page, README and the
documentation's start page share this list.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from nostall.cli.options.help_panels import command_group, sort_into_panels
from nostall.core.text.suggest import did_you_mean


class Level(NamedTuple):
    """A level, in the order of the help page."""

    title: str
    """Panel of the help page."""
    have: str
    """What a user has who begins here."""
    begin: str
    """One line to begin with."""
    gives: str
    """What that line gives; at most 12 words."""
    verbs: tuple[str, ...]
    """Commands, the one of daily use first."""
    page: str
    """Page to read first, below ``docs``."""


LEVELS = (
    Level(
        "Whole programs", "a slow training program", "nostall optimize -- python train.py",
        "changes tried in the running program; kept if proven faster", ("optimize",),
        "how-to/optimize-a-program.md",
    ),
    Level(
        "PyTorch models", "a PyTorch model", 'torch.compile(model, backend="nostall")',
        "fused kernels where they are measured faster, else Inductor's", ("fuse",),
        "tutorials/first-torch-compile.md",
    ),
    Level(
        "Traces and job tables", "a profiler trace, or a job table",
        "nostall characterize trace.json.gz", "what the GPU waits for, and what to fix first",
        ("characterize",), "tutorials/first-trace.md",
    ),
    Level(
        "Kernels", "a Triton or CUDA kernel", "nostall tune kernels.py:kernel --objective gpu",
        "a binary that is measured faster and verified, or the original",
        ("tune", "bench", "verify", "inspect", "regress", "init", "record", "train"),
        "tutorials/first-kernel.md",
    ),
    Level(
        "Serving", "vLLM", "vllm serve MODEL --attention-backend CUSTOM",
        "attention that reads a shared prompt once for all requests", ("serving",),
        "how-to/serve-with-vllm.md",
    ),
    Level(
        "Several GPUs", "several GPUs", "nostall plan model.py:build --cluster cluster.toml",
        "a plan and its modelled time; `launch` trains by it",
        ("plan", "simulate", "launch"), "tutorials/first-pipeline.md",
    ),
    Level(
        "Results", "results of nostall", "nostall apply python train.py",
        "the program with the kernels that searches stored",
        ("apply", "store", "report", "runs"), "how-to/use-results.md",
    ),
    Level(
        "This machine", "a new machine", "nostall doctor", "what is missing, and how to get it",
        ("doctor",), "how-to/install.md",
    ),
)  # fmt: skip


class Verb(NamedTuple):
    """A command of nostall."""

    target: str
    """``module:name``: a module of this package, and a function or Typer app in it."""
    summary: str
    """First line of the command's help; short enough for one line of the help page."""
    example: str
    """Words after the command's name, as the end of its help shows them."""


_VERBS = {
    "optimize": Verb(
        "optimizing.optimize:optimize", "Prove what makes a whole program faster.",
        "-- python train.py",
    ),
    "doctor": Verb("doctor:doctor", "Check the environment: tools, packages and the GPU.", ""),
    "inspect": Verb(
        "inspect:inspect", "Show a kernel's instructions and which of them can move.",
        "kernels.py:kernel",
    ),
    "init": Verb("init:init", "Write a launch file for a kernel of your own.", "kernel.cubin"),
    "record": Verb(
        "record:record", "Run a program and write launch files of its kernels.", "./program",
    ),
    "tune": Verb(
        "tuning.tune:tune", "Search for a faster version of a kernel, and verify it.",
        "kernels.py:kernel --objective gpu --seconds 60",
    ),
    "train": Verb(
        "tuning.train:train", "Train a scheduling policy for the strategy ppo of tune.",
        "--corpus kernels --out runs/policy",
    ),
    "bench": Verb(
        "bench:bench", "Measure a kernel, and a changed cubin beside it.",
        "kernels.py:kernel --candidate changed.cubin",
    ),
    "verify": Verb(
        "verify:verify", "Check that a changed cubin is a safe re-scheduling.", "runs/RUN"
    ),
    "regress": Verb(
        "tuning.regress:regress", "Say what a newer compiler lost in a kernel, and search for it.",
        "kernels.py:kernel --baseline 13.2",
    ),
    "fuse": Verb(
        "fusing.fuse:fuse", "Fuse the operators of a PyTorch function into kernels.",
        "model.py:function",
    ),
    "plan": Verb(
        "planning.plan:plan", "Find a pipeline plan, or the placement of each tensor.",
        "model.py:build --cluster cluster.toml --out plan.json",
    ),
    "simulate": Verb(
        "planning.simulate:simulate", "Simulate a pipeline plan, optionally in another order.",
        "plan.json",
    ),
    "launch": Verb(
        "planning.launch:launch", "Train by a plan and measure each iteration.", "plan.json",
    ),
    "characterize": Verb(
        "characterizing.characterize:characterize",
        "Show where training time goes, in traces and tables.",
        "trace.json.gz --report trace.html",
    ),
    "serving": Verb(
        "serving.app:app", "Show task tables; measure rollouts; simulate traces.",
        "simulate --help",
    ),
    "report": Verb("report:report", "Write the HTML report of a run directory.", "runs/RUN"),
    "runs": Verb("runs:app", "List, show and compare the runs of tune and fuse.", "ls"),
    "store": Verb("store:app", "List, show, verify and share optimised kernels.", "ls"),
    "apply": Verb(
        "apply:apply", "Run a program with the optimised kernels of the store.", "python train.py",
    ),
}  # fmt: skip
VERBS = {name: _VERBS[name] for level in LEVELS for name in level.verbs}
"""The commands by name, in the order of the help page."""
_PANELS = {name: level.title for level in LEVELS for name in level.verbs}


_FOR_FILES = {
    (".json", ".json.gz", ".sqlite", ".et", ".csv", ".csv.gz", ".parquet"): "characterize",
    (".cubin", ".fatbin", ".ptx"): "inspect",
    (".py",): "optimize -- python",
}
"""The command to begin with for a file, by the end of its name."""


def _for_file(name: str) -> str:
    """A suggestion for the name of a file that was given instead of a command; or nothing."""
    path = Path(name)
    if not path.exists():
        return ""
    found = (verb for ends, verb in _FOR_FILES.items() if name.lower().endswith(ends))
    verb = "report" if (path / "run.json").exists() else next(found, None)
    command = "nostall --help" if verb is None else f"nostall {verb} {shlex.quote(name)}"
    return f"; it is a path: try {command}"


class Verbs(TyperGroup):
    """Command group of :data:`VERBS`."""

    _is_listing = False
    """Whether names and summaries are enough (help page, shell completion)."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command ``cmd_name``, or None if there is none.

        Imports the command's module, unless only its summary is needed.  A name that is almost one
        of a command ends with an error that suggests it.
        """
        if cmd_name not in VERBS:
            suggestion = _for_file(cmd_name) or did_you_mean(cmd_name, VERBS)
            if suggestion and not ctx.resilient_parsing and not cmd_name.startswith("-"):
                ctx.fail(f"No such command {cmd_name!r}{suggestion}")
            return None
        if self._is_listing:
            summary = VERBS[cmd_name].summary
            return TyperCommand(
                cmd_name, help=summary, short_help=summary, rich_help_panel=_PANELS[cmd_name]
            )
        return load_command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page without importing the commands."""
        with self._listing():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the name of a command without importing the commands."""
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        self._is_listing = True
        try:
            yield
        finally:
            self._is_listing = False


def load_command(name: str) -> Any:
    """Import the module of a command and build the command."""
    verb = VERBS[name]
    module, _, attribute = verb.target.partition(":")
    target = getattr(import_module(f"nostall.cli.{module}"), attribute)
    if not isinstance(target, typer.Typer):
        function, target = target, command_group(needs_command=False)
        target.command(name)(function)
    command = typer.main.get_command(target)
    if hasattr(command, "commands"):
        command.help = verb.summary
    command.name = name
    command.short_help = verb.summary
    command.epilog = f"Example: `{' '.join(filter(None, ('nostall', name, verb.example)))}`"
    for title, part in _with_subcommands(name, command):
        sort_into_panels(part, title)
    return command


def _with_subcommands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command and the commands of its group, with the words that call them."""
    yield name, command
    for part, found in getattr(command, "commands", {}).items():
        yield f"{name} {part}", found
