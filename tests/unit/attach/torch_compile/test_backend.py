"""``torch.compile(backend="nostall")`` in other processes, kernels in Triton's interpreter."""

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

ROOT = Path(__file__).resolve().parents[4]
GROUP = "torch_dynamo_backends"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What processes found, one after the other, on machines with empty caches, where the
    entry point is declared as the package declares it."""
    place = tmp_path_factory.mktemp("machine")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = place / "packages" / "declared-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in declared[GROUP].items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.unit.attach.torch_compile.compiling",
            str(place),
        ],
        cwd=ROOT,
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",
            "NOSTALL_HOME": str(place / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
            # Trying takes a C++ compiler some seconds; nothing is compiled by other processes.
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(place / "packages")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: json.loads(path.read_text()) for path in place.glob("*.json")}


@pytest.fixture(scope="module")
def cold(processes: Any) -> Any:
    return processes["cold"]


@pytest.mark.parametrize("model", ["wide", "narrow"])
def test_inductor_calls_stitched_kernels_and_gradients_are_right(cold: Any, model: str) -> None:
    found = cold["cached"][model]
    assert len(found["kernels"]) >= (3 if model == "wide" else 1)
    assert found["apart"] < 1e-4
    assert found["hits"] == 0
    direct, dispatched = found["calls"]
    assert direct >= len(found["kernels"])
    assert dispatched == 0


@pytest.mark.parametrize("where", ["", " elsewhere"])
@pytest.mark.parametrize("model", ["wide", "narrow"])
def test_another_process_takes_compiled_graphs_from_pytorchs_cache(
    processes: Any, model: str, where: str
) -> None:
    """Whichever model was compiled first, there and here."""
    cold, warm = (processes[f"{name}{where}"]["cached"][model] for name in ("cold", "warm"))
    assert cold["hits"] == 0 and warm["hits"] >= 1
    assert warm["kernels"] == cold["kernels"] == processes["cold"]["cached"][model]["kernels"]
    assert warm["digest"] == cold["digest"] == processes["cold"]["cached"][model]["digest"]


def test_a_forward_pass_keeps_what_it_kept(cold: Any) -> None:
    """Shapes, strides and dtypes of what waits for the backward pass."""
    assert len(cold["saved"]["stitched"]) >= 3
    assert cold["saved"]["stitched"] == cold["saved"]["plain"]


def test_models_share_no_kernels(cold: Any) -> None:
    wide, narrow = (set(cold["cached"][model]["kernels"]) for model in ("wide", "narrow"))
    assert not wide & narrow


def test_a_faster_version_is_stitched_in_the_background_and_swapped_in(cold: Any) -> None:
    first = cold["measured"]["first"]
    before = first["states"].index("stitched")
    assert before >= 1
    assert set(first["states"][:before]) <= {"inductor", "compiling"}
    assert first["states"][before:] == ["stitched", "stitched"]
    assert first["called"] == [False] * before + [True, True]
    assert first["apart"] < 1e-4
    assert first["ratio"] == 2.0
    assert not first["from store"]
    said = ["background", "compared", "duels", "plain", "raced", "stitched"]
    assert first["seconds"] == said


def test_plans_are_raced_before_and_the_faster_ones_are_put_in(cold: Any) -> None:
    found = cold["measured"]
    assert found["first"]["asked"] >= 2
    assert set(found["winners"]) == {1}
    assert set(found["first"]["plans"]) & set(found["won"])
    assert found["again"]["asked"] == found["first"]["asked"]
    assert found["again"]["plans"] == found["first"]["plans"]


def test_plans_of_short_kernels_are_not_raced(cold: Any) -> None:
    found = cold["measured"]
    assert found["short"]["states"][-1] == "stitched"
    # What is left has two launches.
    assert found["short races"] < len(found["winners"])
    assert 0 < found["short"]["asked"] < found["first"]["asked"]


def test_the_next_run_begins_with_the_choice(cold: Any) -> None:
    again = cold["measured"]["again"]
    assert again["from store"]
    assert again["states"] == ["stitched", "stitched"]
    assert again["called"] == [True, True]
    assert again["apart"] < 1e-4
    assert again["ratio"] == 2.0
    assert again["seconds"] == ["stitched"]


def test_kernels_that_are_not_faster_than_inductors_are_left_to_it(cold: Any) -> None:
    found = cold["partial"]
    every, some = found["all, first"], found["some, first"]
    assert (every["left"], some["left"]) == (0, 1)
    assert every["asked"] == some["asked"] >= 3
    assert set(some["kernels"]) < set(every["kernels"])
    assert len(every["kernels"]) - len(some["kernels"]) == 1
    assert max(run["apart"] for run in found.values()) < 1e-4


def test_where_none_is_faster_the_whole_graph_decides(cold: Any) -> None:
    equal, every = cold["partial"]["equal, first"], cold["partial"]["all, first"]
    assert equal["reason"] == "faster as a whole" and equal["left"] == 0
    assert equal["kernels"] == every["kernels"]


def test_where_all_are_slower_nothing_is_compiled_twice(cold: Any) -> None:
    none = cold["partial"]["none, first"]
    assert none["reason"] == "every kernel is slower than what Inductor makes of the same operators"
    assert set(none["states"]) == {"inductor", "compiling"}
    assert not any(none["called"])
    assert "stitched" not in none["seconds"]


@pytest.mark.parametrize("which", ["all", "some", "equal", "none"])
def test_the_next_run_puts_in_the_same_kernels_without_a_duel(cold: Any, which: str) -> None:
    first, again = (cold["partial"][f"{which}, {run}"] for run in ("first", "again"))
    assert again["from store"]
    assert again["asked"] == first["asked"]
    assert (again["kernels"], again["left"]) == (first["kernels"], first["left"])


def test_another_process_compiles_and_the_program_takes_that_from_the_cache(cold: Any) -> None:
    found = cold["ahead"]["helped"]
    assert found["states"][-1] == "stitched" and found["left"] == 0
    # Forward and backward, and what every kernel was compared with.
    assert found["hits"] >= 3
    own = {"background", "compared", "duels", "plain", "stitched"}
    assert set(found["seconds"]) == own | {"ahead", "compiled", "written"}
    assert not found["not ahead"]
    assert found["started"][0], "they import what they need while Inductor compiles"
    assert cold["ahead"]["errands"] == ["Writing: ", "Compiling: "]
    # Two processes share what kernels are compared with.
    first, others = (cold["ahead"]["answered"][name] for name in ("first", "others"))
    assert first and others and {*first, *others} == {""}
    assert not cold["ahead"]["running"]


def test_where_no_other_process_compiles_the_program_does(cold: Any) -> None:
    found, helped = cold["ahead"]["alone"], cold["ahead"]["helped"]
    assert found["hits"] == 0
    assert not found["started"][0], "Inductor has what few processors there are"
    assert "compiled by the program itself: no luck" in found["explained"]
    assert found["states"][-1] == "stitched"
    assert (found["kernels"], found["digest"]) == (helped["kernels"], helped["digest"])
    assert max(found["apart"], helped["apart"]) < 1e-4


def test_where_a_process_died_that_compiled_kernels_the_program_does_not_try(cold: Any) -> None:
    found = cold["ahead"]["died"]
    assert found["states"][-1] == "inductor"
    assert found["reason"] == (
        "not stitched: Died: kernels could not be compiled by another process"
    )


@pytest.mark.parametrize("which", ["helped", "alone"])
def test_the_next_run_finds_the_stitched_version_as_a_whole(cold: Any, which: str) -> None:
    """Nothing is traced again; where another process compiles, not even once by the program."""
    first, again = cold["ahead"][which], cold["ahead"][f"{which}, again"]
    assert first["whole hits"] == (which == "helped")
    assert again["from store"] and again["whole hits"] == 1
    assert (again["kernels"], again["digest"]) == (first["kernels"], first["digest"])


KERNELS = {"breaks": 2, "in_place": 1, "numbers": 1, "chosen": 0, "normed": 1}
REASONS = {"numbers": "dtype complex64", "chosen": "unsupported operator"}


@pytest.mark.parametrize("program", KERNELS)
def test_a_strange_program_gives_what_it_gave(cold: Any, program: str) -> None:
    found = cold["strange"][program]
    assert found["apart"] < 1e-5
    assert found["strides"][0] == found["strides"][1]
    assert found["kernels"] >= KERNELS[program]
    if program in REASONS:
        assert any(REASONS[program] in why for why in found["refused"])
    assert found["graphs"] == (2 if program == "breaks" else found["graphs"])


def test_one_compilation_is_right_for_every_batch(cold: Any) -> None:
    found = cold["dynamic"]["inductor"]
    assert found["compiled"] == 1
    assert found["apart"] < 1e-4
    assert found["states"] == ["stitched"] * 4
    assert found["called"] == [2] * 4


def test_a_batch_that_varies_is_compared_and_bounded(cold: Any) -> None:
    found = cold["dynamic"]["eager"]
    assert found["apart"] < 1e-4
    # The second call is the first that can run what was chosen; the last one is compiled anew.
    assert found["states"] == ["inductor", "stitched", "stitched", "stitched", "inductor"]
    assert found["compiled"] == 2
    first, *chosen, last = found["called"]
    assert (first, last) == (0, 0)
    assert min(chosen) >= 3


def test_a_batch_that_varies_is_stitched_in_the_background(cold: Any) -> None:
    found = cold["dynamic"]["background"]
    first, *waiting, chosen, at_16, at_17 = found["states"]
    assert (first, chosen, at_16, at_17) == ("inductor", "stitched", "stitched", "inductor")
    assert set(waiting) <= {"compiling"}
    assert found["compiled"] == 2
    assert found["apart"] < 1e-4


def test_the_next_run_with_a_batch_that_varies_begins_with_the_choice(cold: Any) -> None:
    found = cold["dynamic"]["again"]
    assert found["states"] == ["stitched", "stitched", "stitched", "inductor"]
    assert found["compiled"] == 2
    assert found["apart"] < 1e-4


def test_two_sizes_that_vary_stay_with_the_others_and_are_counted(cold: Any) -> None:
    found = cold["dynamic"]["two"]
    assert found["apart"] < 1e-6
    assert [["several dynamic dimensions", "whole graph"]] in found["refused"]


def test_ranks_run_the_kernels_of_rank_0_on_machines_of_their_own(processes: Any) -> None:
    leader, follower = (processes["ranks"][f"rank {rank}"]["alone"] for rank in range(2))
    assert leader["asked"] > 1, "plans raced on rank 0"
    assert follower["asked"] == 0
    assert [found["states"][-1] for found in (leader, follower)] == ["stitched"] * 2
    assert (leader["reason"], follower["reason"]) == ("faster as a whole", "rank 0 has chosen")
    assert leader["kernels"] == follower["kernels"]
    assert leader["plans"] == follower["plans"]
    assert leader["digest"] == follower["digest"]
    assert max(leader["apart"], follower["apart"]) < 1e-5


def test_graphs_that_ddp_splits_are_stitched_on_all_ranks(processes: Any) -> None:
    leader, follower = (processes["ranks"][f"rank {rank}"]["ddp"] for rank in range(2))
    count = len(leader["graphs"])
    assert count >= 2
    assert leader["graphs"] == [["stitched", "faster as a whole"]] * count
    assert follower["graphs"] == [["stitched", "rank 0 has chosen"]] * count
    assert len(leader["kernels"]) >= 3 and leader["kernels"] == follower["kernels"]
    assert max(leader["apart"], follower["apart"]) < 1e-4
