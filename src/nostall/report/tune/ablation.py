"""Reader of ``ablation.json``: the changes of a schedule that save time."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FILE = "ablation.json"
MAX_SHOWN_CHANGES = 20


class ChangeEffect(BaseModel):
    """Effect of one change on the time of the schedule."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    text: str
    """The change in words."""
    block: int
    """Number of the block."""
    index: int
    """Original index of the instruction."""
    loss_percent: float | None = Field(alias="lost")
    """Slowdown without this change, in per cent of the original's time; None if unknown."""


class Ablation(BaseModel):
    """Contents of the file; see :class:`nostall.tuning.ablation.Ablation`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1]
    kind: Literal["modelled", "measured"]
    num_changes: int = Field(alias="total")
    num_without_effect: int = Field(alias="idle")
    effects: tuple[ChangeEffect, ...] = Field(alias="rows")

    @property
    def shown(self) -> tuple[ChangeEffect, ...]:
        """The changes that save time, the greatest saving first."""
        saving = (e for e in self.effects if e.loss_percent is not None and e.loss_percent > 0)
        return tuple(saving)[:MAX_SHOWN_CHANGES]

    @property
    def num_inseparable(self) -> int:
        """Changes that cannot be undone alone."""
        return sum(effect.loss_percent is None for effect in self.effects)


def load_ablation(path: Path) -> Ablation | None:
    """The ablation of a run directory; None if it is missing or cannot be read."""
    try:
        return Ablation.model_validate_json((path / FILE).read_text())
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def has_ablation(path: Path) -> bool:
    """Whether a run directory has the file, readable or not."""
    return (path / FILE).exists()
