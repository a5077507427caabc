"""The committed terminal recording of the tutorial of a kernel of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.docs.terminal import COLUMNS, FOLDER, LIMIT_SECONDS, ROWS, Session
from tests.docs.tutorial import read

RECORDING = FOLDER / "first-kernel.cast"


def test_the_recording_has_the_commands_of_the_page_and_its_time() -> None:
    head, *events = (json.loads(line) for line in RECORDING.read_text("utf-8").splitlines())
    assert head == {"version": 2, "width": COLUMNS, "height": ROWS}
    times = [at for at, _, _ in events]
    assert times == sorted(times) and times[-1] <= LIMIT_SECONDS
    text = "".join(output for _, kind, output in events if kind == "o")
    shown = re.findall(r"^\$ (.*?)\r$", text, re.MULTILINE)
    commands = [command.line for command in read(FOLDER / "first-kernel.md").commands
                if not command.needs_gpu]  # fmt: skip
    assert [line for line in shown if line in commands] == commands
    assert shown[0].startswith("git clone") and "make venv" in shown
    assert not re.search(r"/(tmp|root|home|work)/", text)
    page = (FOLDER / "first-kernel.md").read_text("utf-8")
    stated = re.search(r"took ([\d.]+) minutes", page)
    assert stated is not None and float(stated[1]) == round(times[-1] / 60, 1)


def test_a_session_shows_no_path_of_the_machine(tmp_path: Path) -> None:
    session = Session(tmp_path, "/somewhere/clone")
    (tmp_path / "nostall").mkdir()
    session.run("pwd; echo /somewhere/clone; exit 3", "a command")
    text = "".join(output for _, _, output in session.events)
    assert text.splitlines() == ["$ a command", "~/nostall", "https://example.org/nostall.git"]
    assert session.failed == ["pwd; echo /somewhere/clone; exit 3"]
    session.write(tmp_path / "x.cast")
    lines = (tmp_path / "x.cast").read_text().splitlines()
    assert json.loads(lines[0])["version"] == 2
    assert [json.loads(line)[1] for line in lines[1:]] == ["o"] * (len(lines) - 1)
