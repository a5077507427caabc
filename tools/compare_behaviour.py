"""Compare what two commits compute: seeded modelled searches, plans and generated kernels.

    python -m tools.compare_behaviour OLD [NEW] [--only tune|plan|fuse|characterize]

OLD and NEW are commits; without NEW the working tree is compared. Each command below runs once in
each tree with the same inputs. What is compared:

- JSON and CSV, without times, dates, paths and sentences;
- cubins by their sections (instructions, metadata, symbols), without debug information, because it
  holds the path of the Triton source file, which differs between the two trees;
- other files byte by byte.

The exit code is 0 if nothing differs, else 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.sass.binary.elf import Elf
from tools import behaviour_functions

ROOT = Path(__file__).resolve().parents[1]
VOLATILE = {"command", "created", "date", "origin", "profile", "rules", "run", "seconds", "target"}
"""JSON keys and CSV columns that differ from run to run."""
DEBUG_SECTIONS = (".debug_", ".nv_debug_", ".rela.debug_", ".rela.nv_debug_")
"""Name prefixes of the ELF sections with debug information."""
PLANNING_SECONDS = "300"
"""Time limit of planning, high enough that only the number of evaluations ends a search. With the
default limit, the time that numba needs to compile the planners could change the plan."""
RUN_SECONDS = 600
"""Time limit of one command."""
PLANNERS = ("nostall", "dapple", "spp", "pipedream", "gpipe", "even", "data-parallel")
STRATEGIES = {"softmax": "anneal", "rmsnorm": "sip", "gemm_leakyrelu": "anneal"}
KERNELS = (
    "softmax", "rmsnorm", "gemm_leakyrelu", "batched_gemm", "fused_feedforward", "fused_attention",
    "flash_attention",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One command of nostall whose results are compared."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of the command; ``{out}`` stands for the output folder."""
    files: tuple[str, ...] = ()
    """Patterns of the files below the output folder that are compared."""
    is_json: bool = True
    """Whether the command prints JSON, which is then compared, too."""


def tune_cases(evaluations: int) -> Iterator[Case]:
    """Seeded searches on the SM model, for example kernels in Triton and cubins of nvcc."""
    files = ("best.cubin", "trials.csv")
    for kernel in KERNELS:
        yield Case(
            f"tune {kernel}",
            ("tune", f"examples/{kernel}.py:{kernel}", "--arch", "sm_90", "--seed", "7",
             "--strategy", STRATEGIES.get(kernel, "anneal"), "--evaluations", str(evaluations),
             "--out", "{out}", "--format", "json", "--quiet"),
            files,
        )  # fmt: skip
    for kernel in ("transpose", "dot_product"):
        yield Case(
            f"tune {kernel}.cubin",
            ("tune", f"examples/nvcc/{kernel}.sm_90.cubin", "--launch",
             f"examples/nvcc/{kernel}.toml", "--strategy", "random", "--seed", "3",
             "--evaluations", str(evaluations), "--out", "{out}", "--format", "json", "--quiet"),
            files,
        )  # fmt: skip


def plan_cases(inputs: Path) -> Iterator[Case]:
    """All planners on two clusters; writes the profile of the model to the folder ``inputs``."""
    profile = inputs / "model-pbs-4.txt"
    profile.write_text(pipeline_profile(24))
    for cluster in ("dapple-a-2x8", "uneven-8"):
        for planner in PLANNERS:
            search = ("--evaluations", "200", "--seed", "1") if planner == "nostall" else ()
            yield Case(
                f"plan {planner} on {cluster}",
                ("plan", str(profile), "--cluster", f"examples/clusters/{cluster}.toml",
                 "--planner", planner, *search, "--seconds", PLANNING_SECONDS, "--format", "json",
                 "--out", "{out}/plan.json", "--quiet"),
                ("plan.json",),
            )  # fmt: skip


def fuse_cases() -> Iterator[Case]:
    """Kernels of the functions in ``tools.behaviour_functions`` and of one example."""
    file = Path(behaviour_functions.__file__)
    names = [n.removesuffix("_inputs") for n in vars(behaviour_functions) if n.endswith("_inputs")]
    for name in names:
        backward = ("--backward",) if name.endswith("backward") else ()
        yield Case(
            f"fuse {name}",
            ("fuse", f"{file}:{name}", "--inputs", f"{name}_inputs", *backward, "--out", "{out}",
             "--format", "json", "--quiet"),
            ("kernels/*.py", "kernels/*.cubin"),
        )  # fmt: skip
    yield Case(
        "fuse layernorm_gelu",
        ("fuse", "examples/fusion/layernorm_gelu.py:layernorm_gelu", "--out", "{out}",
         "--format", "json", "--quiet"),
        ("kernels/*.py", "kernels/*.cubin"),
    )  # fmt: skip


def characterize_cases() -> Iterator[Case]:
    """The job model, and trace analysis of three recorded traces."""
    yield Case(
        "characterize jobs",
        ("characterize", "examples/workload/case_studies.csv", "--format", "json"),
    )
    for trace in ("resnet", "gpt", "bert"):
        file = ROOT / "tests" / "unit" / "workload" / "h200" / f"{trace}.json.gz"
        yield Case(f"characterize {trace}", ("characterize", str(file), "--format", "json"))


def pipeline_profile(layers: int) -> str:
    """A profile in PipeDream's format: a chain of layers with random costs from a fixed seed."""
    rng = random.Random(11)
    lines = [
        f"node{i} -- Layer{i} -- forward_compute_time={rng.uniform(1, 5):.3f}, "
        f"backward_compute_time={rng.uniform(2, 9):.3f}, "
        f"activation_size={rng.uniform(1e6, 9e6):.0f}, parameter_size={rng.uniform(1e6, 9e7):.0f}"
        for i in range(1, layers + 1)
    ]
    return "\n".join([*lines, *(f"\tnode{i} -- node{i + 1}" for i in range(1, layers))])


@contextmanager
def checkout(commit: str | None, folder: Path) -> Iterator[Path]:
    """A temporary git worktree of ``commit``, or the working tree if ``commit`` is None."""
    if commit is None:
        yield ROOT
        return
    tree = folder / f"tree-{commit[:12]}"
    subprocess.run(["git", "worktree", "add", "--detach", tree, commit], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def run(case: Case, tree: Path, out: Path) -> dict[str, Any]:
    """Run a case in one tree. Returns its results by name: JSON, tables, cubins, bytes."""
    out.mkdir(parents=True)
    arguments = [argument.replace("{out}", str(out / "run")) for argument in case.arguments]
    if any("{out}/" in argument for argument in case.arguments):
        (out / "run").mkdir()
    process = subprocess.run(
        [sys.executable, "-m", "nostall", *arguments],
        cwd=tree, capture_output=True, text=True, timeout=RUN_SECONDS,
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "NOSTALL_HOME": str(out / "home")},
    )  # fmt: skip
    if process.returncode:
        return {"exit code": process.returncode, "stderr": process.stderr[-400:]}
    results: dict[str, Any] = {"exit code": 0}
    if case.is_json:
        results["json"] = comparable(json.loads(process.stdout))
    for pattern in case.files:
        for file in sorted((out / "run").glob(pattern)):
            results[str(file.relative_to(out / "run"))] = contents(file)
    return results


def contents(file: Path) -> Any:
    """The comparable contents of a result file."""
    if file.suffix == ".csv":
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        return [{k: v for k, v in row.items() if k not in VOLATILE} for row in rows]
    if file.suffix == ".json":
        return comparable(json.loads(file.read_text()))
    if file.suffix == ".cubin":
        return cubin_sections(file.read_bytes())
    return file.read_bytes()


def cubin_sections(data: bytes) -> list[tuple[Any, ...]]:
    """Header flags, and name, type, flags and contents of each section except debug information."""
    elf = Elf.parse(data)
    return [
        (elf.os_abi, elf.abi_version, elf.flags),
        *(
            (section.name, section.type, section.flags, section.size, elf.content(section))
            for section in elf.sections
            if not section.name.startswith(DEBUG_SECTIONS)
        ),
    ]


def comparable(value: Any) -> Any:
    """A JSON value without volatile keys; texts with a space or a slash become ``"text"``."""
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if k not in VOLATILE}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if isinstance(value, str) and (" " in value or "/" in value):
        return "text"
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of the results that differ or that only one side has."""
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def cases(only: str | None, evaluations: int, inputs: Path) -> list[Case]:
    """The cases of one group, or of all groups if ``only`` is None."""
    groups = {
        "tune": lambda: tune_cases(evaluations),
        "plan": lambda: plan_cases(inputs),
        "fuse": fuse_cases,
        "characterize": characterize_cases,
    }
    return [case for name, make in groups.items() if only in (None, name) for case in make()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="commit to compare with")
    parser.add_argument("new", nargs="?", help="commit to check; default: the working tree")
    parser.add_argument(
        "--only", choices=("tune", "plan", "fuse", "characterize"), help="run one group of cases"
    )
    parser.add_argument(
        "--evaluations", type=int, default=300, help="evaluations of each `tune` search"
    )
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with checkout(options.old, folder) as old, checkout(options.new, folder) as new:
            for index, case in enumerate(cases(options.only, options.evaluations, folder)):
                results = [
                    run(case, tree, folder / f"{index}-{side}")
                    for side, tree in (("old", old), ("new", new))
                ]
                changed = differences(*results)
                failed += bool(changed)
                state = "same" if not changed else f"DIFFERS in {', '.join(changed)}"
                if results[0]["exit code"] or results[1]["exit code"]:
                    state = f"FAILED {[result.get('stderr', '') for result in results]}"
                    failed += not changed
                files = [name for name in results[0] if name not in ("exit code", "json")]
                print(f"{case.name:<36} {state} ({len(files)} files)", flush=True)
    print(f"{failed} of the cases differ or fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
