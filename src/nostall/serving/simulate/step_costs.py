"""Measured times of engine steps, and a model fitted to them: seconds of a step by its content.

The model is a piecewise linear function of the step's tokens (linear layers), plus terms for the
query-key pairs of prefills, the keys of decodes, and the presence of a prefill. It is fitted to
relative errors. Its error is that of samples that a fit to the others predicts.
"""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pydantic
from numpy.typing import NDArray

from nostall.core.validation import first_problem
from nostall.serving.errors import BadSchedule

Floats = NDArray[np.float64]

FOLDS = 5
"""Parts of the samples, each predicted by a fit to the other parts."""
MAX_KNOTS = 10
"""Most knots of the piecewise linear function."""
MIN_SAMPLES = 20
"""Fewest samples of a cost file."""
BUILT_IN = Path(__file__).with_name("step_costs.json.gz")
"""Steps of vLLM on one GPU, measured by ``serving.step_costs``; its head says which GPU."""
GZIP = b"\x1f\x8b"
"""First bytes of a compressed file."""


class StepContent(NamedTuple):
    """What a step computes."""

    prefill_tokens: int
    prefill_pairs: int
    """Query-key pairs of the prefill tokens."""
    decode_tokens: int
    """Query tokens of decodes and verifies."""
    decode_keys: int
    """Keys that decodes and verifies read; once for all query tokens of a sequence."""


class StepSample(pydantic.BaseModel):
    """A measured step."""

    model_config = pydantic.ConfigDict(extra="forbid")

    prefill_tokens: Annotated[int, pydantic.Field(ge=0)]
    prefill_pairs: Annotated[int, pydantic.Field(ge=0)]
    decode_tokens: Annotated[int, pydantic.Field(ge=0)]
    decode_keys: Annotated[int, pydantic.Field(ge=0)]
    seconds: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class StepCostFile(pydantic.BaseModel):
    """Content of a step-cost file, as the benchmark ``serving.step_costs`` writes it."""

    model_config = pydantic.ConfigDict(extra="ignore")

    format: Literal["nostall-step-costs-1"]
    gpu: str
    engine: str
    model: str
    kv_tokens: Annotated[int, pydantic.Field(ge=1)]
    """Tokens that the engine's KV cache held."""
    samples: list[StepSample]


@dataclass(frozen=True, eq=False)
class StepCosts:
    """The fitted model."""

    knots: tuple[float, ...]
    """Tokens of a step, ascending."""
    seconds_at: tuple[float, ...]
    """Seconds at each knot; behind the last one the last slope goes on."""
    prefill_s: float
    """Seconds that a step with a prefill takes more."""
    pair_s: float
    key_s: float
    median_error: float
    """Median of the relative errors of samples that were not fitted."""
    p95_error: float
    largest: StepContent
    """Largest value of each part of the samples; beyond it the model extrapolates."""
    samples: int
    kv_tokens: int
    source: str
    """GPU, engine and model that were measured."""

    def seconds(self, content: StepContent) -> float:
        """Seconds of a step."""
        return (
            self._base_seconds(content.prefill_tokens + content.decode_tokens)
            + self.prefill_s * (content.prefill_tokens > 0)
            + self.pair_s * content.prefill_pairs
            + self.key_s * content.decode_keys
        )

    def decode_seconds(self, tokens: int, keys: Floats) -> Floats:
        """Seconds of steps with decodes only, by their keys; bit-equal with :meth:`seconds`."""
        return self._base_seconds(tokens) + self.key_s * keys

    def _base_seconds(self, tokens: int) -> float:
        place = min(max(bisect_right(self.knots, tokens) - 1, 0), max(len(self.knots) - 2, 0))
        base = self.seconds_at[place]
        if len(self.knots) > 1 and tokens > self.knots[0]:
            width = self.knots[place + 1] - self.knots[place]
            rise = self.seconds_at[place + 1] - self.seconds_at[place]
            base += max(rise, 0.0) * (tokens - self.knots[place]) / width
        return base

    def extrapolates(self, content: StepContent) -> bool:
        """Whether a step is larger than all that were measured, in one of its parts."""
        return any(part > most for part, most in zip(content, self.largest, strict=True))


def load_step_costs(path: Path) -> StepCosts:
    """The model of a step-cost file (JSON, or JSON compressed by gzip).

    Raises :class:`BadSchedule` for a damaged, another or too small file.
    """
    try:
        content = path.read_bytes()
        plain = gzip.decompress(content) if content.startswith(GZIP) else content
        file = StepCostFile.model_validate_json(plain)
    except (pydantic.ValidationError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = str(error)
        if isinstance(error, pydantic.ValidationError):
            reason = first_problem(error, "the document")
        raise BadSchedule(
            f"step-cost file {path}: {reason}; `python -m benchmarks run "
            "serving.step_costs --out FILE` on a machine with a GPU and vLLM writes one"
        ) from error
    if len(file.samples) < MIN_SAMPLES:
        raise BadSchedule(
            f"step-cost file {path} has {len(file.samples)} samples; allowed are {MIN_SAMPLES} or "
            "more; measure longer"
        )
    return fit_step_costs(
        [StepContent(**sample.model_dump(exclude={"seconds"})) for sample in file.samples],
        np.array([sample.seconds for sample in file.samples]),
        file.kv_tokens,
        f"{file.gpu}, {file.engine}, {file.model}",
    )


def fit_step_costs(
    contents: list[StepContent], seconds: Floats, kv_tokens: int, source: str
) -> StepCosts:
    """The model of measured steps."""
    table = np.array(contents, np.float64)
    knots = _knots(table[:, 0] + table[:, 2])
    features = _features(table, knots)
    errors = np.empty(len(seconds))
    fold = np.arange(len(seconds)) % FOLDS
    for part in range(FOLDS):
        held_out = fold == part
        fitted = _solve(features[~held_out], seconds[~held_out])
        errors[held_out] = np.abs(features[held_out] @ fitted / seconds[held_out] - 1)
    coefficients = _solve(features, seconds)
    return StepCosts(
        tuple(knots.tolist()),
        tuple(coefficients[: len(knots)].tolist()),
        float(coefficients[-3]),
        float(coefficients[-2]),
        float(coefficients[-1]),
        float(np.median(errors)),
        float(np.percentile(errors, 95)),
        StepContent(*(int(most) for most in table.max(axis=0))),
        len(seconds),
        kv_tokens,
        source,
    )


def _knots(tokens: Floats) -> Floats:
    """Measured numbers of tokens, about evenly spaced in their logarithm, both ends included."""
    distinct = np.unique(tokens)
    wanted = np.geomspace(max(distinct[0], 1), max(distinct[-1], 1), MAX_KNOTS)
    nearest = np.abs(distinct[None, :] - wanted[:, None]).argmin(axis=1)
    return np.asarray(distinct[np.unique(nearest)], np.float64)


def _features(table: Floats, knots: Floats) -> Floats:
    """Hat functions of the knots, presence of a prefill, pairs and keys, shape (samples, n)."""
    tokens = table[:, 0] + table[:, 2]
    hats = np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T
    return np.column_stack([hats, table[:, 0] > 0, table[:, 1], table[:, 3]])


def _solve(features: Floats, seconds: Floats) -> Floats:
    """Coefficients of least squared relative error; negative ones become zero, one by one."""
    scaled = features / seconds[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    active = np.ones(features.shape[1], np.bool_)
    while True:
        coefficients = np.zeros(features.shape[1])
        solution = np.linalg.lstsq(
            scaled[:, active] / norms[active], np.ones(len(seconds)), rcond=None
        )[0]
        coefficients[active] = solution / norms[active]
        worst = int(np.argmin(coefficients * norms))
        if coefficients[worst] >= 0:
            return coefficients
        active[worst] = False
