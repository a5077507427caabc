"""Checks of ``nostall doctor``: extras, versions, remedies that work, what each use lacks."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from nostall.cli import doctor
from nostall.cli.doctor import EXTRAS, USES, Check, check_environment, missing_parts

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN_EXTRAS = {"docs", "dev", "torch-tests"}
"""Extras for the development of nostall."""
PACKAGES = {
    *(re.split(r"[<>=]", r)[0] for r in PROJECT["dependencies"]),
    *(re.split(r"[<>=]", r)[0] for e in PROJECT["optional-dependencies"].values() for r in e),
    "nvidia-cuda-cupti",
    "vllm",
}


def name(requirement: str) -> str:
    return re.split(r"[<>=]", requirement)[0]


def test_the_extras_are_those_of_the_project() -> None:
    declared = {
        extra: {name(requirement) for requirement in requirements}
        for extra, requirements in PROJECT["optional-dependencies"].items()
        if extra not in OWN_EXTRAS
    }
    assert {extra: set(packages) for extra, packages in EXTRAS.items()} == declared


def test_the_ranges_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    first, last = doctor.TORCH_VERSIONS[0], doctor.TORCH_VERSIONS[-1]
    after = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
    assert extras["torch"] == [f"torch>={first},<{after}"]
    assert f"nvidia-cuda-nvdisasm=={doctor.NVDISASM_VERSION}" in PROJECT["dependencies"]


def test_every_use_needs_parts_that_are_checked() -> None:
    parts = {check.part for check in check_environment()}
    for needed in USES.values():
        assert set(needed) <= parts


def test_pip_lines_in_messages_name_what_can_be_installed() -> None:
    """Every `pip install X` in the source names nostall with an existing extra, or a package."""
    lines = 0
    for path in (ROOT / "src" / "nostall").rglob("*.py"):
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # literals over several lines
        for found in re.findall(r"pip install +('[^']+'|[\w\-=.]+|\{\w+\})", text):
            lines += 1
            what = found.strip("'")
            extras = re.fullmatch(r"nostall\[([\w,\-]+)\]", what)
            if extras:
                assert set(extras[1].split(",")) <= set(EXTRAS), (path, found)
            elif "{" not in what:
                assert name(what.rstrip(".,")) in PACKAGES | {"nvidia-cuda-"}, (path, found)
    assert lines > 15


def test_a_missing_package_and_an_unsupported_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.99.0", "torch": "2.12.1"}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = {check.part: check for check in check_environment()}
    assert not checks["triton"].ok
    assert checks["triton"].remedy == (
        "3.99.0 is installed, 3.6 to 3.9 are supported: pip install 'nostall[triton]'"
    )
    assert checks["torch"].version == "2.12.1 (supported: 2.11 to 2.13)"
    assert checks["distributed"].remedy == "pip install 'nostall[farm]'"
    lacks = missing_parts(list(checks.values()))
    assert "triton" in lacks["fuse"] and "torch" not in lacks["fuse"]
    assert "pyarrow" in lacks["characterize JOBS.parquet"]


def test_the_gpu_and_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "NVIDIA H200, 580.1\nNVIDIA H200, 580.1\n"
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(doctor.toolchain, "run", lambda command, tool: answer)
    gpu, driver = doctor._check_gpu()
    assert gpu == Check("GPU", "NVIDIA H200; NVIDIA H200", False)
    assert driver == Check("driver", "580.1", False)


def test_a_damaged_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    assert doctor._check_store().version == f"0 records ({tmp_path})"
    (tmp_path / "index.sqlite").write_bytes(b"")
    check = doctor._check_store()
    assert not check.ok and "nostall store repair" in check.remedy


def test_an_override_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_NVDISASM", "/nonexistent")
    check = check_environment()[0]
    assert not check.ok and "unset it" in check.remedy  # pip would not help
    monkeypatch.delenv("NOSTALL_NVDISASM")
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nonexistent")
    check = doctor._check_tool("nvdisasm", "13.5.37", needed=True)
    assert check.remedy == "pip install nvidia-cuda-nvdisasm==13.5.37"
