"""Rank correlation of the SM model with a GPU, which nostall prints beside modelled gains.

``python -m benchmarks page sass`` writes ``agreement.json`` from committed measurements.
"""

from __future__ import annotations

from importlib import resources
from statistics import median

from pydantic import Field, ValidationError

from nostall.core.errors import ContractBroken
from nostall.core.launch import StrictModel

AGREEMENT_FILE = "agreement.json"
RANKING_WORTH = "ranks schedules no better than chance"
"""What the model's ranking is worth, in the words that every text uses."""


class Agreement(StrictModel):
    """Kendall's tau-b between modelled and measured times of the same candidates."""

    gpu: str
    source: str
    """Name of the file with the measurements."""
    candidates: int = Field(ge=1)
    """Number of measured candidates."""
    tau: dict[str, float] = Field(min_length=1)
    """Kernel -> median of tau-b over its searches."""

    @property
    def sentence(self) -> str:
        """The correlation in one sentence."""
        values = list(self.tau.values())
        kernels = f"{len(values)} kernels" if len(values) > 1 else "one kernel"
        return (
            f"on {self.gpu} its ranking of {self.candidates:,} measured candidates of {kernels} "
            f"agreed with the GPU's at a Kendall tau of {median(values):.2f} ({min(values):.2f} to "
            f"{max(values):.2f} by kernel; 1 is the same order, 0 is none)"
        )


def load_agreement() -> Agreement | None:
    """Read the committed correlations; None without a file."""
    file = resources.files("nostall.sass.model") / AGREEMENT_FILE
    if not file.is_file():
        return None
    try:
        return Agreement.model_validate_json(file.read_text())
    except ValidationError as error:
        raise ContractBroken(
            f"{file} has another format than `python -m benchmarks page sass` writes "
            f"({error}); reinstall nostall"
        ) from error


def model_caution() -> str:
    """The warning that nostall prints beside a modelled gain."""
    agreement = load_agreement()
    evidence = f": {agreement.sentence}" if agreement is not None else ""
    return f"The model {RANKING_WORTH}{evidence}. Measure on a GPU before you use the result."
