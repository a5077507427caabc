"""The table of all readers that are fuzzed through the command line.

A reader is one row: a generator of sound inputs, mutations, and the arguments of the command.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz import documents, kernel_documents, plan_documents
from tests.fuzz.command_line import Reader
from tests.fuzz.container_mutants import BUNDLE_MUTATIONS, POLICY_MUTATIONS
from tests.fuzz.file_mutants import BINARY_MUTATIONS, TEXT_MUTATIONS
from tests.fuzz.kernel_documents import CUBIN, KERNEL, LAUNCH
from tests.fuzz.plan_documents import CLUSTER, PROFILE

_FORMATS = ((), ("--format", "json"))
_POLICIES = ("gpipe", "pa", "pb", "1f1b", "interleaved", "list", "zero-bubble")
_OUTPUTS = ((), (), ("--format", "json"), ("--format", "json"), ("--report", "page.html"))


def _characterize(path: Path, rng: random.Random) -> list[str]:
    """A trace or a table, with any output and often with hardware and questions."""
    questions = ("memory=x2", "ethernet=100Gb/s", "to=pearl", "nodes=4,gradients=90MB", "nvlink=x3")
    options = list(rng.choice(_OUTPUTS))
    if rng.random() < 0.4:
        options += ["--hardware", "h200-dgx", "--what-if", rng.choice(questions)]
    others = sorted(p.name for p in path.parent.glob("rank1.json") if path.name == "rank0.json")
    return ["characterize", path.name, *others, *options]


def _hardware(path: Path, rng: random.Random) -> list[str]:
    return ["characterize", "jobs.csv", "--hardware", path.name, *rng.choice(_OUTPUTS)]


def _plan(path: Path, rng: random.Random) -> list[str]:
    """A plan for ``simulate``, or for ``launch``, which refuses it because its module is absent."""
    if rng.random() < 0.1:
        return ["launch", path.name, "--device", "cpu", "--steps", "1"]
    outputs = ("--out", "new.json"), ("--gantt", "gantt.svg"), ("--torchtitan", "titan")
    return ["simulate", path.name, *_order(rng), *rng.choice((*_FORMATS, *outputs))]


def _order(rng: random.Random) -> list[str]:
    return ["--policy", rng.choice(_POLICIES)] if rng.random() < 0.5 else []


def _planning(profile: str, cluster: str, rng: random.Random) -> list[str]:
    planner = rng.choice(("nostall", "dapple", "spp", "pipedream", "gpipe", "even", "exhaustive"))
    batch = ["--global-batch", str(rng.choice((1, 8, 96))), "--seconds", str(rng.choice((1, 3)))]
    return [
        *("plan", profile, "--cluster", cluster, "--planner", planner, *batch),
        *rng.choice((*_FORMATS, ("--out", "plan.json"))),
    ]


def _profile(path: Path, rng: random.Random) -> list[str]:
    return _planning(path.name, CLUSTER, rng)


def _cluster(path: Path, rng: random.Random) -> list[str]:
    memory = ["--gpu-memory", "80"] if path.suffix == ".txt" else []
    return [*_planning(PROFILE, path.name, rng), *memory]


def _launch(path: Path, rng: random.Random) -> list[str]:
    """A launch file for ``inspect``, which checks it, and sometimes for a short search."""
    kernel = path.stem
    if rng.random() < 0.03:
        search = ("--objective", "model", "--evaluations", "1", "--seconds", "5", "--quiet")
        return ["tune", CUBIN, "--kernel", kernel, "--launch", path.name, *search, "--out", "run"]
    return ["inspect", CUBIN, "--kernel", kernel, "--launch", path.name, *rng.choice(_FORMATS)]


def _policy(path: Path, rng: random.Random) -> list[str]:
    return [
        *("tune", CUBIN, "--kernel", KERNEL, "--launch", LAUNCH, "--objective", "model"),
        *("--strategy", "ppo", "--policy", path.name, "--evaluations", "1", "--out", "run"),
        *rng.choice(_FORMATS),
    ]


def _bundle(path: Path, rng: random.Random) -> list[str]:
    return ["store", "import", path.name, *rng.choice(_FORMATS)]


def _fatbin(path: Path, rng: random.Random) -> list[str]:
    arch = ["--arch", rng.choice(("sm_80", "sm_90"))] if rng.random() < 0.8 else []
    kernel = ["--kernel", rng.choice(("spin_lock", "_Z3addPf"))] if rng.random() < 0.7 else []
    return ["inspect", path.name, *arch, *kernel, *rng.choice(_FORMATS)]


READERS = {
    reader.name: reader
    for reader in (
        Reader("trace", documents.traces, TEXT_MUTATIONS, _characterize),
        Reader("chakra", documents.chakra, BINARY_MUTATIONS, _characterize),
        Reader("csv", documents.csv_tables, TEXT_MUTATIONS, _characterize),
        Reader("parquet", documents.parquet_tables, BINARY_MUTATIONS, _characterize),
        Reader("hardware", documents.hardware_files, TEXT_MUTATIONS, _hardware),
        Reader("plan", plan_documents.plans, TEXT_MUTATIONS, _plan),
        Reader("profile", plan_documents.profiles, TEXT_MUTATIONS, _profile),
        Reader("cluster", plan_documents.clusters, TEXT_MUTATIONS, _cluster),
        Reader("launch", kernel_documents.launch_files, TEXT_MUTATIONS, _launch),
        Reader("policy", kernel_documents.policies, POLICY_MUTATIONS, _policy),
        Reader("bundle", kernel_documents.bundles, BUNDLE_MUTATIONS, _bundle),
        Reader("fatbin", kernel_documents.fatbins, BINARY_MUTATIONS, _fatbin),
    )
}
