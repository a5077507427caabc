"""Hardware files, quantities with units, and fitted efficiency curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.workload.fit import fit_efficiency
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadHardware, BadInput
from nostall.workload import Resource, load_hardware, presets
from nostall.workload.hardware.description import EfficiencyCurve
from nostall.workload.hardware.file import parse_quantity

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
def test_every_preset_has_a_source_for_every_number(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    links = ("pcie", "pcie_links", "nvlink", "ethernet")
    for number in ("flops", "memory", "memory_size", *links, "gpus_per_server", "efficiency"):
        assert hardware.sources[number], number


def test_the_published_cluster_marks_unverified_numbers() -> None:
    sources = load_hardware("pai-2018").sources
    for number in ("memory", "memory_size", "gpus_per_server", "efficiency"):
        assert "not verified" in sources[number]


def test_a_file_has_units_and_efficiencies_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    hardware = load_hardware(str(path))
    assert hardware.memory_size == 16 * 2**30
    assert hardware.curve(Resource.ETHERNET) == EfficiencyCurve(0.5, 0.001)
    assert hardware.curve(Resource.PCIE) == EfficiencyCurve(0.7)
    assert hardware.nvlink == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
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
def test_a_bad_file_is_rejected_with_its_name(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(BadHardware) as error:
        load_hardware(str(path))
    assert message in str(error.value) and "mine.toml" in str(error.value)


def test_the_error_for_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(BadHardware, match="pai-2018"):
        load_hardware("b300")


@pytest.mark.parametrize(
    ("text", "base_unit", "value"),
    [
        ("25 Gb/s", "B/s", 3.125e9),
        ("25Gbps", "B/s", 3.125e9),
        ("10 GB/s", "B/s", 10e9),
        ("2 GiB", "B", 2 * 2**30),
        ("11 TFLOP/s", "FLOP/s", 11e12),
        ("1e-3 s", "s", 1e-3),
    ],
)
def test_quantities(text: str, base_unit: str, value: float) -> None:
    assert parse_quantity(text, base_unit) == pytest.approx(value)


@pytest.mark.parametrize("text", ["25", "25 Gb", "-1 GB/s", "GB/s", "1 gb/s", "nan GB/s", ""])
def test_texts_that_are_not_rates_are_rejected(text: str) -> None:
    with pytest.raises(BadInput):
        parse_quantity(text, "B/s")


@given(st.floats(0.01, 1.0), st.floats(0, 1e-2), st.integers(3, 12))
def test_a_fit_recovers_the_curve_of_exact_measurements(share, overhead, points) -> None:
    truth, peak = EfficiencyCurve(share, overhead), 10e9
    sizes = np.geomspace(1e4, 1e9, points)
    fit = fit_efficiency(sizes, [truth.seconds(s, peak) for s in sizes], peak)
    assert fit.worst_error < 1e-6
    assert fit.curve.share == pytest.approx(share, rel=1e-4)
    assert fit.curve.overhead == pytest.approx(overhead, rel=1e-3, abs=1e-9)


def test_a_fit_stays_within_its_bounds_for_impossible_measurements() -> None:
    sizes = [1e6, 2e6, 3e6]
    faster_than_peak = fit_efficiency(sizes, [s / 20e9 for s in sizes], 10e9)
    assert faster_than_peak.curve.share == 1.0
    negative_overhead = fit_efficiency(sizes, [1e-4, 5e-4, 9e-4], 10e9)
    assert negative_overhead.curve.overhead == 0.0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1e6], [1.0]), ([1e6, 1e6], [1.0, 2.0]), ([1e6, 2e6], [1.0, 0.0])]
)
def test_too_few_or_impossible_measurements_cannot_be_fitted(
    sizes: list[float], seconds: list[float]
) -> None:
    with pytest.raises(BadInput):
        fit_efficiency(sizes, seconds, 10e9)
