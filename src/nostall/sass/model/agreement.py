"""How well the SM model ranked candidates that a GPU measured: said beside every modelled gain.

``agreement.json`` is written by ``python -m benchmarks page sass`` from committed measurements;
without it there is nothing to say yet.
"""

from __future__ import annotations

from importlib import resources
from statistics import median

from pydantic import Field, ValidationError

from nostall.core.errors import ContractBroken
from nostall.core.launch import StrictModel

FILE = "agreement.json"


class Agreement(StrictModel):
    """Kendall's tau-b of model and GPU over measured candidates: the median over the searches of
    each kernel, by kernel.  ``source`` names the file of the measurements."""

    gpu: str
    source: str
    candidates: int = Field(ge=1)
    tau: dict[str, float] = Field(min_length=1)

    @property
    def sentence(self) -> str:
        """The ranking in one sentence."""
        values = list(self.tau.values())
        kernels = f"{len(values)} kernels" if len(values) > 1 else "one kernel"
        return (
            f"on {self.gpu} its ranking of {self.candidates:,} measured candidates of {kernels} "
            f"agreed with the GPU's at a Kendall tau of {median(values):.2f} ({min(values):.2f} to "
            f"{max(values):.2f} by kernel; 1 is the same order, 0 is none)"
        )


def known() -> Agreement | None:
    """What the committed measurements say; None when there are none."""
    file = resources.files("nostall.sass.model") / FILE
    if not file.is_file():
        return None
    try:
        return Agreement.model_validate_json(file.read_text())
    except ValidationError as error:
        raise ContractBroken(
            f"{file} is not what `python -m benchmarks page sass` writes ({error}); install "
            "nostall anew"
        ) from error


def caution() -> str:
    """What to say beside a modelled gain."""
    found = known()
    said = f": {found.sentence}. Measure" if found is not None else ": measure"
    return f"A model ranks schedules only roughly{said} on a GPU before you believe it."
