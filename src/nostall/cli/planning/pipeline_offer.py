"""What a search for pipelines offers beside shardings of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nostall.cli.terminal.console import Format
from nostall.parallel.sharding.planners.sharding import ShardingPlan

Show = Callable[[Sequence[ShardingPlan], Path | None, Format], None]
"""Writes the offered plan and shows it beside shardings of the whole batch."""


@dataclass(frozen=True)
class PipelineOffer:
    """The fastest plan of micro-batches that a search found, or why it found none."""

    sentence: str
    step_s: float | None = None
    """Modelled seconds of a step; None if there is no plan."""
    show: Show | None = None

    def shown_if_faster(
        self, plans: Sequence[ShardingPlan], out_file: Path | None, format: Format
    ) -> bool:
        """Write and show the plan if it is faster than the first of ``plans``, or if none is."""
        if self.show is None or self.step_s is None:
            return False
        if plans and self.step_s >= plans[0].step_s:
            return False
        self.show(plans, out_file, format)
        return True
