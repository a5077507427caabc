"""Hardware files, quantities with units, and fitted efficiency curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadHardware, BadInput
from nostall.workload import Resource, load_hardware, presets
from nostall.workload.hardware import Curve, fit_curve
from nostall.workload.hardware.quantity import quantity

TEXT = """
name = "mine"
memory = "1 TB/s"
memory_size = "16 GiB"
pcie = "10 GB/s"
gpus_per_server = 4
[flops]
fp32 = "11 TFLOP/s"
[efficiency.ethernet]
share = 0.5
overhead = "0.001 s"
"""


@pytest.mark.parametrize("name", presets())
def test_every_preset_gives_a_source_for_every_number(name: str) -> None:
    found = load_hardware(name)
    assert found.name == name
    links = ("pcie", "pcie_links", "nvlink", "ethernet")
    for number in ("flops", "memory", "memory_size", *links, "gpus_per_server", "efficiency"):
        assert found.sources[number], number


def test_the_published_cluster_marks_what_is_not_verified() -> None:
    sources = load_hardware("pai-2018").sources
    for number in ("memory", "memory_size", "gpus_per_server", "efficiency"):
        assert "not verified" in sources[number]


def test_a_file_gives_units_and_its_own_efficiency(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    found = load_hardware(str(path))
    assert found.memory_size == 16 * 2**30
    assert found.curve(Resource.ETHERNET) == Curve(0.5, 0.001)
    assert found.curve(Resource.PCIE) == Curve(0.7)
    assert found.nvlink == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"1 TB/s"', "1e12", "unit"),
        ('"1 TB/s"', '"1 TB"', "not an amount in B/s"),
        ('"1 TB/s"', '"1 furlong/s"', "not an amount in B/s"),
        ("gpus_per_server = 4", "gpus_per_server = 0", "gpus_per_server"),
        ('fp32 = "11 TFLOP/s"', "", "flops"),
        ("share = 0.5", "share = 1.5", "share"),
        ("[efficiency.ethernet]", "[efficiency.wifi]", "efficiency"),
        ('name = "mine"', 'nom = "mine"', "name"),
        ('name = "mine"', "name =", "not TOML"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(BadHardware) as error:
        load_hardware(str(path))
    assert said in str(error.value) and "mine.toml" in str(error.value)


def test_a_name_that_is_neither_file_nor_preset_lists_the_presets() -> None:
    with pytest.raises(BadHardware, match="pai-2018"):
        load_hardware("b300")


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("25 Gb/s", "B/s", 3.125e9),
        ("25Gbps", "B/s", 3.125e9),
        ("10 GB/s", "B/s", 10e9),
        ("2 GiB", "B", 2 * 2**30),
        ("11 TFLOP/s", "FLOP/s", 11e12),
        ("1e-3 s", "s", 1e-3),
    ],
)
def test_quantities(text: str, dimension: str, value: float) -> None:
    assert quantity(text, dimension) == pytest.approx(value)


@pytest.mark.parametrize("text", ["25", "25 Gb", "-1 GB/s", "GB/s", "1 gb/s", "nan GB/s", ""])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(BadInput):
        quantity(text, "B/s")


@given(st.floats(0.01, 1.0), st.floats(0, 1e-2), st.integers(3, 12))
def test_a_fit_recovers_the_curve_that_made_the_measurements(share, overhead, points) -> None:
    truth, peak = Curve(share, overhead), 10e9
    sizes = np.geomspace(1e4, 1e9, points)
    found = fit_curve(sizes, [truth.seconds(s, peak) for s in sizes], peak)
    assert found.worst_error < 1e-6
    assert found.curve.share == pytest.approx(share, rel=1e-4)
    assert found.curve.overhead == pytest.approx(overhead, rel=1e-3, abs=1e-9)


def test_a_fit_stays_physical_where_noise_says_otherwise() -> None:
    sizes = [1e6, 2e6, 3e6]
    faster_than_peak = fit_curve(sizes, [s / 20e9 for s in sizes], 10e9)
    assert faster_than_peak.curve.share == 1.0
    negative_start = fit_curve(sizes, [1e-4, 5e-4, 9e-4], 10e9)
    assert negative_start.curve.overhead == 0.0


def test_half_size_reaches_half_the_share() -> None:
    curve, peak = Curve(0.8, 1e-3), 10e9
    half = curve.half_size(peak)
    assert half / curve.seconds(half, peak) / peak == pytest.approx(0.4)
    assert curve.seconds(0, peak) == 0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1e6], [1.0]), ([1e6, 1e6], [1.0, 2.0]), ([1e6, 2e6], [1.0, 0.0])]
)
def test_too_little_to_fit(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(BadInput):
        fit_curve(sizes, seconds, 10e9)
