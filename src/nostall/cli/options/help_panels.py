"""Panels of a command's help page: options of daily use first, the others by purpose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

DAILY: Mapping[str, tuple[str, ...]] = {
    "tune": ("objective", "seconds", "out_dir"),
    "regress": ("baseline", "ptxas", "out_dir"),
    "train": ("corpus", "out_dir", "rollouts"),
    "bench": ("candidate", "launch", "rounds"),
    "fuse": ("measure", "show", "out_dir"),
    "plan": ("cluster", "planner", "out_file"),
    "launch": ("module", "steps", "check"),
    "characterize": ("report", "hardware", "what_if"),
    "serving show": ("order", "heads", "kv_heads"),
    "serving simulate": ("policy", "requests", "draft_tokens"),
}
"""Command -> its options of daily use. Commands with few options have one panel."""
PANELS: Mapping[str, tuple[str, ...]] = {
    "Input": (
        "kernel", "launch", "arch", "ptxas_options", "assemblers", "recording", "inputs",
        "backward", "dtype", "layers", "device", "gpu_memory", "hardware", "mesh", "mine",
        "column", "policy", "processes", "window", "costs", "kv_tokens", "rate", "acceptance",
    ),
    "Search": (
        "search", "strategy", "seed", "seconds", "evaluations", "resume", "native", "pdl",
        "measured_latencies", "rollouts", "tune_sass", "planner", "recompute", "state_factor",
        "weight_gradient_share", "fractions", "global_batch", "micro_batch", "objective",
    ),
    "Units": (
        "programs", "tiles", "split", "units_per_program", "least_prefix", "least_saved_ns",
    ),
    "Engine": (
        "budget", "reserved", "max_running", "prefix_cache", "read_once", "serving simulate seed",
    ),
    "Measuring": (
        "checks", "tolerance", "timing", "cold", "sanitizer", "deadline", "try_steps",
        "bench seed",
    ),
    "Several GPUs": (
        "workers", "scheduler", "nodes", "endpoint", "engine", "compile", "capture",
    ),
    "Kinds of work": ("kinds", "explain", "learn", "kind", "corpus"),
    "Output": (
        "format", "quiet", "store", "record", "out_dir", "out_file", "gantt", "export", "picture",
        "logs", "rows", "fuse explain",
    ),
}  # fmt: skip
"""Panel -> its options, those of one command with its name.

The first option of a command on a panel gives the panel's place.
"""
_PANEL_OF = {option: panel for panel, options in PANELS.items() for option in options}


def command_group(*, needs_command: bool = True) -> typer.Typer:
    """A command, or a group of them; the table of commands has a group's help text."""
    return typer.Typer(
        no_args_is_help=needs_command,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )


def sort_into_panels(command: Any, name: str) -> None:
    """Give each option of a command its panel, and leave out the type of flags.

    The options of daily use stay on the first panel. Commands that are not in :data:`DAILY` keep
    one panel.
    """
    for parameter in command.params:
        if parameter.param_type_name != "option":
            continue
        if parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
        if name in DAILY and parameter.name not in DAILY[name]:
            of_all = _PANEL_OF.get(parameter.name, "Other")
            parameter.rich_help_panel = _PANEL_OF.get(f"{name} {parameter.name}", of_all)
