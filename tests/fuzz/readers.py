"""The table of all readers that are fuzzed through the command line.

A reader is one row: a generator of sound inputs, mutations, and the arguments of the command.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz import documents, kernel_documents, plan_documents
from tests.fuzz.command_line import Mutant, Reader
from tests.fuzz.container_mutants import BUNDLE_MUTATIONS, POLICY_MUTATIONS
from tests.fuzz.file_mutants import BINARY_MUTATIONS, TEXT_MUTATIONS
from tests.fuzz.kernel_documents import CUBIN, KERNEL, LAUNCH
from tests.fuzz.plan_documents import CLUSTER, PROFILE

_FORMATS = ((), ("--format", "json"))
_POLICIES = ("gpipe", "pa", "pb", "1f1b", "interleaved", "list", "zero-bubble")
_OUTPUTS = ((), (), ("--format", "json"), ("--format", "json"), ("--report", "page.html"))


def _characterize(mutant: Mutant, rng: random.Random) -> list[str]:
    """A trace or a table, with any output and often with hardware and questions."""
    questions = ("memory=x2", "ethernet=100Gb/s", "to=pearl", "nodes=4,gradients=90MB", "nvlink=x3")
    options = list(rng.choice(_OUTPUTS))
    if rng.random() < 0.4:
        options += ["--hardware", "h200-dgx", "--what-if", rng.choice(questions)]
    others = [name for name in mutant.companions if name == "rank1.json"]
    return ["characterize", mutant.name, *others, *options]


def _hardware(mutant: Mutant, rng: random.Random) -> list[str]:
    return ["characterize", "jobs.csv", "--hardware", mutant.name, *rng.choice(_OUTPUTS)]


def _plan(mutant: Mutant, rng: random.Random) -> list[str]:
    """A plan for ``simulate``, or for ``launch``, which refuses it because its module is absent."""
    if rng.random() < 0.1:
        return ["launch", mutant.name, "--device", "cpu", "--steps", "1"]
    outputs = ("--out", "new.json"), ("--gantt", "gantt.svg"), ("--torchtitan", "titan")
    return ["simulate", mutant.name, *_order(rng), *rng.choice((*_FORMATS, *outputs))]


def _order(rng: random.Random) -> list[str]:
    return ["--policy", rng.choice(_POLICIES)] if rng.random() < 0.5 else []


def _planning(profile: str, cluster: str, rng: random.Random) -> list[str]:
    planner = rng.choice(("nostall", "dapple", "spp", "pipedream", "gpipe", "even", "exhaustive"))
    batch = ["--global-batch", str(rng.choice((1, 8, 96))), "--seconds", str(rng.choice((1, 3)))]
    return [
        *("plan", profile, "--cluster", cluster, "--planner", planner, *batch),
        *rng.choice((*_FORMATS, ("--out", "plan.json"))),
    ]


def _profile(mutant: Mutant, rng: random.Random) -> list[str]:
    return _planning(mutant.name, CLUSTER, rng)


def _cluster(mutant: Mutant, rng: random.Random) -> list[str]:
    memory = ["--gpu-memory", "80"] if mutant.name.endswith(".txt") else []
    return [*_planning(PROFILE, mutant.name, rng), *memory]


def _launch(mutant: Mutant, rng: random.Random) -> list[str]:
    """A launch file for ``inspect``, which checks it, and sometimes for a short search."""
    kernel = Path(mutant.name).stem
    if rng.random() < 0.03:
        search = ("--objective", "model", "--evaluations", "1", "--seconds", "5", "--quiet")
        return ["tune", CUBIN, "--kernel", kernel, "--launch", mutant.name, *search, "--out", "run"]
    return ["inspect", CUBIN, "--kernel", kernel, "--launch", mutant.name, *rng.choice(_FORMATS)]


def _policy(mutant: Mutant, rng: random.Random) -> list[str]:
    return [
        *("tune", CUBIN, "--kernel", KERNEL, "--launch", LAUNCH, "--objective", "model"),
        *("--strategy", "ppo", "--policy", mutant.name, "--evaluations", "1", "--out", "run"),
        *rng.choice(_FORMATS),
    ]


def _bundle(mutant: Mutant, rng: random.Random) -> list[str]:
    return ["store", "import", mutant.name, *rng.choice(_FORMATS)]


def _fatbin(mutant: Mutant, rng: random.Random) -> list[str]:
    arch = ["--arch", rng.choice(("sm_80", "sm_90"))] if rng.random() < 0.8 else []
    kernel = ["--kernel", rng.choice(("spin_lock", "_Z3addPf"))] if rng.random() < 0.7 else []
    return ["inspect", mutant.name, *arch, *kernel, *rng.choice(_FORMATS)]


_TABLES = ("nostall.cli.characterizing.characterize", "nostall.report.workload", "pyarrow.parquet")
_PLANS = (
    "nostall.cli.planning.plan",
    "nostall.cli.planning.simulate",
    "nostall.cli.planning.launch",
)
_KERNELS = ("nostall.cli.inspect", "nostall.cli.tuning.tune")
_POLICY = (*_KERNELS, "nostall.papers.game.ppo.search")
_STORE = ("nostall.cli.store",)
READERS = {
    reader.name: reader
    for reader in (
        Reader("trace", documents.traces, TEXT_MUTATIONS, _characterize, _TABLES),
        Reader("chakra", documents.chakra, BINARY_MUTATIONS, _characterize, _TABLES),
        Reader("csv", documents.csv_tables, TEXT_MUTATIONS, _characterize, _TABLES),
        Reader("parquet", documents.parquet_tables, BINARY_MUTATIONS, _characterize, _TABLES),
        Reader("hardware", documents.hardware_files, TEXT_MUTATIONS, _hardware, _TABLES),
        Reader("plan", plan_documents.plans, TEXT_MUTATIONS, _plan, _PLANS),
        Reader("profile", plan_documents.profiles, TEXT_MUTATIONS, _profile, _PLANS, compiles=True),
        Reader("cluster", plan_documents.clusters, TEXT_MUTATIONS, _cluster, _PLANS, compiles=True),
        Reader(
            "launch",
            kernel_documents.launch_files,
            TEXT_MUTATIONS,
            _launch,
            _KERNELS,
            compiles=True,
        ),
        Reader(
            "policy", kernel_documents.policies, POLICY_MUTATIONS, _policy, _POLICY, compiles=True
        ),
        Reader("bundle", kernel_documents.bundles, BUNDLE_MUTATIONS, _bundle, _STORE),
        Reader("fatbin", kernel_documents.fatbins, BINARY_MUTATIONS, _fatbin, _KERNELS),
    )
}
