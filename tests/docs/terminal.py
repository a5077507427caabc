"""Record a terminal session of a tutorial, from the clone to the last command without a GPU.

    python -m tests.docs.terminal [PAGE] [--clone REPOSITORY] [--out FILE]

Clones the repository into an empty folder, runs ``make venv``, writes the files of the page and
runs its commands that need no GPU, each in a terminal of 100 x 30 cells. Writes an asciinema
recording (version 2); play it with ``asciinema play FILE``. Paths of the machine are replaced. The
exit code is 1 if a command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from tests.docs.tutorial import ROOT, Tutorial, read

FOLDER = ROOT / "docs" / "tutorials"
COLUMNS, ROWS = 100, 30
LIMIT_SECONDS = 600
"""Time limit of the whole session."""
URL = "https://example.org/nostall.git"
"""Shown in the place of the cloned repository's address."""


@dataclass
class Session:
    """A terminal session: what was printed, and when."""

    folder: Path
    clone: str
    started: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    """(seconds since the start, "o" for output, text), as in the file."""
    failed: list[str] = field(default_factory=list[str])

    def show(self, text: str) -> None:
        """Add output, without paths of this machine."""
        for path, name in ((self.clone, URL), (str(self.folder), "~"), (str(Path.home()), "~")):
            text = text.replace(path, name)
        self.events.append((round(time.monotonic() - self.started, 3), "o", text))

    def run(self, line: str, shown: str | None = None, cwd: Path | None = None) -> None:
        """Run a command line of the shell and record what it prints."""
        self.show(f"$ {shown or line}\r\n")
        repository = self.folder / "nostall"
        program = repository / ".venv" / "bin"
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("NOSTALL", "PYTHON"))},
            "PATH": f"{program}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            "TERM": "xterm-256color",
            "NOSTALL_HOME": str(self.folder / "store"),
        }
        controller, terminal = pty.openpty()
        ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        process = subprocess.Popen(
            ["bash", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            cwd=cwd or repository,
            env=environment,
        )
        os.close(terminal)
        for text in _lines(controller):
            self.show(text)
        os.close(controller)
        if process.wait():
            self.failed.append(line)

    def write(self, path: Path) -> None:
        """Write the asciinema file."""
        head = {"version": 2, "width": COLUMNS, "height": ROWS}
        lines = [json.dumps(head), *(json.dumps(event) for event in self.events)]
        path.write_text("\n".join(lines) + "\n", "utf-8")


def _lines(controller: int) -> Iterator[str]:
    """What a terminal prints, in whole lines where they come in time."""
    rest = b""
    while True:
        ready, _, _ = select.select([controller], [], [], 0.5)
        try:
            data = os.read(controller, 65536) if ready else b""
        except OSError:  # the program has ended
            data, ready = b"", [controller]
        rest += data
        if ready and not data:
            break
        end = rest.rfind(b"\n") + 1
        if end:
            yield rest[:end].decode(errors="replace")
            rest = rest[end:]
    if rest:
        yield rest.decode(errors="replace")


def record(tutorial: Tutorial, clone: str, folder: Path) -> Session:
    """Clone, set up, and run the commands of a page that need no GPU."""
    session = Session(folder, clone)
    repository = folder / "nostall"
    session.run(f"git clone -q {shlex.quote(clone)} nostall", f"git clone -q {URL}", folder)
    session.show("$ cd nostall\r\n")
    session.run("make venv")
    session.show("$ . .venv/bin/activate\r\n")
    for step in tutorial.steps:
        if isinstance(step, tuple):
            name, text = step
            (repository / name).write_text(text)
            session.run(f"wc -l {shlex.quote(name)}", f"wc -l {name}  # the file of the page")
        elif not step.needs_gpu:
            session.run(step.line)
    return session


def main() -> int:
    """Record a page; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("page", nargs="?", default="first-kernel")
    options.add_argument("--clone", default=str(ROOT), metavar="REPOSITORY")
    options.add_argument("--out", type=Path, metavar="FILE")
    arguments = options.parse_args()
    out = arguments.out or FOLDER / f"{arguments.page}.cast"
    tutorial = read(FOLDER / f"{arguments.page}.md")
    with tempfile.TemporaryDirectory() as folder:
        session = record(tutorial, arguments.clone, Path(folder))
    session.write(out)
    seconds = session.events[-1][0]
    print(f"{seconds:.0f} s; wrote {out}")
    for line in session.failed:
        print(f"FAILED: {line}")
    return 1 if session.failed or seconds > LIMIT_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
