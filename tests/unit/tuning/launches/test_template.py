"""Launch files that ``nostall init`` writes: they can be read, and they fit their kernels."""

from __future__ import annotations

import gzip
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core.errors import BadInput, BadLaunch
from nostall.core.launch import Buffer, Constant, LaunchSpec, LaunchVariant, Opaque, Scalar
from nostall.sass.binary.cubin import Cubin
from nostall.tuning.launches.recorded import launch_toml
from nostall.tuning.launches.template import check_launch, template_of_cubin, template_of_triton

ROOT = Path(__file__).resolve().parents[4]
NVCC = ROOT / "tests" / "corpus" / "nvcc"
CUBINS = [p for p in sorted(NVCC.glob("*.cubin")) if not p.name.startswith("refused")]
EXAMPLES = ROOT / "examples" / "nvcc"

NAMES = st.text(alphabet='abc_x"\\\n\x1b é', min_size=1, max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
BUFFERS = st.builds(
    Buffer,
    name=NAMES,
    dtype=st.sampled_from(["f16", "f32", "i64", "f8e4m3"]),
    shape=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=3).map(tuple),
    role=st.sampled_from(["in", "out", "inout", "scratch"]),
    low=FLOATS,
    bound=st.integers(1, 1 << 60),
)
SCALARS = st.builds(
    Scalar, name=NAMES, dtype=st.sampled_from(["f32", "i64"]), value=FLOATS | st.integers()
)
CONSTANTS = st.builds(
    Constant, name=NAMES, constant=st.booleans() | st.integers(-9, 9) | FLOATS | NAMES
)
OPAQUES = st.builds(Opaque, name=NAMES, bytes=st.integers(1, 32764))
DIMENSIONS = st.tuples(*[st.integers(1, 1 << 30)] * 3)


@st.composite
def launches(draw: st.DrawFn) -> LaunchSpec:
    args = draw(st.lists(BUFFERS | SCALARS | CONSTANTS | OPAQUES, max_size=5))
    scalars = {a.name: 1 for a in args if isinstance(a, Scalar)}
    variants = (LaunchVariant(grid=draw(DIMENSIONS), values=scalars),) if scalars else ()
    return LaunchSpec(
        grid=draw(DIMENSIONS),
        args=tuple(args),
        flops=draw(st.none() | st.floats(1, 1e20)),
        trips=draw(st.dictionaries(st.integers(0, 9), st.integers(1, 99), max_size=3)),
        shapes=variants,
    )


@settings(max_examples=40)
@given(launch=launches(), comment=st.text(max_size=30))
def test_a_written_launch_is_read_back(launch: LaunchSpec, comment: str) -> None:
    names = {argument.name: comment for argument in launch.args}
    text = launch_toml(launch, [comment], names | {"grid": comment}, ("grid", "block"))
    assert LaunchSpec.parse(tomllib.loads(text), "text") == launch


@pytest.mark.parametrize("path", CUBINS, ids=lambda path: path.stem)
def test_a_template_fits_its_kernel(path: Path) -> None:
    data = path.read_bytes()
    cubin = Cubin.parse(data)
    for text in cubin.texts:
        if text.is_kernel:
            template = template_of_cubin(data, text.name)
            written = launch_toml(template.launch, (), template.comments, template.keys)
            launch = LaunchSpec.parse(tomllib.loads(written), "text")
            assert launch == template.launch
            check_launch(cubin, text.name, launch, str(path))
            assert written.count("# TODO") == template.open_points > 0 or not launch.args


def test_the_launch_of_another_kernel_is_refused() -> None:
    transpose = Cubin.parse((EXAMPLES / "transpose.sm_90.cubin").read_bytes())
    own = LaunchSpec.from_toml(EXAMPLES / "transpose.toml")
    check_launch(transpose, "transpose", own, "x")
    other = LaunchSpec.from_toml(EXAMPLES / "dot_product.toml")
    with pytest.raises(BadLaunch, match=r"nostall init 'my file' --kernel transpose"):
        check_launch(transpose, "transpose", other, "my file")
    with pytest.raises(BadLaunch, match=r"has 0 arguments, .* takes 4 \(8, 8, 4, 4 bytes\)"):
        check_launch(transpose, "transpose", own.model_copy(update={"args": ()}), "x")
    swapped = own.model_copy(update={"args": (*own.args[:2], own.args[0], own.args[3])})
    with pytest.raises(BadLaunch, match=r"'y' .* has 8 bytes \(a pointer .* has 4"):
        check_launch(transpose, "transpose", swapped, "x")


def test_a_struct_has_its_size() -> None:
    data = (NVCC / "hopper.sm_90a.cubin").read_bytes()
    cubin = Cubin.parse(data)
    sizes = {
        argument.bytes
        for text in cubin.texts
        if text.is_kernel
        for argument in template_of_cubin(data, text.name).launch.args
        if isinstance(argument, Opaque)
    }
    assert sizes == {128}  # CUtensorMap


TRITON = """
import triton
import triton.language as tl

@triton.jit
def plain(
    x_ptr, out, n_cols, eps, fast, stride: tl.int64, BLOCK: tl.constexpr, KIND: tl.constexpr = "a"
):
    pass

@triton.autotune([triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def decorated(x_ptr, n, BLOCK: tl.constexpr):
    pass
"""


def test_a_template_of_a_triton_function(tmp_path: Path) -> None:
    triton: Any = pytest.importorskip("triton")
    path = tmp_path / "kernels.py"
    path.write_text(TRITON)
    args = template_of_triton(triton, path, "plain").launch.args
    assert [type(argument).__name__ for argument in args] == [
        "Buffer", "Buffer", "Scalar", "Scalar", "Buffer", "Scalar", "Constant", "Constant",
    ]  # fmt: skip
    assert [a.name for a in args][-1] == "KIND" and args[-1].constant == "a"  # type: ignore[union-attr]
    assert template_of_triton(triton, path, "decorated").open_points == 4
    with pytest.raises(BadInput, match="did you mean 'plain'"):
        template_of_triton(triton, path, "plian")


def test_a_name_that_is_multiplied_or_compared_is_a_number(tmp_path: Path) -> None:
    triton: Any = pytest.importorskip("triton")
    path = tmp_path / "kernels.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\n"
        "def product(A, B, C, M, N, K, lo, BIAS, BLOCK: tl.constexpr):\n"
        "    i = tl.program_id(0) % tl.cdiv(M, BLOCK)\n"
        "    x = tl.load(A + i * K, mask=i < N)\n"
        "    if BIAS is not None:\n"
        "        x += tl.load(BIAS + i)\n"
        "    tl.store(C + i, x + lo * tl.load(B + i))\n"
        "@triton.jit\n"
        "def attention(Q, K, V, M, S, BLOCK: tl.constexpr):\n"
        "    i = tl.arange(0, BLOCK)\n"
        "    tl.store(M + i, tl.load(Q + i) * tl.load(K + i) + tl.load(V + i) * S)\n"
        "@triton.jit\n"
        "def reused(X, Y, b, N, BLOCK: tl.constexpr):\n"
        "    i = tl.arange(0, BLOCK)\n"
        "    X = X + i\n"
        "    X = tl.load(X)\n"
        "    if b != None and N % 2:\n"
        "        X += tl.load(b + i)\n"
        "    tl.store(Y + i, 2 * X, mask=i < N)\n"
    )
    cases = {"product": {"M", "N", "K", "lo"}, "attention": {"S"}, "reused": {"N"}}
    for name, numbers in cases.items():
        args = template_of_triton(triton, path, name).launch.args
        assert {a.name for a in args if isinstance(a, Scalar)} == numbers


def test_a_template_of_ptx_tells_pointers_from_numbers(tmp_path: Path) -> None:
    from nostall.tuning.launches.template import _PTX_PARAMETER

    text = gzip.decompress((ROOT / "tests/corpus/ptx/cumulative_sum.sm_90.ptx.gz").read_bytes())
    found = list(_PTX_PARAMETER.finditer(text.decode().partition(".reqntid")[0]))
    assert [bool(match["pointer"]) for match in found] == [True, True, False, True, True]
    assert [match["name"] for match in found] == [f"cumulative_sum_param_{i}" for i in range(5)]
    struct = ".param .align 64 .b8 tma_param_0[128],\n.param .u64 tma_param_1"
    first, second = _PTX_PARAMETER.finditer(struct)
    assert (first["name"], first["size"]) == ("tma_param_0", "128")
    assert (second["name"], second["type"]) == ("tma_param_1", "u64")
