"""What the GPU benchmark of chains does without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
from benchmarks.fusion.chains import chains, copy_bandwidth, dropout_seeds
from benchmarks.fusion.chains import methods as fusion_chain_methods
from benchmarks.fusion.chains import streamed_outputs as streaming
from benchmarks.fusion.chains.accuracy import Judge
from benchmarks.fusion.chains.chains import Job, in_own_process
from benchmarks.fusion.chains.methods import OPTIONS, best_inductor, compiled, known_options, others
from benchmarks.fusion.chains.page import FOLDER
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import graph_of, least_bytes, partitions, plans_of, taken
from benchmarks.fusion.chains.timing import Inputs, Method, Run, compared, copies, in_turns

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan, sort_key
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.runtime.stitched_graph import (
    StitchedGraph,
    grow_partition,
    schedule_operators,
    stitch,
)
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.errors import BadCapture
from nostall.fusion.testing.reference import interpret

FIRST = {
    "softmax + mask 16384x3000": "block 1x1024x3",
    "log-sum-exp + softmax 64x131072": "split",
    "SwiGLU 16384x5504": "thread",
    "short attention 64x12x48x64": "matrix 1x4096",
    "attention by a query 4096x100x64": "turned",
}


def small(chain: Chain) -> Chain:
    """The same program on tensors that a processor copes with."""

    def less(shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) == 4:
            return 2, *(-(-size // 32) if size >= 512 else size for size in shape[1:])
        return tuple(-(-size // 32) if size >= 512 else size for size in shape)

    return replace(chain, inputs=tuple((less(shape), dtype) for shape, dtype in chain.inputs))


def tensors(given: object) -> list[torch.Tensor]:
    return list(given) if isinstance(given, (tuple, list)) else [given]


def test_a_copy_moves_the_bytes_of_its_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = copy_bandwidth.pairs(1 << 20, "cpu")
    assert len(sets) == 32 and len(copy_bandwidth.pairs(400 << 20, "cpu")) == 2
    assert sum(tensor.nbytes for tensor in sets[0]) == 1 << 20
    monkeypatch.setattr(copy_bandwidth, "captured_graph", lambda run, sets: [run(s) for s in sets])
    monkeypatch.setattr(copy_bandwidth, "replayed", lambda graph, runs: float(runs))
    assert copy_bandwidth.copied(sets, 5) == [32.0] * 5
    assert all(torch.equal(place, -source) for source, place in sets)


class Played:
    """Replays of a graph of three runs: ``told`` makes the numbers of the next one."""

    def __init__(self, told: Callable[[torch.Generator], list[torch.Tensor]]) -> None:
        self.told, self.state = told, torch.Generator().manual_seed(7)

    def __call__(self, seed: int | None = None) -> list[torch.Tensor]:
        if seed is not None:
            self.state.manual_seed(seed)
        return self.told(self.state)


def drawn(state: torch.Generator) -> list[torch.Tensor]:
    return [torch.rand(4, generator=state) for _ in range(3)]


def test_seeds_in_a_branch_are_held_to_those_in_order() -> None:
    def found(told: Callable[[torch.Generator], list[torch.Tensor]]) -> list[int]:
        branch, in_order = Played(told), Played(drawn)
        checked = dropout_seeds.checked(branch, in_order, 5)  # type: ignore[arg-type]
        assert checked.pop("results") == 15
        return list(checked.values())

    assert found(drawn) == [0, 0, 0]
    # Always the same, the same in every run of a replay, and never the same again.
    assert found(lambda state: [torch.full((4,), float(at)) for at in range(3)]) == [15, 3, 0]
    assert found(lambda state: drawn(state)[:1] * 3) == [10, 2, 0]
    unseeded = torch.Generator().manual_seed(0)
    assert found(lambda state: drawn(unseeded)) == [15, 0, 3]


def test_the_only_large_output_of_a_chain_is_streamed_and_not(tmp_path: Path) -> None:
    def stitched(name: str) -> StitchedGraph:
        graph = graph_of(CHAINS[name])
        return stitch(graph, [graph.operators], choice=default_plan, folder=tmp_path)

    whole = stitched("norm + gelu + mask 4096x5000")
    assert streaming.is_judged(whole)
    ways = streaming.both_ways(whole, *plans_of(whole), tmp_path)
    programs = [step.program for way in ways.values() for step in way.steps if step != 0]
    assert [str(program.plan).endswith(", streamed") for program in programs] == [False, True]
    # Of small outputs, and of such that do not come of registers, there is nothing to compare.
    assert not streaming.is_judged(stitched("LSTM cell 8192x1024"))
    assert not streaming.is_judged(stitched("short attention 512x12x48x64"))


def test_there_are_enough_chains() -> None:
    assert len(CHAINS) >= 16


@pytest.mark.parametrize("name", CHAINS)
def test_tensors_of_a_gpu_are_traced_to_the_same_graph(name: str) -> None:
    try:
        traced = graph_of(CHAINS[name], "cuda")
    except BadCapture as error:
        if "not linked with support for cuda" not in str(error):
            raise
        pytest.skip("this PyTorch cannot index tensors of a GPU, fake ones neither")
    assert traced.key == graph_of(CHAINS[name]).key


@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_runs_and_is_captured_as_what_it_is(name: str) -> None:
    chain = small(CHAINS[name])
    torch.manual_seed(0)
    given = chain.tensors("cpu")
    wide = [x.float() if x.is_floating_point() else x for x in given]
    found = tensors(chain.function(*wide))
    graph = graph_of(chain)
    if chain.certain is not None:
        assert [tuple(x.shape) for x in found] == [graph[i].shape for i in graph.outputs]
        return
    wants = interpret(graph, [x.numpy() for x in wide])
    for want, got in zip(wants, found, strict=True):
        assert got.shape == want.shape and got.is_floating_point() == (want.dtype.kind == "f")
        # The graph has casts to fp16 that the run in fp32 has too, but only those.
        error = abs(got.double().numpy() - want).max() / max(abs(want).max(), 1e-6)
        assert error < (1.5 / 127 if got.dtype == torch.int8 else 5e-3)


@pytest.mark.parametrize("name", FIRST)
def test_a_chain_is_one_kernel_with_the_expected_scheme(name: str) -> None:
    graph = graph_of(CHAINS[name])
    (group,) = grow_partition(graph)
    of = schedule_operators(graph, group)
    program = emit(default_plan(of))
    assert str(program.plan).startswith(FIRST[name])
    assert program.outputs == tuple(sorted(graph.results))


def test_a_sum_down_strided_columns_takes_many_of_them_at_once() -> None:
    graph = graph_of(CHAINS["bias + gelu backward 16384x3072"])
    (group,) = grow_partition(graph)
    assert default_plan(schedule_operators(graph, group)).plan.rows >= 16


def test_equal_partitions_are_measured_once() -> None:
    assert list(partitions(graph_of(CHAINS["SwiGLU 16384x5504"]))) == ["explorer"]


def test_copies_are_more_than_the_cache_and_bytes_are_counted_once() -> None:
    chain = CHAINS["softmax + mask 32768x1024"]
    elements = 32768 * 1024
    assert least_bytes(graph_of(chain)) == elements * (2 + 1 + 2)
    assert copies(chain) == 3


def test_a_row_that_is_read_again_stays_in_the_cache() -> None:
    """Many rows in a program would fill L2 and have every pass go to memory."""
    graph = graph_of(CHAINS["log-sum-exp + softmax 8192x32000"])
    of = schedule_operators(graph, graph.operators)
    looped = [plan for plan in plans(of).legal_plans if plan.scheme == "looped"]
    assert min(looped, key=lambda plan: sort_key(PlannedKernel(of, plan))).rows == 1


# -- time ------------------------------------------------------------------------------------------


def test_a_gain_counts_only_beyond_the_null() -> None:
    steady = [100.0 + i % 3 for i in range(40)]
    half = [time / 2 for time in steady]
    samples = {"eager": steady, "eager again": steady, "compile": half}
    found = compared({**samples, "stitched": half})
    assert found["eager"]["verdict"] == "faster"
    assert found["compile"]["verdict"] == "same"
    noisy = [time * (1.2 if i % 2 else 0.8) for i, time in enumerate(steady)]
    found = compared({**samples, "eager again": noisy, "stitched": [t * 0.49 for t in steady]})
    assert found["compile"]["verdict"] == "same"


def test_methods_take_turns_and_have_their_own_inputs_where_they_write_over_them() -> None:
    order: list[str] = []
    given = [[torch.zeros(2)], [torch.ones(2)]]
    seen: dict[str, Sequence[Inputs]] = {}

    def record(run: Run, sets: Sequence[Inputs]) -> str:
        name = str(run([]))
        seen[name] = sets
        return name

    def timed(name: str, runs: int) -> float:
        order.append(name)
        return float(len(order))

    methods = {"a": Method(lambda _: "a"), "b": Method(lambda _: "b", overwrites=True)}
    samples = in_turns(methods, given, 2, record, timed)
    assert order == ["a", "b", "b", "a"] * 2 + ["a", "b"]
    assert samples == {"a": [8.0, 9.0], "b": [7.0, 10.0]}
    assert seen["a"][1][0] is given[1][0] and seen["b"][1][0] is not given[1][0]
    assert torch.equal(seen["b"][1][0], given[1][0])


def test_every_load_has_memory_of_its_own_and_an_equal_share_of_the_rounds() -> None:
    given = [[torch.ones(2)]]
    seen: list[torch.Tensor] = []

    def record(run: Run, sets: Sequence[Inputs]) -> int:
        seen.append(sets[0][0])
        return len(seen)

    methods = {"a": Method(lambda _: None)}
    samples = in_turns(methods, given, 8, record, lambda load, runs: float(load), loads=4)
    assert samples == {"a": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]}
    assert seen[0] is given[0][0] and len({id(one) for one in seen}) == 4
    assert all(torch.equal(one, given[0][0]) for one in seen)


def test_what_only_some_loads_say_is_no_difference() -> None:
    """A version that is slower in half of the layouts, by more than its rounds differ."""
    steady = [100.0 + i % 3 / 100 for i in range(40)]
    half = [time * (1.01 if i // 10 % 2 else 1.0) for i, time in enumerate(steady)]
    samples = {"eager": steady, "eager again": steady, "compile": steady, "stitched": half}
    assert compared({**samples, "stitched": [1.01 * t for t in steady]}, 4)["compile"] == {
        **compared({**samples, "stitched": [1.01 * t for t in steady]})["compile"],
        "verdict": "slower",
    }
    assert compared(samples, 4)["compile"]["verdict"] == "same"


# -- errors ----------------------------------------------------------------------------------------


def test_what_is_wrong_is_named_and_not_a_number_is_wrong() -> None:
    chain = small(CHAINS["residual + RMSNorm 16384x4096"])
    judge = Judge(chain, chain.tensors("cpu"))
    assert judge.wrong(judge.errors(Method(lambda given: chain.function(*given)))) == ""

    def off(given: Inputs) -> list[torch.Tensor]:
        first, second = chain.function(*given)
        return [first, second * 1.1]

    assert judge.wrong(judge.errors(Method(off))).startswith("output 1 is off by 0.1")
    broken = judge.errors(Method(lambda given: [x * float("nan") for x in off(given)]))
    assert judge.wrong(broken).startswith("output 0 is off by nan")


def test_dropout_is_judged_by_what_it_leaves_and_how_much() -> None:
    chain = small(CHAINS["softmax + dropout 16384x2048"])
    chain = replace(chain, inputs=(((512, 2048), torch.float16),))
    judge = Judge(chain, chain.tensors("cpu"))
    right = Method(lambda given: chain.function(*given))
    assert judge.wrong([error / 2 for error in judge.errors(right)]) == ""
    assert judge.errors(Method(lambda given: given[0].softmax(-1)))[0] > 0.05
    all_kept = judge.errors(Method(lambda given: given[0].softmax(-1) / 0.9))
    assert judge.wrong(all_kept).startswith("output 1 is off by 0.1")


# -- other methods ---------------------------------------------------------------------------------


def test_only_options_that_this_version_has_and_that_change_something_are_tried() -> None:
    settings = SimpleNamespace(
        combo_kernels=False,
        benchmark_combo_kernel=False,
        triton=SimpleNamespace(multi_kernel=0, mix_order_reduction=True),
    )
    assert list(known_options(settings)) == [
        "combo kernels",
        "multi-kernel",
        "no mixed-order reductions",
    ]
    assert set(known_options()) <= set(OPTIONS) and "combo kernels" in known_options()


def test_the_fastest_of_inductors_ways_is_taken_and_gains_are_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fusion_chain_methods, "known_options", lambda: {"a": {"x": 1}, "b": {"y": 1}, "c": {"z": 1}}
    )
    took = {"xmax": 8.0, "x": 9.0, "y": 9.99, "z": 11.0}

    def built(chain: Chain, options: dict[str, object]) -> Run:
        if "z" in options:
            raise RuntimeError("no such thing\nat all")
        key = ("x" if "x" in options else "y") + ("max" if len(options) > 1 else "")
        return lambda _: key

    def timed(run: Run, sets: Sequence[Inputs]) -> float:
        return took.get(str(run([])), 10.0)

    begun = {"compile": lambda _: "plain", "max-autotune": lambda _: "tuned"}
    chain = CHAINS["SwiGLU 16384x5504"]
    run, told = best_inductor(chain, [], begun, 60, timed, built)
    assert told["taken"] == "max-autotune + a" and run([]) == "xmax"
    assert told["ways"]["c"] == {"failure": "RuntimeError: no such thing"}
    assert told["ways"]["b"] == {"us": 9.99}
    _, told = best_inductor(chain, [], begun, 60, lambda run, sets: 5.0, built)
    assert told["taken"] == "compile"
    del begun["compile"]
    assert best_inductor(chain, [], begun, 60, timed, built)[1]["taken"] == "a"
    with pytest.raises(RuntimeError, match="no way"):
        best_inductor(chain, [], begun, -1, timed, built)


def test_versions_of_one_program_share_no_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake(function: object, **options: object) -> object:
        seen.append((function, options["options"]))
        return function

    monkeypatch.setattr(torch, "compile", fake)
    chain = small(CHAINS["SwiGLU 16384x5504"])
    given = chain.tensors("cpu")
    one, other = compiled(chain), compiled(chain, {"combo_kernels": True})
    assert torch.equal(one(given), other(given))
    assert seen[0][0].__code__ is not seen[1][0].__code__
    assert [options for _, options in seen] == [None, {"combo_kernels": True}]


def test_a_method_that_fails_or_is_wrong_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = small(CHAINS["softmax + mask 32768x1024"])

    def made(_: Chain, options: dict[str, object] | None = None) -> Run:
        if options is None:
            return lambda given: chain.function(*given) + 1
        return lambda given: chain.function(*given)

    def best(*_: object) -> object:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(fusion_chain_methods, "compiled", made)
    monkeypatch.setattr(fusion_chain_methods, "best_inductor", best)
    given = chain.tensors("cpu")
    found, told = others(chain, [given], Judge(chain, given), 60)
    assert list(found) == ["eager", "eager again", "max-autotune"]
    assert told["failures"]["compile"].startswith("output 0 is off by")
    assert told["failures"]["best Inductor"] == "RuntimeError: out of luck"
    assert told["failures"]["liger"] == "Liger has no kernel that computes softmax_mask"


# -- a committed result ----------------------------------------------------------------------------


def test_the_kernels_of_a_result_are_made_again_without_a_race(tmp_path: Path) -> None:
    result = json.loads((FOLDER / "double_norm_16384x2500.json").read_text())
    whole = taken(CHAINS[result["chain"]], result["stitched"], tmp_path)
    assert plans_of(whole) == result["stitched"]["plans"]
    other = {**result["stitched"], "plans": ["block 1x8, 4 warps"]}
    with pytest.raises(BadInput, match="measure the chain again"):
        taken(CHAINS[result["chain"]], other, tmp_path)


def test_a_chain_has_a_process_of_its_own_and_its_fault_is_told(tmp_path: Path) -> None:
    """Without a GPU the process fails; with one it does because there is no such chain."""
    job = Job("no such chain", ("--out", str(tmp_path), "--one", "no such chain"), monotonic() + 60)
    assert in_own_process(job) == "exit code 1: KeyError: 'no such chain'"


def test_a_chain_ends_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: Sequence[str], limit: float) -> tuple[int, str, str]:
        raise TimeoutExpired(command, limit)

    monkeypatch.setattr(chains, "run_within", hangs)
    assert in_own_process(Job("c", (), monotonic() - 9)) == "not done within the 1 s that were left"
