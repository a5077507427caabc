"""Exactness of the multi-view sampler's steps, and the classifier's interface."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from benchmarks.learners.figures import calibration_error
from sklearn.base import clone

from nostall.core.errors import BadInput
from nostall.papers.multiview import sampler as spectrum
from nostall.papers.multiview.classifier import MaxMarginMultiView
from nostall.papers.multiview.sampler import draw_scales, draw_weights, leapfrog
from nostall.papers.multiview.views import (
    BaseMeasure,
    LabelTerm,
    Priors,
    View,
    ViewParameters,
    expected_features,
    features,
    view_energy,
)
from nostall.papers.multiview.views import view_gradient as gradient_of_views
from nostall.workload.learning.diagnostics import fit_temperature, softmax
from tests.unit.papers.view_states import LABEL_PAIRS, STEPS, view_pair
from tests.unit.workload.learning.invariance import LIMIT, largest_z

RNG = np.random.default_rng(0)


def test_the_augmentation_integrates_to_the_hinge_loss() -> None:
    """exp(-2 max(0, u)) is the integral of exp(-(s + u)^2 / (2 s)) / sqrt(2 pi s) over s."""
    s = np.geomspace(1e-9, 500.0, 400_000)
    for u in (-2.0, -0.1, 0.3, 1.7):
        integrand = np.exp(-((s + u) ** 2) / (2 * s)) / np.sqrt(2 * np.pi * s)
        assert np.trapezoid(integrand, s) == pytest.approx(np.exp(-2 * max(0.0, u)), rel=1e-4)


def test_scales_have_the_mean_of_their_distribution() -> None:
    """E[1/s] = 1 / (C |u|) for the inverse Gaussian distribution of 1/s."""
    priors = Priors(cost=1.5)
    scores = np.full((200_000, 1), 0.4)
    scales = draw_scales(np.random.default_rng(1), np.ones_like(scores), scores, priors)
    assert (1 / scales).mean() == pytest.approx(1 / (1.5 * 0.6), rel=0.02)


def test_gradients_equal_finite_differences() -> None:
    latent, frequencies = RNG.standard_normal((5, 3)), RNG.standard_normal((4, 3))
    signs = np.where(RNG.random((5, 2)) < 0.5, -1.0, 1.0)
    term = LabelTerm(signs, RNG.random((5, 2)) + 0.5, RNG.standard_normal((8, 2)), 1.3, 1.0)
    by_phase = term.phase_gradient(latent, frequencies)
    step = 1e-6
    for n, d in ((0, 0), (3, 2)):
        moved = latent.copy()
        moved[n, d] += step
        numeric = (term.energy(moved, frequencies) - term.energy(latent, frequencies)).sum() / step
        assert (by_phase @ frequencies)[n, d] == pytest.approx(numeric, rel=1e-4, abs=1e-5)
    for j, d in ((0, 1), (3, 2)):
        moved = frequencies.copy()
        moved[j, d] += step
        numeric = (term.energy(latent, moved) - term.energy(latent, frequencies)).sum() / step
        assert (by_phase.T @ latent)[j, d] == pytest.approx(numeric, rel=1e-4, abs=1e-5)
    view = View(RNG.standard_normal((5, 4)), np.array([True, True, False, True, True]))
    parameters = ViewParameters(RNG.standard_normal((4, 3)), np.ones(4), 2.0, np.ones(3))
    gradient = gradient_of_views([view], [parameters], latent)
    for n in (1, 2):
        moved = latent.copy()
        moved[n, 1] += step
        energies = [view_energy([view], [parameters], z).sum() for z in (moved, latent)]
        assert gradient[n, 1] == pytest.approx((energies[0] - energies[1]) / step, abs=1e-4)


def test_the_leapfrog_is_reversible_and_nearly_keeps_the_energy() -> None:
    position, momentum = np.array([1.0]), np.array([0.5])
    there, speed = leapfrog(position, momentum, lambda x: x, lambda p: p, 0.05)
    assert float(there[0] ** 2 + speed[0] ** 2) == pytest.approx(1.25, abs=2e-3)
    back, speed = leapfrog(there, -speed, lambda x: x, lambda p: p, 0.05)
    assert (back[0], -speed[0]) == pytest.approx((1.0, 0.5))


def test_expected_features_are_the_mean_of_draws() -> None:
    mean, covariance = np.array([[0.5, -1.0]]), np.array([[0.4, 0.1], [0.1, 0.3]])
    frequencies = RNG.standard_normal((3, 2))
    draws = np.random.default_rng(2).multivariate_normal(mean[0], covariance, 200_000)
    expected = expected_features(mean, covariance, frequencies)
    assert expected[0] == pytest.approx(features(draws, frequencies).mean(axis=0), abs=5e-3)


def test_weights_are_drawn_from_their_normal_distribution() -> None:
    phi = RNG.standard_normal((30, 2))
    signs = np.where(RNG.random((30, 1)) < 0.5, -1.0, 1.0)
    scales, priors = RNG.random((30, 1)) + 0.5, Priors(cost=0.7)
    rng = np.random.default_rng(3)
    draws = np.array(
        [draw_weights(rng, phi, signs, scales, 2.0, priors)[:, 0] for _ in range(4000)]
    )
    precision = np.eye(2) / 2.0 + 0.49 * (phi.T / scales[:, 0]) @ phi
    target = signs[:, 0] * (scales[:, 0] + 0.7) / scales[:, 0]
    assert draws.mean(axis=0) == pytest.approx(
        np.linalg.solve(precision, 0.7 * phi.T @ target), abs=0.02
    )
    assert np.cov(draws.T) == pytest.approx(np.linalg.inv(precision), abs=0.01)


@pytest.mark.slow
def test_the_predictive_density_of_a_component_integrates_to_one() -> None:
    base = BaseMeasure.of(1, Priors())
    members = np.array([[0.2], [0.5], [-0.3]])
    grid = np.linspace(-150, 150, 6001)
    density = [
        spectrum.log_predictive(
            np.array([x]), 3, members.sum(axis=0), members.T @ members,
            base.mean, base.kappa, base.degrees, base.scale,
        )
        for x in grid
    ]  # fmt: skip
    assert np.trapezoid(np.exp(density), grid) == pytest.approx(1, abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_each_step_without_labels_keeps_the_joint_distribution(step: str) -> None:
    z, statistic = largest_z(view_pair(STEPS[step]), 200)
    assert z < LIMIT, statistic


@pytest.mark.parametrize("step", LABEL_PAIRS)
def test_each_step_with_labels_keeps_its_exact_distribution(step: str) -> None:
    z, statistic = largest_z(LABEL_PAIRS[step], 1000)
    assert z < LIMIT, statistic


def two_views(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Items of three classes with two noisy views of 4 and 3 columns."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(9).standard_normal((3, 7)) * 2
    classes = rng.integers(3, size=count)
    return centres[classes] + rng.standard_normal((count, 7)), classes


@pytest.mark.slow
def test_a_missing_view_is_marginalised() -> None:
    items, classes = two_views(90, 0)
    model = MaxMarginMultiView((4, 3), dimensions=5, features=20, sweeps=30, burn_in=15)
    model.fit(items, classes)
    held_out, truth = two_views(200, 1)
    assert (model.predict(held_out) == truth).mean() > 0.85
    held_out[:, 4:] = np.nan
    assert (model.predict(held_out) == truth).mean() > 0.7
    assert model.predict_proba(held_out).sum(axis=1) == pytest.approx(1)
    assert set(model.trace_[0]) >= {"hinge loss", "components"}


@pytest.mark.slow
def test_random_features_make_views_nonlinear() -> None:
    """Two classes on circles of different radius: no linear function of a view separates them."""
    rng = np.random.default_rng(3)
    classes = rng.integers(2, size=160)
    angles = rng.uniform(0, 2 * np.pi, (160, 2))
    radius = (1.0 + 1.5 * classes)[:, None]
    items = np.hstack([radius * f(angles[:, [v]]) for v in (0, 1) for f in (np.cos, np.sin)])
    model = MaxMarginMultiView((2, 2), dimensions=10, view_features=24, sweeps=16, burn_in=8)
    model.fit(items[:120], classes[:120])
    held_out = items[120:].copy()
    assert (model.predict(held_out) == classes[120:]).mean() > 0.9
    held_out[:, 2:] = np.nan
    assert (model.predict(held_out) == classes[120:]).mean() > 0.75
    held_out[3, 0] = np.nan
    with pytest.raises(BadInput, match="item 3 has NaN in a part of view 0"):
        model.predict(held_out)


@pytest.mark.slow  # compiling the sampler takes ten seconds
def test_a_continued_chain_equals_an_uninterrupted_one() -> None:
    items, classes = two_views(40, 2)
    settings = {"dimensions": 3, "features": 8, "burn_in": 4}
    whole = MaxMarginMultiView((4, 3), sweeps=12, **settings).fit(items, classes)
    parts = MaxMarginMultiView((4, 3), sweeps=6, warm_start=True, **settings).fit(items, classes)
    parts.set_params(sweeps=12).fit(items, classes)
    assert np.array_equal(whole.decision_draws(items), parts.decision_draws(items))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": np.zeros(20, int)}, "of one class"),
        ({"views": (4, 4)}, "whose sum is the number of columns"),
        ({"hole": True}, "NaN in a part of view 0"),
        ({"burn_in": 30}, "burn_in=30"),
        ({"view_features": -1}, "view_features=-1"),
        ({"views": (7, 0)}, "of at least 1"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    items, classes = two_views(20, 3)
    if change.get("hole"):
        items[2, 1] = np.nan
    model = MaxMarginMultiView(
        change.get("views", (4, 3)),
        sweeps=8,
        burn_in=change.get("burn_in", 2),
        view_features=change.get("view_features", 0),
    )
    with pytest.raises(BadInput, match=message):
        model.fit(items, change.get("classes", classes))


@pytest.mark.slow
def test_calibration() -> None:
    rng = np.random.default_rng(4)
    classes = rng.integers(3, size=3000)
    logits = np.eye(3)[classes] * 2 + rng.gumbel(size=(3000, 3))
    sharp = 5 * logits
    temperature = fit_temperature(sharp, classes)
    assert temperature > 2
    assert calibration_error(softmax(sharp, temperature), classes) < calibration_error(
        softmax(sharp), classes
    )


@pytest.mark.slow
def test_a_constant_column_changes_nothing() -> None:
    items, classes = two_views(60, 5)
    items[:, 1] = 3.0
    model = MaxMarginMultiView((4, 3), dimensions=4, features=10, sweeps=20, burn_in=10)
    assert (model.fit(items, classes).predict(items) == classes).mean() > 0.8
    assert np.isfinite(model.decision_draws(items)).all()


def test_a_view_that_no_item_has_is_named() -> None:
    items, classes = two_views(20, 6)
    items[:, 4:] = np.nan
    with pytest.raises(BadInput, match="view 1 is missing in all 20 items"):
        MaxMarginMultiView((4, 3), sweeps=4, burn_in=1).fit(items, classes)


def test_parameters_can_be_read_and_cloned() -> None:
    model = MaxMarginMultiView((4, 3), sweeps=7)
    assert clone(model).get_params() == model.get_params()
    assert model.get_params()["views"] == (4, 3)
