"""NVIDIA's tools: search order, resource limits and error messages."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nostall.core.errors import BadBinary, MissingPart
from nostall.sass.binary import toolchain


def script(path: Path, body: str) -> str:
    """Write an executable shell script; returns its path."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("tool", ["nvdisasm", "cuobjdump"])
def test_the_packaged_tools_are_found(tool: str) -> None:
    assert toolchain.find(tool).name == tool
    assert toolchain.version(tool).startswith("V13.")


def test_the_environment_variable_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = script(tmp_path / "mine", "echo 'release 99, V99.1.2'")
    monkeypatch.setenv("NOSTALL_NVDISASM", chosen)
    assert toolchain.find("nvdisasm") == Path(chosen)
    assert toolchain.version("nvdisasm") == "V99.1.2"


@pytest.mark.parametrize("value", ["/nonexistent", ".", __file__])
def test_an_environment_variable_without_executable_is_an_error(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_NVDISASM", value)
    with pytest.raises(MissingPart, match=r"NOSTALL_NVDISASM is .* not an executable file"):
        toolchain.find("nvdisasm")


def test_a_package_on_sys_path_comes_before_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "nvidia" / "cu13" / "bin").mkdir(parents=True)
    packaged = script(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvnothing", "true")
    script(tmp_path / "nvnothing", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert toolchain.find("nvnothing") == Path(packaged)


def test_a_tool_on_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = script(tmp_path / "nvnothing", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.find("nvnothing") == Path(chosen)


def test_the_error_of_a_missing_tool_tells_how_to_install_it() -> None:
    with pytest.raises(MissingPart, match="pip install nvidia-cuda-nvnothing"):
        toolchain.find("nvnothing")


def test_an_unknown_version_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_NVDISASM", script(tmp_path / "x", "echo hello"))
    assert toolchain.version("nvdisasm") == "unknown"


def test_a_failing_tool_is_an_error_with_its_message(tmp_path: Path) -> None:
    tool = script(tmp_path / "x", "echo 'first line' >&2; echo second >&2; exit 7")
    with pytest.raises(BadBinary, match=r"nvdisasm rejects this input: first line$"):
        toolchain.run([tool], "nvdisasm")
    with pytest.raises(BadBinary, match="exit code 7"):
        toolchain.run([script(tmp_path / "y", "exit 7")], "nvdisasm")


def test_a_crashing_tool_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadBinary, match="exit code -11"):
        toolchain.run([script(tmp_path / "x", "kill -SEGV $$")], "nvdisasm")


def test_disabled_flow_analysis_is_an_error(tmp_path: Path) -> None:
    tool = script(tmp_path / "x", "echo 'nvdisasm warning: flow analysis is disabled' >&2")
    with pytest.raises(BadBinary, match="cannot analyse this input"):
        toolchain.run([tool], "nvdisasm")


def test_a_hanging_tool_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_TIMEOUT_SECONDS", 0.3)
    with pytest.raises(BadBinary, match="did not finish"):
        toolchain.run([script(tmp_path / "x", "exec sleep 20")], "nvdisasm")


def test_the_memory_of_a_tool_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_MAX_MEMORY_BYTES", 512 << 20)
    with pytest.raises(BadBinary, match="rejects this input"):
        toolchain.run([sys.executable, "-c", "x = bytearray(2 << 30)"], "nvdisasm")


def test_the_output_of_a_tool_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_MAX_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(BadBinary):
        toolchain.run(["/bin/sh", "-c", "while :; do echo aaaaaaaaaaaaaaaaa; done"], "nvdisasm")


def test_a_tool_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(MissingPart, match="cannot be started"):
        toolchain.run([str(tmp_path / "text")], "nvdisasm")


def test_lower_limits_of_the_user_stay(tmp_path: Path) -> None:
    """Under `ulimit -v` a tool keeps the limit of the shell."""
    code = (
        "import resource; from nostall.sass.binary import toolchain\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({3 << 30}, {3 << 30}))\n"
        "print(toolchain.run(['/bin/sh', '-c', 'ulimit -v'], 'sh'))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == [str((3 << 30) // 1024)]
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 3 << 30
