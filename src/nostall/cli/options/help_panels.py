"""Panels of a command's help page: options of daily use first, the others by purpose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "serving batch": ("name", "trace", "out_file"),
    "serving simulate": ("policy", "requests", "draft_tokens"),
}
"""Command -> its options of daily use. Commands with few options have one panel."""
PANELS: Mapping[str, tuple[str, ...]] = {
    "Input": (
        "kernel", "launch", "arch", "ptxas_options", "assemblers", "recording", "inputs",
        "backward", "dtype", "layers", "device", "gpu_memory", "hardware", "mesh", "corpus",
        "column", "policy", "processes", "page_size", "window", "costs", "kv_tokens", "rate",
        "acceptance",
    ),
    "Search": (
        "search", "strategy", "seed", "seconds", "evaluations", "resume", "native", "pdl",
        "measured_latencies", "rollouts", "tune_sass", "planner", "recompute", "state_factor",
        "weight_gradient_share", "fractions", "global_batch", "micro_batch", "programs", "tiles",
        "split", "units_per_program", "least_prefix", "least_saved_ns", "budget", "reserved",
        "max_running", "prefix_cache", "decodes", "verifies", "draft_tokens", "trees",
        "token_budget", "order", "objective", "read_once", "mine",
    ),
    "Measuring": (
        "checks", "tolerance", "timing", "cold", "sanitizer", "rounds", "deadline", "try_steps",
    ),
    "Several GPUs": (
        "workers", "scheduler", "nodes", "endpoint", "engine", "compile", "capture",
    ),
    "Kinds of work": ("kinds", "explain", "learn", "kind"),
    "Output": (
        "format", "quiet", "store", "record", "out_dir", "out_file", "gantt", "export", "picture",
        "logs", "rows", "show", "torchtitan", "report",
    ),
}  # fmt: skip
"""Panel -> its options; the first option of a command on a panel gives the panel's place."""
_PANEL_OF = {option: panel for panel, options in PANELS.items() for option in options}


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
            parameter.rich_help_panel = _PANEL_OF.get(parameter.name, "Other")
