"""Packages that a command loads before it runs: its help needs no more than these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import nostall
from nostall.cli.verbs import VERBS

PACKAGE = Path(nostall.__file__).parent

KERNEL = {"gpu", "ptx.assemble", "ptx.program", "sass.binary", "tuning"}
"""Packages that read the kernels of a command's arguments."""
MAY_LOAD = {
    "fuse": KERNEL,
    "characterize": {"workload"},
    "tune": KERNEL | {"papers", "ptx.schedule", "sass.model", "search", "store"},
    "bench": KERNEL,
    "verify": KERNEL,
    "inspect": KERNEL,
    "init": KERNEL,
    "regress": KERNEL | {"papers", "search"},
    "record": {"attach", "tuning"},
    "train": KERNEL | {"papers", "search"},
    "serving": KERNEL | {"attach", "attach.rollouts", "papers", "search", "serving"},
    "plan": {"parallel", "report", "report.plan", "workload"},
    "simulate": {"parallel", "report", "report.plan"},
    "launch": {"parallel", "report"},
    "optimize": {"attach", "attach.program", "optimizing", "report"},
    "apply": {"attach", "sass.binary", "store"},
    "store": KERNEL | {"store"},
    "report": set[str](),
    "runs": KERNEL | {"papers", "report", "search"},
    "doctor": {"gpu", "ptx.assemble", "sass.binary", "store"},
}
"""Command -> packages of nostall beside ``cli`` and ``core``, and slow packages of others."""
SPLIT = {"attach", "ptx", "report", "sass"}
"""Packages of which a command may load parts."""
SLOW = {"networkx", "numba", "torch"}
LOAD = """
import json, os, sys
import msgspec, numpy, pydantic
from nostall.cli.verbs import VERBS, load_command

for name in VERBS:
    if not os.fork():
        load_command(name)
        print(json.dumps([name, list(sys.modules)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def package_of(module: str) -> str | None:
    """The package of a module as the table names it; None if the table does not name it."""
    first, *parts = module.split(".")
    if first in SLOW:
        return first
    if first != "nostall" or not parts or parts[0] in ("cli", "core"):
        return None
    if parts[0] in SPLIT and len(parts) > 1 and (PACKAGE / parts[0] / parts[1]).is_dir():
        return ".".join(parts[:2])
    return None if parts[0] in ("ptx", "sass") else parts[0]  # their own modules are small


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The packages that each command loads, each in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", LOAD], capture_output=True, text=True, check=True, timeout=300
    )
    modules = dict(map(json.loads, ran.stdout.splitlines()))
    return {
        name: {package for module in names if (package := package_of(module))}
        for name, names in modules.items()
    }


def test_the_table_has_every_command() -> None:
    assert MAY_LOAD.keys() == VERBS.keys()


@pytest.mark.parametrize("name", VERBS)
def test_a_command_loads_only_its_packages(name: str, loaded: dict[str, set[str]]) -> None:
    unexpected = loaded[name] - MAY_LOAD[name]
    assert not unexpected, f"import {', '.join(sorted(unexpected))} where {name} uses it"


def test_the_table_names_no_package_that_no_command_loads(loaded: dict[str, set[str]]) -> None:
    unused = {name: MAY_LOAD[name] - loaded[name] for name in VERBS}
    assert not {name: packages for name, packages in unused.items() if packages}
