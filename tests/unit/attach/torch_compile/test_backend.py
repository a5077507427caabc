"""``torch.compile(backend="nostall")`` in processes of its own; kernels run in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
GROUP = "torch_dynamo_backends"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of the processes of ``backend_programs``, which begin with empty caches.

    The entry point is declared by a package with the lines of pyproject.toml.
    """
    folder = tmp_path_factory.mktemp("machine")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = folder / "packages" / "declared-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in declared[GROUP].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    module = "tests.unit.attach.torch_compile.backend_programs"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(folder)],
        cwd=ROOT,
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",
            "NOSTALL_HOME": str(folder / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            # Checking a C++ compiler takes seconds; Inductor's compile processes are not needed.
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder / "packages")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def cold(processes: Any) -> Any:
    return processes["cold"]


@pytest.mark.parametrize("model", ["wide", "narrow"])
def test_inductor_calls_stitched_kernels_directly_and_gradients_are_right(
    cold: Any, model: str
) -> None:
    found = cold["entry point"][model]
    assert len(found["kernels"]) >= (3 if model == "wide" else 1)
    assert found["difference"] < 1e-4
    assert found["hits"] == 0
    assert found["direct calls"] >= len(found["kernels"])
    assert found["operator calls"] == 0


@pytest.mark.parametrize("machine", ["", " elsewhere"])
@pytest.mark.parametrize("model", ["wide", "narrow"])
def test_another_process_takes_compiled_graphs_from_pytorchs_cache(
    processes: Any, model: str, machine: str
) -> None:
    """Independent of the order in which the models are compiled in either process."""
    cold, warm = (processes[f"{name}{machine}"]["entry point"][model] for name in ("cold", "warm"))
    reference = processes["cold"]["entry point"][model]
    assert cold["hits"] == 0 and warm["hits"] >= 1
    assert warm["kernels"] == cold["kernels"] == reference["kernels"]
    assert warm["digest"] == cold["digest"] == reference["digest"]


def test_both_versions_save_tensors_of_equal_layouts_for_the_backward_pass(cold: Any) -> None:
    assert len(cold["saved"]["stitched"]) >= 3
    assert cold["saved"]["stitched"] == cold["saved"]["plain"]


def test_models_of_different_widths_share_no_kernels(cold: Any) -> None:
    wide, narrow = (set(cold["entry point"][model]["kernels"]) for model in ("wide", "narrow"))
    assert not wide & narrow


def test_a_faster_candidate_is_built_in_the_background_and_replaces_the_baseline(
    cold: Any,
) -> None:
    first = cold["tuning"]["first"]
    before = first["states"].index("stitched")
    assert before >= 1
    assert set(first["states"][:before]) <= {"inductor", "compiling"}
    assert first["states"][before:] == ["stitched", "stitched"]
    assert first["called"] == [False] * before + [True, True]
    assert first["difference"] < 1e-4
    assert first["ratio"] == 2.0
    assert not first["from store"]
    activities = [
        "background",
        "baseline",
        "candidate",
        "graph_comparison",
        "kernel_comparison",
        "plan_tuning",
        "products",
    ]
    assert first["seconds"] == activities


def test_tuned_plans_are_measured_first_and_the_candidate_uses_them(cold: Any) -> None:
    found = cold["tuning"]
    assert found["first"]["asked"] >= 2
    assert set(found["winners"]) == {1}
    assert set(found["first"]["plans"]) & set(found["fastest plans"])
    assert found["again"]["asked"] == found["first"]["asked"]
    assert found["again"]["plans"] == found["first"]["plans"]


def test_plans_of_short_kernels_are_not_tuned(cold: Any) -> None:
    found = cold["tuning"]
    assert found["short"]["states"][-1] == "stitched"
    # The kernels that are still tuned have two launches.
    assert found["short tunings"] < len(found["winners"])
    assert 0 < found["short"]["asked"] < found["first"]["asked"]


def test_the_next_run_starts_with_the_stored_selection(cold: Any) -> None:
    again = cold["tuning"]["again"]
    assert again["from store"]
    assert again["states"] == ["stitched", "stitched"]
    assert again["called"] == [True, True]
    assert again["difference"] < 1e-4
    assert again["ratio"] == 2.0
    assert again["seconds"] == ["candidate"]


def test_kernels_that_are_not_faster_than_inductors_stay_with_inductor(cold: Any) -> None:
    found = cold["comparisons"]
    all_faster, some_faster = found["all, first"], found["some, first"]
    assert (all_faster["kept in inductor"], some_faster["kept in inductor"]) == (0, 1)
    assert all_faster["asked"] == some_faster["asked"] >= 3
    assert set(some_faster["kernels"]) < set(all_faster["kernels"])
    assert len(all_faster["kernels"]) - len(some_faster["kernels"]) == 1
    assert max(run["difference"] for run in found.values()) < 1e-4


def test_if_no_kernel_is_faster_the_whole_graph_decides(cold: Any) -> None:
    equal, all_faster = cold["comparisons"]["equal, first"], cold["comparisons"]["all, first"]
    assert equal["reason"] == "faster as a whole" and equal["kept in inductor"] == 0
    assert equal["kernels"] == all_faster["kernels"]


def test_if_all_kernels_are_slower_no_candidate_is_compiled(cold: Any) -> None:
    none = cold["comparisons"]["none, first"]
    assert none["reason"] == "every kernel is slower than what Inductor makes of the same operators"
    assert set(none["states"]) == {"inductor", "compiling"}
    assert not any(none["called"])
    assert "stitched" not in none["seconds"]


@pytest.mark.parametrize("case", ["all", "some", "equal", "none"])
def test_the_next_run_uses_the_same_kernels_without_comparing_them(cold: Any, case: str) -> None:
    first, again = (cold["comparisons"][f"{case}, {run}"] for run in ("first", "again"))
    assert again["from store"]
    assert again["asked"] == first["asked"]
    assert again["kernels"] == first["kernels"]
    assert again["kept in inductor"] == first["kept in inductor"]


def test_workers_compile_and_the_users_process_takes_the_result_from_the_cache(cold: Any) -> None:
    found = cold["workers"]["workers"]
    assert found["states"][-1] == "stitched" and found["kept in inductor"] == 0
    # The forward pass, the backward pass, and each kernel's baseline.
    assert found["graph hits"] >= 3
    own_activities = {
        "background",
        "baseline",
        "candidate",
        "graph_comparison",
        "kernel_comparison",
        "products",
    }
    assert set(found["seconds"]) == own_activities | {
        "graph_compilation",
        "kernel_compilation",
        "codegen",
    }
    assert not found["local only"]
    assert found["started"][0], "workers import their modules while Inductor compiles"
    assert cold["workers"]["jobs"][:2] == ["CodegenJob: ", "CompileStatusJob: "]
    # Several workers share the baselines.
    first, others = (cold["workers"]["failures"][name] for name in ("first", "others"))
    assert first and others and {*first, *others} == {""}
    assert not cold["workers"]["running"]


def test_a_run_with_pytorchs_code_and_an_empty_store_measures_the_same_kernels(cold: Any) -> None:
    """Inductor runs no pass for code from its cache, so a worker finds the graphs."""
    first, found = cold["workers"]["workers"], cold["workers"]["new store"]
    assert not found["from store"]
    assert found["autograd hits"] >= 1 or found["graph hits"] >= 1
    assert {"kernel_comparison", "graph_comparison", "graph_compilation", "codegen"} <= set(
        found["seconds"]
    )
    assert found["asked"] == first["asked"]
    assert (found["plans"], found["kernels"]) == (first["plans"], first["kernels"])
    assert found["states"][-1] == "stitched" and not found["local only"]
    assert found["difference"] < 1e-4


def test_if_no_worker_compiles_the_users_process_does(cold: Any) -> None:
    found, with_workers = cold["workers"]["alone"], cold["workers"]["workers"]
    assert found["graph hits"] == 0
    assert not found["started"][0], "with few CPUs no worker starts during the first step"
    assert "compiled by the user's process: no luck" in found["explained"]
    assert found["states"][-1] == "stitched"
    assert (found["kernels"], found["digest"]) == (with_workers["kernels"], with_workers["digest"])
    assert max(found["difference"], with_workers["difference"]) < 1e-4


def test_if_a_worker_died_while_it_compiled_the_users_process_does_not_try(cold: Any) -> None:
    found = cold["workers"]["died"]
    assert found["states"][-1] == "inductor"
    assert found["reason"] == (
        "not stitched: WorkerDied: kernels could not be compiled by another process"
    )


@pytest.mark.parametrize("case", ["workers", "alone"])
def test_the_next_run_finds_the_whole_candidate_in_autograds_cache(cold: Any, case: str) -> None:
    """Nothing is traced again; with workers the user's process never traces the candidate."""
    first, again = cold["workers"][case], cold["workers"][f"{case}, again"]
    assert first["autograd hits"] == (case == "workers")
    assert again["from store"] and again["autograd hits"] == 1
    assert (again["kernels"], again["digest"]) == (first["kernels"], first["digest"])


MIN_KERNELS = {
    "breaks": 2,
    "in_place": 1,
    "complex_numbers": 1,
    "data_dependent": 0,
    "batch_norm": 1,
}
REASONS = {
    "complex_numbers": "dtype complex64",
    "data_dependent": "scan: each result depends on the one before",
}


@pytest.mark.parametrize("program", MIN_KERNELS)
def test_an_unusual_program_returns_the_same_results(cold: Any, program: str) -> None:
    found = cold["unusual"][program]
    assert found["difference"] < 1e-5
    assert found["strides"][0] == found["strides"][1]
    assert found["kernels"] >= MIN_KERNELS[program]
    if program in REASONS:
        assert any(REASONS[program] in why for why in found["not fused"])
    assert found["graphs"] == (2 if program == "breaks" else found["graphs"])


def test_one_compilation_is_right_for_every_batch_size(cold: Any) -> None:
    found = cold["dynamic"]["inductor"]
    assert found["compiled"] == 1
    assert found["difference"] < 1e-4
    assert found["states"] == ["stitched"] * 4
    assert found["called"] == [2] * 4


def test_a_graph_of_a_dynamic_batch_size_is_compared_and_its_size_limited(cold: Any) -> None:
    found = cold["dynamic"]["eager"]
    assert found["difference"] < 1e-4
    # The second call is the first that can run the candidate; the last one compiles again.
    assert found["states"] == ["inductor", "stitched", "stitched", "stitched", "inductor"]
    assert found["compiled"] == 2
    first, *selected, last = found["called"]
    assert (first, last) == (0, 0)
    assert min(selected) >= 3


def test_a_graph_of_a_dynamic_batch_size_is_prepared_in_the_background(cold: Any) -> None:
    found = cold["dynamic"]["background"]
    first, *waiting, selected, at_16, at_17 = found["states"]
    assert (first, selected, at_16, at_17) == ("inductor", "stitched", "stitched", "inductor")
    assert set(waiting) <= {"compiling"}
    assert found["compiled"] == 2
    assert found["difference"] < 1e-4


def test_the_next_run_of_a_dynamic_batch_size_starts_with_the_selection(cold: Any) -> None:
    found = cold["dynamic"]["again"]
    assert found["states"] == ["stitched", "stitched", "stitched", "inductor"]
    assert found["compiled"] == 2
    assert found["difference"] < 1e-4


def test_a_graph_of_two_dynamic_sizes_has_kernels_for_all_sizes(cold: Any) -> None:
    found = cold["dynamic"]["two"]
    assert found["difference"] < 1e-6
    assert found["kernels"] == [1, 1, 1]
    assert found["graphs"] == 1


def test_ranks_with_own_stores_run_the_kernels_of_rank_0(processes: Any) -> None:
    leader, follower = (processes["ranks"][f"rank {rank}"]["alone"] for rank in range(2))
    assert leader["asked"] > 1, "rank 0 tunes plans"
    assert follower["asked"] == 0
    assert [found["states"][-1] for found in (leader, follower)] == ["stitched"] * 2
    assert (leader["reason"], follower["reason"]) == ("faster as a whole", "rank 0 has chosen")
    assert leader["kernels"] == follower["kernels"]
    assert leader["plans"] == follower["plans"]
    assert leader["digest"] == follower["digest"]
    assert max(leader["difference"], follower["difference"]) < 1e-5


def test_graphs_that_ddp_splits_are_stitched_on_all_ranks(processes: Any) -> None:
    leader, follower = (processes["ranks"][f"rank {rank}"]["ddp"] for rank in range(2))
    count = len(leader["graphs"])
    assert count >= 2
    assert leader["graphs"] == [["stitched", "faster as a whole"]] * count
    assert follower["graphs"] == [["stitched", "rank 0 has chosen"]] * count
    assert len(leader["kernels"]) >= 3 and leader["kernels"] == follower["kernels"]
    assert max(leader["difference"], follower["difference"]) < 1e-4
