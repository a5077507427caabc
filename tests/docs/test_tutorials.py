"""The commands of the tutorials run and print what the pages show."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from nostall.core.errors import BadRun
from nostall.gpu import Kernel
from tests.docs import recording
from tests.docs.recording import DeviceRecording, GpuCommand
from tests.docs.replayed import Recorder, Replay, recording_opener, replaying_opener
from tests.docs.test_links import markdown_files
from tests.docs.tutorial import (
    ROOT,
    Command,
    blocks,
    execute,
    missing_lines,
    prepare,
    read,
    read_quotations,
    run,
    with_any_triton,
)
from tests.unit.tuning.fake_device import FakeDevice, load_example

PAGES = sorted((ROOT / "docs" / "tutorials").glob("first-*.md"))
NEEDS_TORCH = {"first-pipeline", "first-torch-compile", "fuse-a-function"}
QUOTING = [page for page in markdown_files() if page not in PAGES and read_quotations(page).steps]
"""Other pages that quote what a command prints."""


def use_recorded_triton(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile kernels to the machine code that was measured: with the recorded Triton."""
    if version("triton") == release:
        return
    installation = ROOT / ".cache" / f"triton-{release}"
    if not installation.exists():
        pytest.skip(f"the recording is of Triton {release}, which `make test` installs")
    monkeypatch.setenv("PYTHONPATH", str(installation))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS_TORCH:
        pytest.importorskip("torch", reason="the tutorial runs PyTorch")
    tutorial = read(page)
    assert tutorial.commands
    assert all(command.needs_gpu for command in run(tutorial, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_gpu_commands_of_a_tutorial_are_replayed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = recording.find(page.stem)
    if recorded is None or not any(command.devices for command in recorded.commands):
        pytest.skip("the page has no GPU commands that can be replayed")
    if recorded.rules != recording.rules_hash():
        pytest.skip(
            f"the GPU commands of {page.name} were recorded with other rules of the verifier; run "
            "`python -m tests.docs.record` on a GPU"
        )
    use_recorded_triton(recorded.machine["triton"], monkeypatch)
    tutorial = read(page)
    tutorial.steps[:] = map(with_any_triton, tutorial.steps)
    assert run(tutorial, tmp_path, recorded) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.stem)
def test_quoted_output_is_what_the_command_prints(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS_TORCH:
        pytest.importorskip("torch", reason="the commands run PyTorch")
    assert run(read_quotations(page), tmp_path) == []


@pytest.mark.parametrize("page", markdown_files(), ids=lambda page: str(page.relative_to(ROOT)))
def test_quoted_output_is_in_blocks_that_are_tested(page: Path) -> None:
    for block in blocks(page.read_text("utf-8")):
        has_command = any(line.startswith("$ ") for line in block.lines)
        assert not has_command or block.language == "console", block.lines[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_gpu_commands_print_what_was_recorded(page: Path) -> None:
    tutorial = read(page)
    if not tutorial.gpu_commands:
        pytest.skip("the page has no GPU commands")
    recorded = recording.find(page.stem)
    if recorded is None:
        pytest.skip(
            f"the {len(tutorial.gpu_commands)} GPU commands of {page.name} are not recorded; run "
            "`python -m tests.docs.record` on a machine with a GPU"
        )
    assert recorded.files == recording.file_hashes(tutorial.files), "record the page again"
    assert [c.line for c in recorded.commands] == [c.line for c in tutorial.gpu_commands]
    for command, result in zip(tutorial.gpu_commands, recorded.commands, strict=True):
        assert result.returncode == 0
        assert missing_lines(command, result.output) == []


def test_blocks_are_read_with_their_options() -> None:
    text = "````{code-block} console\n:class: gpu\n$ nostall doctor\nready\n````\n"
    (block,) = blocks(text)
    assert (block.language, block.needs_gpu) == ("console", True)
    assert block.lines == ("$ nostall doctor", "ready")


def test_a_wrong_output_line_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ python -c \"print('12 of 13')\"\n12 of 13\nsafe\n```\n")
    tutorial = read(page)
    assert tutorial.steps == [
        Command("python -c \"print('12 of 13')\"", ("12 of 13", "safe"), needs_gpu=False)
    ]
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AssertionError, match="does not print \\['safe'\\]"):
        run(tutorial, folder)


def test_numbers_are_compared() -> None:
    command = Command("", ("12 of 13", "..."), needs_gpu=False)
    assert missing_lines(command, "12  of 13\n") == []
    assert missing_lines(command, "14 of 13\n") == ["12 of 13"]
    varying = replace(command, varying=True)
    assert missing_lines(varying, "14 of 13\n") == []


def test_a_program_over_its_time_limit_ends_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "import time\nprint('started', flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'])\n"
    )
    with pytest.raises(subprocess.TimeoutExpired) as error:
        execute("python parent.py", tmp_path, timeout=3)
    assert error.value.output == "started\n"


def test_gpu_commands_without_a_recording_are_returned(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```{code-block} console\n:class: gpu\n$ nostall bench x\n```\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert [command.line for command in run(read(page), folder)] == ["nostall bench x"]


def example_kernel() -> Kernel:
    source = load_example()
    assert source.launch is not None
    return Kernel(source.cubin, source.kernel, source.launch)


def test_a_command_is_replayed_without_a_gpu(tmp_path: Path) -> None:
    kernel = example_kernel()
    recorders: list[Recorder] = []
    open_device = recording_opener(recorders, lambda *_: FakeDevice(1.0, 0.5, kernel.cubin))
    with open_device(kernel) as device:
        device.compare(kernel.cubin, 8, 4)
    nvcc = "examples/nvcc/dot_product"
    line = f"nostall bench {nvcc}.sm_90.cubin --launch {nvcc}.toml --rounds 8"
    devices = tuple(recorder.recording for recorder in recorders)
    path = tmp_path / "devices.json"
    recorded = GpuCommand(line=line, returncode=0, seconds=1, output="", devices=devices)
    path.write_text(recorded.model_dump_json())
    prepare(tmp_path)
    done = execute(line, tmp_path, ["-m", "tests.docs.replayed", "replay", str(path)])
    assert done.returncode == 0, done.stderr
    assert "dot_product on none, measured" in done.stdout


def test_repeated_outcomes_come_in_the_recorded_order() -> None:
    kernel = example_kernel()
    recorders: list[Recorder] = []
    fake = FakeDevice(1.0, 0.8, kernel.cubin)
    device = recording_opener(recorders, lambda *_: fake)(kernel)
    outcomes = [device.compare(kernel.cubin, 4, 1), device.evaluate(kernel.cubin)]
    fake.final_factor = 0.7
    outcomes.append(device.compare(kernel.cubin, 4, 1))
    replay = replaying_opener([recorders[0].recording])(kernel)
    assert replay.compare(kernel.cubin, 4, 1) == outcomes[0]
    assert replay.compare(kernel.cubin, 4, 1) == outcomes[2] != outcomes[0]
    assert replay.evaluate(kernel.cubin) == outcomes[1]
    with pytest.raises(BadRun, match="no further `evaluate`"):
        replay.evaluate(kernel.cubin)


def test_another_cubin_is_not_replayed() -> None:
    with pytest.raises(BadRun, match="another cubin"):
        Replay(example_kernel(), DeviceRecording(info={}, original="0" * 64))
