"""Record the GPU commands of the tutorials on a machine with a GPU.

    python -m tests.docs.record [--out FOLDER] [--limit SECONDS] [PAGE ...]

Runs all commands of each page that has GPU commands, in a folder of its own, and writes
FOLDER/PAGE.json (default: ``tests/docs/recorded``). Each command has a time limit. Prints a line
for each command; the exit code is 1 if a command failed or did not print what the page shows. A
page whose commands failed is written to FOLDER/PAGE.failed.json, which the tests do not read.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.docs import recording
from tests.docs.recording import GpuCommand, PageRecording
from tests.docs.tutorial import (
    ROOT,
    Command,
    Tutorial,
    execute,
    missing_lines,
    prepare,
    read,
    with_any_triton,
)

PACKAGES = ("nostall", "torch", "triton", "numpy")
LIMIT_SECONDS = 300.0


def main() -> int:
    """Record the pages; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("pages", nargs="*", help="page names; default: all with GPU commands")
    options.add_argument("--out", type=Path, default=recording.FOLDER, metavar="FOLDER")
    options.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS")
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pages = sorted((ROOT / "docs" / "tutorials").glob("first-*.md"))
    tutorials = [
        read(page) for page in pages if page.stem in arguments.pages or not arguments.pages
    ]
    machine = describe_machine()
    print(f"GPU: {machine['gpu']}")
    failures = 0
    for tutorial in tutorials:
        if tutorial.gpu_commands:
            failures += record_page(tutorial, machine, arguments.out, arguments.limit)
    print("all recorded" if not failures else f"{failures} commands failed")
    return 1 if failures else 0


def record_page(tutorial: Tutorial, machine: dict[str, str], out: Path, limit: float) -> int:
    """Run all commands of a page and write its recording; returns the number of failures."""
    commands: list[GpuCommand] = []
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for step in map(with_any_triton, tutorial.steps):
            if isinstance(step, tuple):
                (folder / step[0]).write_text(step[1])
                continue
            result = run_command(step, folder, limit)
            problem = find_problem(step, result)
            failures += bool(problem)
            if step.needs_gpu:
                commands.append(result)
            print_row(tutorial.name, step, result, problem)
    record = PageRecording(
        page=tutorial.name,
        date=date.today().isoformat(),
        machine=machine,
        files=recording.file_hashes(tutorial.files),
        rules=recording.rules_hash(),
        commands=tuple(commands),
    )
    path = out / f"{tutorial.name}{'.failed' if failures else ''}.json"
    path.write_text(record.model_dump_json(), "utf-8")
    print(f"wrote {path}")
    return failures


def run_command(command: Command, folder: Path, limit: float) -> GpuCommand:
    """Run one command, with a recording device if the tests replay it."""
    devices = folder / "recorded-devices.json"
    devices.unlink(missing_ok=True)
    launcher = (
        ["-m", "tests.docs.replayed", "record", str(devices)] if command.is_replayed else None
    )
    start = time.monotonic()
    try:
        done = execute(command.line, folder, launcher, limit)
        returncode, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        output = str(error.output or "") + str(error.stderr or "")
        returncode = 124
    except OSError as error:
        returncode, output = 127, str(error)
    seconds = round(time.monotonic() - start, 1)
    recorded = None
    if devices.exists():
        recorded = GpuCommand.model_validate_json(devices.read_text("utf-8"))
    return GpuCommand(
        line=command.line,
        returncode=returncode,
        seconds=seconds,
        output=output.replace(str(folder), "."),
        devices=recorded.devices if recorded else (),
    )


def find_problem(command: Command, result: GpuCommand) -> str:
    """Why the command failed; empty if it did not."""
    if result.returncode == 124:
        return "time limit"
    if result.returncode:
        return f"exit code {result.returncode}"
    missing = missing_lines(command, result.output)
    return f"does not print {missing}" if missing else ""


def print_row(page: str, command: Command, result: GpuCommand, problem: str) -> None:
    kind = "GPU" if command.needs_gpu else "CPU"
    calls = sum(len(device.outcomes) for device in result.devices)
    print(
        f"{page:20} {kind} {result.seconds:6.1f} s {calls:5} measured  {command.line}", flush=True
    )
    if problem:
        print(f"  FAILED: {problem}\n{result.output[-3000:]}", flush=True)


def describe_machine() -> dict[str, str]:
    """GPU, driver and versions of packages."""
    machine = {"python": sys.version.split()[0], "gpu": "none found"}
    for package in PACKAGES:
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            machine[package] = "missing"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        machine["gpu"] = done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        pass  # recorded as "none found"
    return machine


if __name__ == "__main__":
    sys.exit(main())
