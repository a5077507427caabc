"""Compilation of Triton kernels without a GPU."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from nostall.core import (
    BadInput,
    BadLaunch,
    Constant,
    LaunchSpec,
    MissingPart,
    NostallError,
    Scalar,
    UnsupportedArchitecture,
)
from nostall.tuning.sources import kernel_file
from nostall.tuning.sources import triton_source as module
from nostall.tuning.sources.triton_source import compile_triton

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[4]
EXAMPLES = ROOT / "examples"
NVCC = ROOT / "tests" / "corpus" / "nvcc"


def test_an_example_compiles(tmp_path: Path) -> None:
    source = compile_triton(EXAMPLES / "gemm_leakyrelu.py", "gemm_leakyrelu", None, "sm_90")
    assert source.cubin.startswith(b"\x7fELF")
    assert source.kernel == "gemm_leakyrelu"
    assert source.launch is not None
    assert source.launch.block == (128, 1, 1)
    assert source.launch.shared >= 4 * (64 + 64) * 32 * 2
    assert source.launch.flops == 2.0 * 512 * 512 * 2048
    assert source.origin.endswith("gemm_leakyrelu.py:gemm_leakyrelu")
    assert source.provenance["compiler"] == f"triton {triton.__version__}"
    assert source.provenance["ptxas"][0].isdigit()
    assert "num_stages=4" in source.provenance["options"]


@pytest.mark.parametrize("value", [0, 1, 2, 15, 16, 17, 32, 1000, -16, -1, 2**20 + 1])
def test_integers_are_specialized_as_by_the_launcher(kernels: Path, value: int) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.nvidia.compiler import CUDABackend

    kind, key = jit.native_specialize_impl(CUDABackend, value, False, True, True)
    with kernel_file.import_file(kernels) as loaded:
        function = loaded.scale
        args = {arg.name: arg for arg in loaded.launch(n=value).args}
        signature, constants, attributes = module._specialize(function, args, "scale")
    assert signature["n"] == kind
    assert ("n" in constants) == (kind == "constexpr")
    assert ((2,) in attributes) == (key == "D")
    assert (0,) in attributes
    assert (1,) in attributes


def test_divisibility_changes_the_code(kernels: Path) -> None:
    def spec(n: int) -> LaunchSpec:
        with kernel_file.import_file(kernels) as loaded:
            launch: LaunchSpec = loaded.launch(n=n)
            return launch

    aligned = compile_triton(kernels, "scale", spec(1024), "sm_80").cubin
    ragged = compile_triton(kernels, "scale", spec(1023), "sm_80").cubin
    assert aligned != ragged


def test_compilation_is_deterministic_and_has_no_side_effects(
    kernels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    environment, modules, path = dict(os.environ), set(sys.modules), list(sys.path)
    first = compile_triton(kernels, "scale", None, "sm_90")
    second = compile_triton(kernels, "scale", None, "sm_90")
    assert first == second
    assert not cache.exists()
    assert dict(os.environ) == environment
    assert sys.path == path
    assert "kernels" not in set(sys.modules) - modules
    assert capfd.readouterr() == ("", "")


def test_functions_that_are_not_inlined_keep_their_names() -> None:
    path = ROOT / "tests" / "corpus" / "kernels" / "control.py"
    first = compile_triton(path, "device_calls", None, "sm_90")
    assert b"control._row_norm" in first.cubin
    assert compile_triton(path, "device_calls", None, "sm_90").cubin == first.cubin
    assert "kernel_spec" not in sys.modules


def test_a_file_may_have_the_name_of_a_module_in_use(kernels: Path, tmp_path: Path) -> None:
    for folder, block in (("one", 128), ("two", 256)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "struct.py"
        path.write_text(kernels.read_text().replace("import triton\n", "import triton, sizes\n", 1))
        (tmp_path / folder / "sizes.py").write_text(f"BLOCK = {block}\n")
        with kernel_file.import_file(path) as loaded:
            assert block == loaded.sizes.BLOCK
        assert compile_triton(path, "scale", None, "sm_80").kernel == "scale"
        assert sys.modules["struct"] is struct


def test_compile_options_are_passed_on(kernels: Path) -> None:
    single = compile_triton(kernels, "scale", None, "sm_90")
    clustered = compile_triton(kernels, "scale", None, "sm_90", options={"num_ctas": 2})
    assert single.launch is not None
    assert clustered.launch is not None
    assert clustered.launch.cluster == (2, 1, 1)
    assert clustered.launch.grid[0] == 2 * single.launch.grid[0]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("nothing", BadInput, ("no kernel 'nothing'", "scale, broken, greedy, fixed, tuned")),
        ("plain", BadInput, ("'plain' is not a @triton.jit function", "scale")),
        ("scale@other", BadLaunch, ("scale@other", "scale@strided", "`nostall init`")),
        ("scale@wrong", BadLaunch, ("LAUNCHES['scale@wrong']", "grid")),
        ("broken", BadInput, ("cannot compile", "undefined_name", "sm_80")),
        ("greedy", BadLaunch, ("shared memory", "166912", "fewer than 8 stages")),
    ],
)
def test_kernels_that_cannot_be_compiled(
    kernels: Path, name: str, kind: type[NostallError], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        compile_triton(kernels, name, None, "sm_80")
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": "x"}, ("missing arguments: x", "the kernel takes: y, x, n")),
        ({"add": Scalar(name="z", dtype="i32", value=3)}, ("lacks: z",)),
        ({"add": Scalar(name="n", dtype="i32", value=3)}, ("given twice: n",)),
        ({"swap": Scalar(name="BLOCK", dtype="i32", value=64)}, ("'BLOCK' is tl.constexpr",)),
        ({"swap": Constant(name="n", constant=64)}, ("'n' is given as a constant",)),
    ],
)
def test_arguments_that_do_not_match(
    kernels: Path, change: dict[str, object], words: tuple[str, ...]
) -> None:
    with kernel_file.import_file(kernels) as loaded:
        launch = loaded.launch()
    args = [arg for arg in launch.args if arg.name != change.get("drop")]
    if "add" in change:
        args.append(change["add"])
    if (swap := change.get("swap")) is not None:
        args = [swap if arg.name == swap.name else arg for arg in args]  # type: ignore[attr-defined]
    with pytest.raises(BadLaunch) as caught:
        compile_triton(kernels, "scale", launch.model_copy(update={"args": tuple(args)}), "sm_80")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_package_anywhere\n", ("ModuleNotFoundError", "no_such_package_anywhere")),
        ("def f(:\n", ("SyntaxError",)),
        ("raise SystemExit(7)\n", ("SystemExit",)),
        ("x = 1\n", ("no kernel 'scale'", "(none)")),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "file.py"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        compile_triton(path, "scale", None, "sm_80")
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(BadInput, match="there is no file"):
        compile_triton(tmp_path / "missing.py", "scale", None, "sm_80")
    with pytest.raises(BadInput, match="not a Python file"):
        compile_triton(NVCC / "calls.cu", "scale", None, "sm_80")


@pytest.mark.parametrize("arch", ["sm_999", "sm_103", "sm_70"])
def test_unsupported_architectures_are_not_compiled(kernels: Path, arch: str) -> None:
    """LLVM ends the process for some of them."""
    with pytest.raises(UnsupportedArchitecture, match=f"for {arch}; supported are sm_75, "):
        compile_triton(kernels, "scale", None, arch)


@pytest.mark.parametrize("arch", ["90", "sm90", "sm_9", "ampere", "compute_90", ""])
def test_architectures_with_another_syntax(kernels: Path, arch: str) -> None:
    with pytest.raises(BadInput, match=r"allowed are .*sm_80, .*sm_90"):
        compile_triton(kernels, "scale", None, arch)


def test_without_triton(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingPart, match=r"pip install 'nostall\[triton\]'") as caught:
        compile_triton(kernels, "scale", None, "sm_80")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0", "2.1.0"])
def test_an_unsupported_version_of_triton(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(MissingPart, match=f"Triton {version} is not supported.*3.6 to 3.9"):
        compile_triton(kernels, "scale", None, "sm_80")


@pytest.mark.slow
def test_the_oldest_supported_triton(kernels: Path) -> None:
    old = ROOT / ".cache" / "triton-3.6.0"
    if not old.is_dir():
        pytest.skip("no Triton 3.6.0 in .cache (see tests/corpus/build.py)")
    code = (
        "import sys; from pathlib import Path\n"
        "from nostall.tuning.sources.triton_source import compile_triton\n"
        "s = compile_triton(Path(sys.argv[1]), 'scale', None, 'sm_90')\n"
        "print(s.provenance['compiler'], s.launch.block[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(kernels)],
        env=os.environ | {"PYTHONPATH": str(old)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "triton 3.6.0 64\n"


def test_a_constant_may_be_a_type(tmp_path: Path) -> None:
    path = tmp_path / "typed.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\n"
        "def typed(x, y, TYPE: tl.constexpr, TEXT: tl.constexpr):\n"
        '    tl.static_assert(TEXT == "tl.none")\n'
        "    tl.store(y, tl.load(x).to(TYPE))\n"
    )
    args = [
        {"name": "x", "dtype": "f32", "shape": [1]},
        {"name": "y", "dtype": "f16", "shape": [1], "role": "out"},
        {"name": "TYPE", "constant": "tl.float16"},
        {"name": "TEXT", "constant": "tl.none"},
    ]
    source = compile_triton(path, "typed", LaunchSpec.parse({"args": args}, "typed"), "sm_80")
    assert "cvt.rn.f16.f32" in (source.ptx or "")


def test_a_file_of_a_package_may_import_its_neighbours(tmp_path: Path) -> None:
    inner = tmp_path / "outer_package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        Path(folder, "__init__.py").touch()
    Path(inner.parent, "shared.py").write_text(
        "import triton\n@triton.jit\ndef twice(x):\n    return x + x\n"
    )
    path = inner / "kernels.py"
    path.write_text(
        "import triton\nimport triton.language as tl\nfrom ..shared import twice\n"
        "@triton.jit\ndef doubled(x):\n    tl.store(x, twice(tl.load(x)))\n"
    )
    args = [{"name": "x", "dtype": "f32", "shape": [1], "role": "inout"}]
    before = set(sys.modules), list(sys.path)
    source = compile_triton(path, "doubled", LaunchSpec.parse({"args": args}, "doubled"), "sm_80")
    assert source.kernel == "doubled"
    assert {n for n in set(sys.modules) - before[0] if "outer_package" in n} == set()
    assert sys.path == before[1]
    Path(inner, "__init__.py").unlink()
    with pytest.raises(BadInput, match="no known parent package"):
        compile_triton(path, "doubled", LaunchSpec.parse({"args": args}, "doubled"), "sm_80")


def test_what_a_package_imports_from_other_folders_stays_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extension modules such as PyTorch's cannot be imported twice; projects hold environments."""
    packages = tmp_path / ".venv" / "site-packages"
    for package in (tmp_path / "own_package", packages / "installed", packages / "its_library"):
        package.mkdir(parents=True)
        Path(package, "__init__.py").touch()
        Path(package, "sizes.py").write_text("SIZE = 4\n")
        Path(package, "kernels.py").write_text("import its_library\nfrom .sizes import SIZE\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.chdir(tmp_path / "own_package")
    before = set(sys.modules)
    for path in (Path("kernels.py"), packages / "installed" / "kernels.py"):
        with kernel_file.import_file(path) as loaded:
            assert loaded.SIZE == 4
    installed = {"installed", "installed.kernels", "installed.sizes", "its_library"}
    try:
        assert set(sys.modules) - before == installed
    finally:
        for name in installed:
            sys.modules.pop(name, None)
