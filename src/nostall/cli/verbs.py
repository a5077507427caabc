"""Which verb is which function; a verb's module is imported when somebody asks for it.

Planning wants networkx, tuning wants Numba: a command should not wait for what it does not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

VERBS = {
    "doctor": "doctor:doctor",
    "inspect": "inspect:inspect",
    "tune": "tune:tune",
    "train": "train:train",
    "fuse": "fuse:fuse",
    "bench": "bench:bench",
    "verify": "verify:verify",
    "apply": "apply:apply",
    "characterize": "characterize:characterize",
    "report": "report:report",
    "plan": "plan:plan",
    "simulate": "simulate:simulate",
    "launch": "launch:launch",
    "store": "store:app",
}
"""In the order of the help page: module of this package, function (or Typer) in it."""


class Verbs(TyperGroup):
    """The commands of :data:`VERBS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All verbs."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a verb; None where there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].partition(":")
        found = getattr(import_module(f"nostall.cli.{module}"), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(cmd_name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command
