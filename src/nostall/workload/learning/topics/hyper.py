"""Gibbs steps of the topic model's sticks and concentrations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.special import gammaln

from nostall.workload.learning.topics.counts import Counts, Floats, Ints, whole_blocks
from nostall.workload.learning.topics.tokens import Concentrations


@dataclass(frozen=True, slots=True)
class ConcentrationPriors:
    """Gamma priors (shape, rate) of the concentrations that are sampled."""

    topics: tuple[float, float] = (1.0, 0.1)
    categories: tuple[float, float] = (1.0, 0.1)
    new_categories: tuple[float, float] = (1.0, 1.0)


def draw_tables(rng: np.random.Generator, counts: Counts, mass: float) -> Ints:
    """m_ck, the tables of category c that serve topic k, shape (category slots, topic slots).

    A Chinese-restaurant table distribution: sum over i < n_ck of Bernoulli(a / (a + i)) with
    a = a0 beta_k.
    """
    tables: Ints = _draw_tables(rng, counts.category_topics, mass * counts.sticks)
    return tables


@njit(cache=True)  # type: ignore[untyped-decorator]
def _draw_tables(rng: np.random.Generator, sizes: Floats, masses: Floats) -> Ints:
    tables = np.zeros(sizes.shape, np.int64)
    for c in range(sizes.shape[0]):
        for k in range(sizes.shape[1]):
            for i in range(int(sizes[c, k])):
                if rng.random() * (masses[k] + i) < masses[k]:
                    tables[c, k] += 1
    return tables


def draw_sticks(rng: np.random.Generator, counts: Counts, tables: Ints, gamma: float) -> None:
    """Draw beta ~ Dirichlet(tables of each topic, gamma) and write it to ``counts``."""
    used = np.flatnonzero(counts.topics)
    masses = np.append(tables.sum(axis=0)[used], gamma)
    shares = np.maximum(rng.dirichlet(masses), 1e-300)
    counts.sticks[:] = 0.0
    counts.sticks[used] = shares[:-1]
    counts.rest[0] = shares[-1]
    counts.used[0] = whole_blocks(int(used[-1]) + 1)


def draw_topic_concentration(
    rng: np.random.Generator, gamma: float, topics: int, tables: int, prior: tuple[float, float]
) -> float:
    """gamma given K topics at T tables (Escobar and West, 1995)."""
    shape, rate = prior
    auxiliary = rng.beta(gamma + 1.0, tables)
    rate = rate - math.log(auxiliary)
    odds = (shape + topics - 1.0) / (tables * rate)
    is_first = rng.random() < odds / (1.0 + odds)
    return float(rng.gamma(shape + topics - (0 if is_first else 1), 1.0 / rate))


def draw_category_concentration(
    rng: np.random.Generator, mass: float, sizes: Floats, tables: int, prior: tuple[float, float]
) -> float:
    """a0 given the tokens of each category and the tables of all (Teh et al., 2006)."""
    shape, rate = prior
    sizes = sizes[sizes > 0]
    shares = rng.beta(mass + 1.0, sizes)
    is_first = rng.random(len(sizes)) < sizes / (sizes + mass)
    shape = shape + tables - int(is_first.sum())
    return float(rng.gamma(shape, 1.0 / (rate - float(np.log(shares).sum()))))


def draw_new_concentration(
    rng: np.random.Generator, documents: tuple[int, int, int], prior: tuple[float, float]
) -> float:
    """xi given (labelled documents s, new categories n, unlabelled documents u).

    The labelled documents are seated first, so p(xi | n) is the prior times
    xi^n Gamma(xi + s) / Gamma(xi + s + u).  It is drawn on a grid of log xi.
    """
    labelled, new, unlabelled = documents
    shape, rate = prior
    grid = np.geomspace(1e-6, 1e3, 600)
    log_density = (
        (shape + new) * np.log(grid)
        - rate * grid
        + gammaln(grid + labelled)
        - gammaln(grid + labelled + unlabelled)
    )
    weights = np.exp(log_density - log_density.max())
    return float(rng.choice(grid, p=weights / weights.sum()))


def draw_concentrations(
    rng: np.random.Generator,
    counts: Counts,
    hyper: Concentrations,
    priors: ConcentrationPriors,
    documents: tuple[int, int, int],
) -> Concentrations:
    """Draw tables, sticks and all concentrations but eta; writes the sticks to ``counts``.

    ``documents``: labelled documents, new categories, unlabelled documents.
    """
    tables = draw_tables(rng, counts, hyper.categories)
    total, topics = int(tables.sum()), int((counts.topics > 0).sum())
    gamma = draw_topic_concentration(rng, hyper.topics, topics, total, priors.topics)
    draw_sticks(rng, counts, tables, gamma)
    mass = draw_category_concentration(
        rng, hyper.categories, counts.categories, total, priors.categories
    )
    xi = draw_new_concentration(rng, documents, priors.new_categories)
    return Concentrations(gamma, mass, xi, hyper.words)
