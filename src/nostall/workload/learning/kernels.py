"""Labels GPU kernels with a kind of work by their launch parameters and time, without their names.

The labelled kernels are those that training steps of the corpus' models launch on an H200; rules
over names (:mod:`nostall.workload.traces.work_kinds`) label them.  The classifier answers for
kernels that no rule names.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.model_selection import GroupKFold

from nostall.core.errors import BadInput
from nostall.workload.learning.diagnostics import Floats, fit_temperature, softmax

FORMAT = "nostall kernels 1"
TREES, FLOOR = 200, 0.5 / 200
FOLDS = 4
"""Folds of models that fit the temperature."""
COLUMNS = (
    *("blocks", "grid x", "grid y", "grid z", "threads", "block x", "block y", "block z"),
    *("registers", "shared memory", "registers of a block", "time", "time of a block"),
)
"""Features; all but registers are logarithms."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of a kernel, and its mean time."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    """Of a thread."""
    shared_memory: int
    """Bytes of a block."""
    microseconds: float


@dataclass(frozen=True, slots=True)
class LabelledLaunch:
    """A launch, its kind of work, and the model that launched it."""

    launch: Launch
    kind: str
    model: str


@dataclass(frozen=True, slots=True)
class KernelLabel:
    """What a kernel may be."""

    kind: str
    probability: float


def features_of(launches: Sequence[Launch]) -> Floats:
    """Features, shape (launches, len(COLUMNS))."""
    rows = np.empty((len(launches), len(COLUMNS)))
    for row, launch in enumerate(launches):
        blocks, threads = int(np.prod(launch.grid)), int(np.prod(launch.block))
        sizes = (blocks, *launch.grid, threads, *launch.block)
        time = max(launch.microseconds, 1e-3)
        rows[row] = (
            *np.log2(np.maximum(1.0, np.array(sizes, dtype=np.float64))),
            launch.registers,
            np.log2(1 + launch.shared_memory),
            np.log2(1 + launch.registers * threads),
            np.log2(time),
            np.log2(time / max(1, blocks)),
        )
    return rows


class KernelLabeller:
    """A forest that has been fitted to labelled launches; its probabilities are calibrated."""

    def __init__(self, launches: Sequence[LabelledLaunch]) -> None:
        """Fit the forest, and its temperature by leaving out models.

        Raises :class:`~nostall.core.errors.BadInput` for fewer than two kinds or models.
        """
        self.kinds, classes = np.unique([launch.kind for launch in launches], return_inverse=True)
        models = [launch.model for launch in launches]
        if len(self.kinds) < 2 or len(set(models)) < 2:
            raise BadInput(
                f"{len(launches)} labelled launches of {len(self.kinds)} kinds and "
                f"{len(set(models))} models; at least two of each are needed; record more models"
            )
        features = features_of([launch.launch for launch in launches])
        votes = np.zeros((len(classes), len(self.kinds)))
        folds = GroupKFold(min(FOLDS, len(set(models))))
        for train, test in folds.split(features, classes, models):
            part = self._fitted(features[train], classes[train])
            votes[np.ix_(test, part.classes_)] = part.predict_proba(features[test])
        self.temperature = fit_temperature(np.log(votes + FLOOR), classes)
        self.forest = self._fitted(features, classes)

    def probabilities(self, launches: Sequence[Launch]) -> Floats:
        """Probability of each of ``kinds``, shape (launches, kinds)."""
        if not launches:
            return np.zeros((0, len(self.kinds)))
        votes = self.forest.predict_proba(features_of(launches))
        return softmax(np.log(votes + FLOOR), self.temperature)

    def label(self, launches: Sequence[Launch]) -> list[KernelLabel]:
        """The most probable kind of each launch."""
        return [
            KernelLabel(str(self.kinds[row.argmax()]), float(row.max()))
            for row in self.probabilities(launches)
        ]

    def _fitted(self, features: Floats, classes: NDArray[np.int64]) -> ExtraTreesClassifier:
        forest = ExtraTreesClassifier(
            TREES, class_weight="balanced", min_samples_leaf=2, random_state=0
        )
        return forest.fit(features, classes)


def read_launches(path: Path) -> list[LabelledLaunch]:
    """Labelled launches in compressed JSON, as ``benchmarks.learners.kernels`` writes them.

    Raises :class:`~nostall.core.errors.BadInput` for a file of another format.
    """
    try:
        body = json.loads(gzip.decompress(path.read_bytes()))
        if body["format"] != FORMAT:
            raise BadInput(
                f"{path} has the format {body['format']!r}; allowed is {FORMAT!r}; write it again "
                "with `python -m benchmarks run learners.kernels`"
            )
        return [
            LabelledLaunch(
                Launch((x, y, z), (a, b, c), registers, shared, time),
                body["kinds"][kind],
                body["models"][model],
            )
            for kind, model, x, y, z, a, b, c, registers, shared, time in body["launches"]
        ]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise BadInput(
            f"{path} does not hold labelled kernels ({type(error).__name__}: {error}); install "
            "nostall again"
        ) from error
