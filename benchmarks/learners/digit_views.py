"""Views of digits (scikit-learn's, UCI Multiple Features), and fixed splits of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadInput

Array = NDArray[Any]
SIDE = 8
DEVELOPMENT = 600
"""Items on which settings were chosen; they are in no split of :func:`splits`."""
SEEDS = range(5)
FILES = ("fac", "fou", "kar", "mor", "pix", "zer")
VIEW_NAMES = ("pixels", "Fourier", "Zernike", "gradients", "profiles")


@dataclass(frozen=True)
class Data:
    """Items in several views."""

    name: str
    views: list[Array]
    """Each (items, columns)."""
    widths: dict[str, int]
    """Columns of the views by name."""
    classes: Array
    present: tuple[int, ...]
    """Views of the tests with missing views: Fourier and Zernike."""
    pool: Array
    """Items of the splits."""


def load_views() -> tuple[list[Array], Array]:
    """The views of scikit-learn's digits, each (1797, columns), and the digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images / 16.0
    flat = images.reshape(len(images), -1)
    views = [flat, _fourier(images), _zernike(flat), _gradients(images), _profiles(images)]
    return views, digits.target


def load_digit_views() -> Data:
    """The digits of scikit-learn in five views; the splits lack the development items."""
    views, classes = load_views()
    widths = {name: view.shape[1] for name, view in zip(VIEW_NAMES, views, strict=True)}
    return Data("scikit-learn digits", views, widths, classes, (1, 2), pools()[1])


def load_multiple_features(folder: Path) -> Data:
    """UCI Multiple Features: six views of 2000 digits; the last column of a file is the digit.

    Raises :class:`~nostall.core.errors.BadInput` for a missing file.
    """
    views = []
    for name in FILES:
        path = folder / f"mfeat-{name}.csv"
        if not path.exists():
            raise BadInput(f"{path} is missing; give the folder of the files mfeat-*.csv")
        views.append(np.loadtxt(path, delimiter=",", skiprows=1))
    classes = views[0][:, -1].astype(int)
    views = [view[:, :-1] for view in views]
    widths = {name: view.shape[1] for name, view in zip(FILES, views, strict=True)}
    present = (FILES.index("fou"), FILES.index("zer"))
    pool = np.arange(len(classes))
    return Data("UCI Multiple Features", views, widths, classes, present, pool)


def pools() -> tuple[Array, Array]:
    """Numbers of the items for choosing settings, and of those for the splits."""
    order = np.random.default_rng(1910).permutation(1797)
    return order[:DEVELOPMENT], order[DEVELOPMENT:]


def splits(data: Data, each: int) -> Iterator[tuple[Array, Array]]:
    """Training items, ``each`` of every class, and test items, which are the rest of the pool."""
    classes = data.classes
    for seed in SEEDS:
        order = np.random.default_rng(seed).permutation(data.pool)
        parts = [order[classes[order] == c] for c in range(10)]
        yield np.concatenate([p[:each] for p in parts]), np.concatenate([p[each:] for p in parts])


def _fourier(images: Array) -> Array:
    """Magnitudes of the Fourier coefficients of a real image without their repetitions; 34."""
    size = np.abs(np.fft.rfft2(images))
    return np.hstack([size[:, :5, 0], size[:, :, 1:4].reshape(len(size), -1), size[:, :5, 4]])


def _zernike(flat: Array) -> Array:
    """Magnitudes of the Zernike moments up to order 8; 25."""
    grid = (np.arange(SIDE) - (SIDE - 1) / 2) / (SIDE / 2)
    x, y = np.meshgrid(grid, grid)
    radius, angle = np.hypot(x, y).ravel(), np.arctan2(y, x).ravel()
    columns = []
    for n in range(9):
        for m in range(n % 2, n + 1, 2):
            radial = sum(
                (-1) ** k
                * factorial(n - k)
                / (factorial(k) * factorial((n + m) // 2 - k) * factorial((n - m) // 2 - k))
                * radius ** (n - 2 * k)
                for k in range((n - m) // 2 + 1)
            )
            basis = np.where(radius <= 1, radial, 0.0) * np.exp(-1j * m * angle)
            columns.append(np.abs(flat @ basis))
    return np.column_stack(columns)


def _gradients(images: Array) -> Array:
    """Histograms of eight directions of the gradient in four quarters; 32."""
    by_row, by_column = np.gradient(images, axis=(1, 2))
    size = np.hypot(by_row, by_column)
    direction = ((np.arctan2(by_row, by_column) + np.pi) / (2 * np.pi) * 8).astype(int) % 8
    columns = []
    for rows in (slice(0, 4), slice(4, 8)):
        for cols in (slice(0, 4), slice(4, 8)):
            part, towards = size[:, rows, cols], direction[:, rows, cols]
            columns += [(part * (towards == d)).sum(axis=(1, 2)) for d in range(8)]
    return np.column_stack(columns)


def _profiles(images: Array) -> Array:
    """Sums of rows and of columns; 16."""
    return np.hstack([images.sum(axis=1), images.sum(axis=2)])
