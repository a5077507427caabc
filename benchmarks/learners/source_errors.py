"""Errors of one line in the samplers' source, and the tests of single steps that must catch them.

    python -m benchmarks.learners.source_errors "tables from n"

Prints the first test that catches the error as JSON, or the greatest |z| of all tests.  The error
is in memory only: a loader replaces one line of the source while the module is imported.  Numba
must cache compiled functions elsewhere (NUMBA_CACHE_DIR); ``learners.seeded_errors`` sees to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

PACKAGES = {"topics": "nostall.workload.learning", "multiview": "nostall.papers"}
"""Package of each learner."""


@dataclass(frozen=True)
class SourceError:
    """One line of a module, and the wrong line that replaces it."""

    module: str
    """A learner, and a module of it."""
    right: str
    wrong: str
    first: str
    """The test that is run first; the others follow until one catches the error."""
    is_listed: bool = False
    """Whether it is one of the ten errors that the acceptance test of the learners names."""

    @property
    def learner(self) -> str:
        """``topics`` or ``multiview``."""
        return self.module.partition(".")[0]

    @property
    def full_module(self) -> str:
        """The module's name for an import."""
        return f"{PACKAGES[self.learner]}.{self.module}"


ERRORS: dict[str, SourceError] = {
    "missing Jacobian in gamma": SourceError(
        "topics.classifier", "shape + topics - (0 if is_first else 1)",
        "shape + topics - (1 if is_first else 2)", "concentrations", True,
    ),
    "tables from n instead of tables of the restaurant": SourceError(
        "topics.classifier", "if rng.random() * (masses[k] + i) < masses[k]:",
        "if masses[k] >= 0.0:", "concentrations", True,
    ),
    "dropped beta_u: no new topics": SourceError(
        "topics.tokens", "weights[used] = mass * counts.rest[0] / counts.word_topics.shape[0]",
        "weights[used] = 0.0", "topics", True,
    ),
    "sign in b, the linear term of the weights": SourceError(
        "multiview.sampler", "(scales[:, k] + cost * priors.margin)",
        "(scales[:, k] - cost * priors.margin)", "weights given labels", True,
    ),
    "1/s instead of s": SourceError(
        "multiview.sampler", "return 1.0 / np.maximum(inverse, 1e-300)",
        "return np.maximum(inverse, 1e-300)", "weights given labels", True,
    ),
    "the stick of an empty topic is lost": SourceError(
        "topics.tokens", "counts.rest[0] += counts.sticks[topic]", "counts.rest[0] += 0.0",
        "topics", True,
    ),
    "a singleton's own slot is no new category": SourceError(
        "topics.categories",
        "if limits.new < 0 and before >= limits.known and counts.documents[before] == 0:",
        "if limits.new > 0:", "categories", True,
    ),
    "kappa is not updated": SourceError(
        "multiview.sampler", "kappa, degrees = base.kappa + n, base.degrees + n",
        "kappa, degrees = base.kappa, base.degrees + n", "components", True,
    ),
    "one acceptance for all items": SourceError(
        "multiview.sampler", "accepted = np.log(rng.random(len(latent))) < log_ratio",
        "accepted = np.log(rng.random(len(latent))) < log_ratio.mean()", "latent", True,
    ),
    "degrees of freedom of the Wishart distribution": SourceError(
        "multiview.sampler", "kappa, degrees = base.kappa + n, base.degrees + n",
        "kappa, degrees = base.kappa + n, base.degrees", "components", True,
    ),
    "kappa is not updated in the predictive density": SourceError(
        "multiview.sampler", "kappa = kappa0 + count", "kappa = kappa0 + min(count, 1)",
        "assignments",
    ),
    "degrees of the predictive density": SourceError(
        "multiview.sampler", "degrees = degrees0 + count", "degrees = degrees0", "assignments",
    ),
    "missing Jacobian in xi": SourceError(
        "topics.classifier", "(shape + new) * np.log(grid)", "(shape + new - 1) * np.log(grid)",
        "concentrations",
    ),
    "the reverse proposal of a category lacks its uniform share": SourceError(
        "topics.categories", "+ math.log(_proposal(scores[current], best, total, candidates))",
        "+ scores[current] - best - math.log(total)", "categories",
    ),
    "noise of a view: one degree of freedom an item": SourceError(
        "multiview.views", "shape + values.size / 2", "shape + len(values) / 2", "views",
    ),
    "a missing view counts in the energy": SourceError(
        "multiview.views",
        "energy = energy + 0.5 * p.noise_precision * view.present * (residual**2).sum(axis=1)",
        "energy = energy + 0.5 * p.noise_precision * (residual**2).sum(axis=1)", "latent",
    ),
}  # fmt: skip


class _Loader(SourceFileLoader):
    """Loads a module with one line replaced; neither reads nor writes a bytecode file."""

    def __init__(self, name: str, path: str, error: SourceError) -> None:
        super().__init__(name, path)
        self.error = error

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        if source.count(self.error.right) != 1:
            raise ValueError(f"{self.path} has {self.error.right!r} not exactly once")
        changed = source.replace(self.error.right, self.error.wrong)
        return compile(changed, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, error: SourceError) -> None:
        self.error = error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.error.full_module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self.error)
        return spec


def checks(learner: str) -> Mapping[str, Callable[[Any], Any]]:
    """The tests of single steps of a learner, ``topics`` or ``multiview``."""
    if learner == "topics":
        from tests.unit.workload.learning import topic_states

        return {name: topic_states.topic_pair(step) for name, step in topic_states.STEPS.items()}
    from tests.unit.papers import view_states

    pairs = {name: view_states.view_pair(step) for name, step in view_states.STEPS.items()}
    return {**pairs, **view_states.LABEL_PAIRS}


def run(learner: str, first: str, draws: int) -> dict[str, Any]:
    """Run the tests until one fails; the result of that one, or of the greatest |z|."""
    from tests.unit.workload.learning.invariance import LIMIT, largest_z

    pairs = checks(learner)
    best: dict[str, Any] = {"z": -1.0}
    for name in sorted(pairs, key=lambda name: name != first):
        z, statistic = _largest_z(largest_z, pairs[name], draws)
        if z > best["z"]:
            best = {"z": z, "test": name, "statistic": statistic}
        if z > LIMIT:
            break
    return best


def _largest_z(largest_z: Any, pair: Any, draws: int) -> tuple[float, str]:
    """As :func:`largest_z`; a step that fails is as good as an infinite z."""
    import numpy as np

    try:
        z, statistic = largest_z(pair, draws)
    except (AssertionError, ArithmeticError, ValueError, np.linalg.LinAlgError) as error:
        return 1e9, f"{type(error).__name__}: {error}"[:200]
    return min(float(z), 1e9), statistic


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("error", choices=(*ERRORS, "no error: topics", "no error: multiview"))
    parser.add_argument("--draws", type=int, default=4000)
    options = parser.parse_args(arguments)
    if options.error.startswith("no error"):
        result = run(options.error.rpartition(" ")[2], "", options.draws)
    else:
        error = ERRORS[options.error]
        sys.meta_path.insert(0, _Finder(error))
        result = run(error.learner, error.first, options.draws)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
