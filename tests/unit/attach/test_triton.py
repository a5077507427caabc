"""Cubins that Triton 3.9 and 3.6 load: the store's replacement, or the original."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nostall.store import Store
from tests.corpus.catalogue import OLD_TRITON
from tests.unit.attach.processes import Machine, empty_cache, make_machine
from tests.unit.attach.variants import keep_variant

pytest.importorskip("triton")


# For tests whose result does not depend on the version.
newest_triton = pytest.mark.parametrize("made", ["3.9"], indirect=True)
# For tests of which another one runs more of the same code with the oldest version.
oldest_in_slow_tests = pytest.mark.parametrize(
    "made", ["3.9", pytest.param("3.6", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module", params=["3.9", "3.6"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if request.param == "3.6" and not OLD_TRITON.is_dir():
        pytest.skip("no Triton 3.6.0 in .cache (see tests/corpus/build.py)")
    return make_machine(tmp_path_factory.mktemp("world"), request.param)


@pytest.fixture
def world(made: Machine) -> Iterator[Machine]:
    """A machine with a store; after each test its Triton cache must be unchanged."""
    before = made.files()
    assert sum(name.endswith(".cubin") for name in before) == 2
    yield made
    assert made.files() == before


@pytest.mark.parametrize("mode", ["plain", "worker-autotune"])
def test_apply_loads_replacements(world: Machine, mode: str) -> None:
    ran = world.run(mode, apply=True)
    assert set(ran.loaded) <= set(world.variants.values())
    assert len(ran.loaded) == (2 if "autotune" in mode else 1)
    assert not any(line["dependent"] for line in ran.lines)
    assert ran.messages == ""


@oldest_in_slow_tests
def test_apply_with_an_empty_cache_writes_the_same_cache_as_triton(world: Machine) -> None:
    empty_cache(world)
    ran = world.run("autotune", apply=True)
    assert sorted(ran.loaded) == sorted(world.variants.values())


@oldest_in_slow_tests
@pytest.mark.parametrize("mode", ["decorated", "decorated-autotune"])
def test_the_decorator_loads_replacements(world: Machine, mode: str) -> None:
    ran = world.run(mode)
    assert set(ran.loaded) <= set(world.variants.values())
    assert len(ran.loaded) == (2 if "autotune" in mode else 1)
    assert ran.messages == ""


@oldest_in_slow_tests
def test_decorator_and_apply_with_an_empty_cache(world: Machine) -> None:
    empty_cache(world)
    ran = world.run("worker-decorated-autotune", apply=True)
    assert sorted(ran.loaded) == sorted(world.variants.values())


@pytest.fixture
def chains(made: Machine, tmp_path: Path) -> str:
    """A store whose records are for dependent launches."""
    store = Store(tmp_path / "chains")
    for original in made.variants:
        data = made.store.artefacts.get(original, "cubin")
        keep_variant(store, data, dependent_launch=True)
    return str(store.root)


@oldest_in_slow_tests
@pytest.mark.parametrize("mode", ["plain", "decorated"])
def test_cubins_for_dependent_launches_are_launched_as_such(
    world: Machine, chains: str, mode: str
) -> None:
    ran = world.run(mode, apply=mode == "plain", NOSTALL_HOME=chains)
    assert set(ran.loaded) <= set(world.variants.values())
    assert [line["dependent"] for line in ran.lines] == [True]


@newest_triton
def test_a_new_kernel_is_compiled_for_dependent_launches(world: Machine, chains: str) -> None:
    empty_cache(world)
    ran = world.run("autotune", apply=True, NOSTALL_HOME=chains)
    assert sorted(ran.loaded) == sorted(world.variants.values())
    assert {line["dependent"] for line in ran.lines} == {True}


@oldest_in_slow_tests
@pytest.mark.parametrize("mode", ["tuned", "tuned-autotune"])
def test_the_first_call_tunes_and_the_second_loads_the_result(
    world: Machine, tmp_path: Path, mode: str
) -> None:
    ran = world.run(mode, NOSTALL_HOME=str(tmp_path), TUNED_HOME=str(world.store.root))
    *trial, original, job, optimised = ran.loaded
    # The autotuner chooses the first of its two configurations here.
    chosen = trial[0] if trial else original
    assert len(trial) == (1 if "autotune" in mode else 0)
    assert {*trial, original} <= set(world.variants)
    assert job == f"tuned {chosen}"
    assert optimised == world.variants[chosen]
    (job_line,) = (line for line in ran.lines if "launch" in line)
    assert (job_line["name"], job_line["seconds"], job_line["ordinal"]) == ("axpy", 5, 0)
    launch = job_line["launch"]
    assert launch["grid"] == [4, 1, 1]
    assert launch["block"] == [128, 1, 1]
    names = [arg["name"] for arg in launch["args"]]
    assert names == ["y", "x", "n", "global_scratch", "profile_scratch"]
    for buffer in launch["args"][:2]:
        assert (buffer["dtype"], buffer["shape"], buffer["role"]) == ("f32", [2048], "inout")
    assert launch["args"][2]["value"] == 2048


@oldest_in_slow_tests
def test_without_nostall_originals_are_loaded(world: Machine) -> None:
    assert set(world.run("autotune").loaded) == set(world.variants)


@newest_triton
@pytest.mark.parametrize("mode", ["decorated-twice", "twice"])
def test_on_another_gpu_the_original_runs_with_one_warning(world: Machine, mode: str) -> None:
    ran = world.run(mode, apply=mode == "twice", NOSTALL_GPU="Another")
    assert len(ran.loaded) == 2
    assert set(ran.loaded) <= set(world.variants)
    assert ran.messages.count("this is Another") == 1


@newest_triton
@pytest.mark.parametrize("mode", ["decorated", "plain"])
def test_an_unsupported_triton_loads_originals(world: Machine, mode: str) -> None:
    ran = world.run(f"unknown-{mode}", apply=mode == "plain")
    assert set(ran.loaded) <= set(world.variants)
    assert ran.messages.count("Triton 4.0.0 is not supported") == 1


@newest_triton
def test_a_changed_cubin_is_not_loaded(world: Machine, tmp_path: Path) -> None:
    shutil.copytree(world.store.root, tmp_path / "home")
    for twin in world.variants.values():
        path = Store(tmp_path / "home").artefacts.path(twin, "cubin")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for mode in ("plain", "decorated"):
        ran = world.run(mode, apply=mode == "plain", NOSTALL_HOME=str(tmp_path / "home"))
        assert set(ran.loaded) <= set(world.variants)
        assert ran.messages.count("was changed") == 1


@newest_triton
def test_a_program_runs_with_an_unreadable_store(world: Machine, tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 1000)
    ran = world.run("plain", apply=True, NOSTALL_HOME=str(tmp_path))
    assert set(ran.loaded) <= set(world.variants)
    assert ran.messages.count("originals run") == 1


@newest_triton
def test_a_python_with_a_broken_nostall_runs_its_program(world: Machine, tmp_path: Path) -> None:
    (tmp_path / "nostall").mkdir()
    (tmp_path / "nostall" / "__init__.py").write_text("raise ImportError('not for this Python')")
    paths = os.pathsep.join([str(tmp_path), world.environment()["PYTHONPATH"]])
    ran = world.run("plain", apply=True, PYTHONPATH=paths)
    assert set(ran.loaded) <= set(world.variants)
    assert ran.messages.count("not for this Python") == 1


@newest_triton
def test_the_log_lists_all_look_ups(world: Machine, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ran = world.run("worker-autotune", apply=True, NOSTALL_ATTACH_LOG=str(log))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["original"]: line["delivered"] for line in lines} == world.variants
    assert {line["process"] for line in lines} == {line["process"] for line in ran.lines}
    assert {line["where"] for line in lines} == {"triton cache"}
    assert {line["record"] for line in lines} == {row.id for row in world.store.rows()}
