"""The commands of the tutorials run and print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.tutorial import ROOT, Command, blocks, read, run

PAGES = sorted((ROOT / "docs" / "tutorials").glob("first-*.md"))
RECORDINGS = Path(__file__).parent / "recordings"
NEEDS_TORCH = {"first-pipeline", "first-torch-compile"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS_TORCH:
        pytest.importorskip("torch", reason="the tutorial runs PyTorch")
    tutorial = read(page)
    assert tutorial.commands
    recording = RECORDINGS / f"{page.stem}.json"
    run(tutorial, tmp_path, recording if recording.exists() else None)


def test_blocks_are_read_with_their_options() -> None:
    text = "````{code-block} console\n:class: gpu\n$ nostall doctor\nready\n````\n"
    (block,) = blocks(text)
    assert (block.language, block.needs_gpu) == ("console", True)
    assert block.lines == ("$ nostall doctor", "ready")


def test_a_wrong_output_line_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ python -c \"print('12 of 13')\"\n14 of 15\nsafe\n```\n")
    tutorial = read(page)
    assert tutorial.steps == [
        Command("python -c \"print('12 of 13')\"", ("14 of 15", "safe"), needs_gpu=False)
    ]
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AssertionError, match="does not print \\['safe'\\]"):
        run(tutorial, folder)
