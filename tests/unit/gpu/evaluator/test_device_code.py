"""PTX of the helper kernels: ptxas accepts it, and it computes what numpy computes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from nostall.core.launch import ScalarType
from nostall.gpu.evaluator import device_code
from tests.unit.gpu.fake_driver import NAMES, FakeDriver
from tests.unit.gpu.ptx import Machine, parse

DTYPES = [*get_args(ScalarType), "f8e4m3", "f8e5m2"]
NUMPY = {"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8", "f8e4m3": "u1", "f8e5m2": "u1"}
FP8 = {"f8e4m3": 2**-8, "f8e5m2": 1}
"""Scale of the f16 values from which fp8 values are truncated."""
COUNT, KEY = 700, 0xDEADBEEFCAFEF00D


def kind(dtype: str) -> Any:
    return np.dtype(NUMPY.get(dtype) or f"u{int(dtype[1:]) // 8}")


def fp8(dtype: str) -> Any:
    """The values of all 256 bytes, by the definition of the format."""
    mantissa, bias = (3, 7) if dtype == "f8e4m3" else (2, 15)
    values = []
    for byte in range(128):
        exponent, rest = byte >> mantissa, (byte & ((1 << mantissa) - 1)) / (1 << mantissa)
        scale = 2.0 ** (max(1, exponent) - bias)
        values.append(scale * (rest + (exponent > 0)))
    if dtype == "f8e4m3":
        values[127] = np.nan
    else:
        values[124:] = [np.inf, np.nan, np.nan, np.nan]
    return np.array([*values, *np.negative(values)])


def as_fp8(dtype: str, values: Any) -> Any:
    """The values as bytes, truncated towards zero and limited to the largest finite value."""
    table = fp8(dtype)
    table = table[: np.flatnonzero(~np.isfinite(table))[0]]
    magnitude = np.searchsorted(table, np.abs(values), side="right") - 1
    return (magnitude | np.signbit(values) << 7).astype(np.uint8)


def mix(x: Any) -> Any:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def reference(dtype: str, number: int, low: float, span: float, bound: int, key: int = KEY) -> Any:
    """The values that ``fill`` must write."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        base = mix(np.array([number], np.uint64) * golden + np.uint64(key))
        bits = mix(np.arange(COUNT, dtype=np.uint64) * golden + base)
    if dtype[0] in "iu":
        return np.array([(int(b) * bound) >> 64 for b in bits], "u8").astype(kind(dtype))
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    values = unit * np.float32(span) + np.float32(low)
    if dtype == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if dtype in FP8:
        scale = np.float32(FP8[dtype])
        return as_fp8(dtype, (values * scale).astype(np.float16).astype(np.float64) / scale)
    return values.astype(kind(dtype))


def run(text: bytes, values: tuple[Any, ...], driver: FakeDriver, blocks: int = 2) -> None:
    Machine(parse(text.rstrip(b"\0").decode()), values, blocks, 96).run(driver.at)


@pytest.mark.parametrize("dtype", DTYPES)
def test_generated_inputs_equal_the_reference(dtype: str) -> None:
    driver, number = FakeDriver(), (1 << 40) + 5
    _, word = driver.cuMemAlloc(8)
    _, out = driver.cuMemAlloc(COUNT * kind(dtype).itemsize + 8)
    driver.array(word, 1, "u8")[0] = number
    run(
        device_code.fill(dtype),
        (out, COUNT, word, KEY, np.float32(-3), np.float32(5), 200),
        driver,
    )
    values = driver.array(out, COUNT, kind(dtype))
    assert values.tobytes() == reference(dtype, number, -3.0, 5.0, 200).tobytes()
    after_end = driver.at(out + COUNT * kind(dtype).itemsize, 8)
    assert set(after_end) == {0xCD}


def test_samples_differ_and_cover_their_range() -> None:
    first, second = (reference("f32", n, -1.0, 2.0, 0) for n in (0, 1))
    assert (first == second).mean() < 0.01
    assert -1 <= first.min() < -0.98 and 0.98 < first.max() < 1
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
    assert abs(float(first.mean())) < 0.1


def test_differing_words_are_counted_with_64_bits() -> None:
    driver, rng = FakeDriver(), np.random.default_rng(0)
    _, count = driver.cuMemAlloc(8)
    pointers = [driver.cuMemAlloc(4 * COUNT)[1] for _ in range(2)]
    a, b = (driver.array(p, COUNT, "u4") for p in pointers)
    a[:] = rng.integers(0, 1 << 32, COUNT)
    b[:] = a
    b[rng.choice(COUNT, 17, replace=False)] ^= 1
    driver.array(count, 1, "u8")[0] = (1 << 32) - 1
    run(device_code.differing(), (*pointers, COUNT, count, 0.0, 0.0), driver)
    assert driver.array(count, 1, "u8")[0] == (1 << 32) + 16


def test_a_late_copy_copies_all_words() -> None:
    driver = FakeDriver()
    pointers = [driver.cuMemAlloc(4 * COUNT)[1] for _ in range(2)]
    target, source = (driver.array(p, COUNT, "u4") for p in pointers)
    source[:] = np.arange(COUNT)
    run(device_code.late_copy(), (*pointers, COUNT - 1, 5000), driver)
    assert list(target[:-1]) == list(range(COUNT - 1))
    assert target[-1] == 0xCDCDCDCD


SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e-8, 6e4, 1e-3]


def near_pairs(dtype: str, rtol: float, atol: float) -> tuple[Any, Any, int]:
    """Outputs, expected outputs, and how many pairs of them exceed the tolerance."""
    rng = np.random.default_rng(1)
    pairs = [(x, y) for x in SPECIAL for y in SPECIAL]
    near = rng.normal(size=400)
    pairs += zip(near * (1 + rng.normal(size=400) * 1e-2), near, strict=True)
    raw = np.array(pairs, np.float32).T
    if dtype == "bf16":
        stored = (raw.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    elif dtype in FP8:
        # Few of these pairs are close, because the formats have two or three mantissa bits.
        stored = np.array([rng.permutation(256), rng.permutation(256)], np.uint8)
        stored[1, ::2] = stored[0, ::2] + rng.integers(0, 2, 128).astype(np.uint8)
        values = fp8(dtype)[stored]
    else:
        stored = raw.astype(kind(dtype))
        values = stored.astype(np.float64)
    got, expected = values
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - expected)
        within = np.isfinite(difference) & (difference <= atol + rtol * np.abs(expected))
    bits = stored.view(f"u{stored.dtype.itemsize}")
    wrong = int((~(within | (got == expected) | (bits[0] == bits[1]))).sum())
    return stored[0], stored[1], wrong


@pytest.mark.parametrize("dtype", sorted(device_code.FLOAT_DTYPES))
@pytest.mark.parametrize(("rtol", "atol"), [(1e-2, 0.0), (0.0, 1e-3), (1e-3, 1e-4), (0.1, 1e-2)])
def test_differences_beyond_a_tolerance_are_counted(dtype: str, rtol: float, atol: float) -> None:
    driver = FakeDriver()
    got, expected, wrong = near_pairs(dtype, rtol, atol)
    assert 20 < wrong < len(got)
    _, count = driver.cuMemAlloc(8)
    pointers = [driver.cuMemAlloc(got.nbytes)[1] for _ in range(2)]
    for pointer, values in zip(pointers, (got, expected), strict=True):
        driver.array(pointer, len(got), values.dtype.str)[:] = values
    driver.array(count, 1, "u8")[0] = 0
    run(device_code.differing_beyond(dtype), (*pointers, len(got), count, rtol, atol), driver)
    assert driver.array(count, 1, "u8")[0] == wrong


@pytest.mark.parametrize("dtype", sorted(FP8))
def test_large_values_stay_finite(dtype: str) -> None:
    driver = FakeDriver()
    _, word = driver.cuMemAlloc(8)
    _, out = driver.cuMemAlloc(COUNT)
    driver.array(word, 1, "u8")[0] = 3
    run(device_code.fill(dtype), (out, COUNT, word, KEY, -6e4, 1.2e5, 0), driver)
    values = fp8(dtype)[driver.array(out, COUNT, "u1")]
    assert np.isfinite(values).all() and values.max() >= 448 and values.min() <= -448
    assert values.tobytes() == fp8(dtype)[reference(dtype, 3, -6e4, 1.2e5, 0)].tobytes()


@pytest.mark.parametrize("dtype", sorted(FP8))
def test_fp8_values_equal_those_of_pytorch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    name = {"f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}[dtype]
    raw = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    np.testing.assert_array_equal(raw.double().numpy(), fp8(dtype))


def test_ptxas_accepts_all_helper_kernels(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    texts = [device_code.differing(), device_code.advance(), device_code.late_copy()]
    texts += [device_code.fill(dtype) for dtype in DTYPES]
    texts += [device_code.differing_beyond(dtype) for dtype in sorted(device_code.FLOAT_DTYPES)]
    for text in texts:
        assert text.endswith(b"\0")
        source = tmp_path / "code.ptx"
        source.write_bytes(text[:-1])
        command = [str(ptxas), "-arch=sm_90", str(source), "-o", str(tmp_path / "code.cubin")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_the_fake_driver_has_only_calls_of_the_real_one() -> None:
    from cuda.bindings import driver

    assert all(callable(getattr(driver, name)) for name in NAMES)
