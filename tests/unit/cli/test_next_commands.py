"""Commands that a command prints to be run next: nostall parses them, and their files exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.cli import LAUNCH, NVCC, SMALL, nostall_here
from tests.unit.cli.printed_commands import check_printed, resolved

Words = Sequence[object]


def tune(*options: object) -> Callable[[Path], Words]:
    """A search on the model; its run directory has a name that needs quotes."""
    return lambda at: ("tune", SMALL, "--launch", LAUNCH, "--out", at / "a run", *options)


def init(at: Path) -> Words:
    return ("init", NVCC / "atomics.sm_90.cubin", "--kernel", "ordered", "--out", at / "a b.toml")


def batch(at: Path) -> Words:
    return ("serving", "batch", "--name", "mixed", "--out", at / "a batch.json")


CALLS: dict[str, Callable[[Path], Words]] = {
    "tune": tune("--evaluations", 60),
    "tune measured": tune("--evaluations", 60, "--measured-latencies"),
    "tune without gain": tune("--evaluations", 1),
    "tune stored": tune("--evaluations", 60, "--store"),
    "init": init,
    "serving batch": batch,
}


@pytest.mark.parametrize("call", CALLS)
def test_printed_commands_are_parsed_and_name_files_that_exist(call: str, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    done = nostall_here(*CALLS[call](tmp_path), cwd=tmp_path, NOSTALL_HOME=home)
    assert done.code == 0, done.err
    lines = check_printed(done.out)
    assert lines, done.out
    page = tmp_path / "a run" / "report.html"
    if "--measured-latencies" in CALLS[call](tmp_path):  # else the verifier refuses the result
        assert "--measured-latencies" in lines[0]
        assert "best.cubin&#39; --measured-latencies" in page.read_text()


def test_an_unknown_option_and_a_missing_file_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No such option"):  # Typer has a click of its own
        check_printed(f"next:     nostall verify {SMALL} {SMALL} --mesured")
    with pytest.raises(AssertionError):
        check_printed(f"next:     nostall verify {SMALL} {tmp_path / 'none.cubin'}")
    line = f"nostall verify {SMALL} {SMALL} --measured-latencies"
    assert check_printed(f"next:     {line}  (a remark)") == [line]
    assert resolved(line)["measured_latencies"]
