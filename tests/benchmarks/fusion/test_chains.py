"""Tests of the benchmark of fused chains, without a GPU."""

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
from benchmarks.fusion.chains import chains
from benchmarks.fusion.chains import methods as fusion_chain_methods
from benchmarks.fusion.chains.accuracy import AccuracyCheck
from benchmarks.fusion.chains.chains import Job, run_in_process
from benchmarks.fusion.chains.mechanisms import copy_bandwidth, dropout_seeds
from benchmarks.fusion.chains.mechanisms import streamed_outputs as streaming
from benchmarks.fusion.chains.methods import (
    OPTIONS,
    available_options,
    baseline_methods,
    best_inductor,
    compile_chain,
)
from benchmarks.fusion.chains.page import FOLDER
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import (
    chain_graph,
    kernel_plans,
    min_bytes,
    partitions,
    rebuild,
)
from benchmarks.fusion.chains.timing import Inputs, Method, Run, copy_count
from tools.interpreters.reference import interpret

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan, sort_key
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import grow_partition, schedule_operators
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.errors import BadCapture

FIRST = {
    "softmax + mask 16384x3000": "block 1x1024x3",
    "log-sum-exp + softmax 64x131072": "split",
    "SwiGLU 16384x5504": "thread",
    "short attention 64x12x48x64": "matrix 1x4096",
    "attention by a query 4096x100x64": "turned",
}

QUICK = set(list(CHAINS)[::3])
EACH = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CHAINS]
"""All chains; two of three are slow tests."""


def small(chain: Chain) -> Chain:
    """The same chain with tensors small enough for the CPU."""

    def shrink(shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) == 4:
            return 2, *(-(-size // 32) if size >= 512 else size for size in shape[1:])
        return tuple(-(-size // 32) if size >= 512 else size for size in shape)

    return replace(chain, inputs=tuple((shrink(shape), dtype) for shape, dtype in chain.inputs))


def tensors(result: object) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def test_copies_move_the_bytes_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = copy_bandwidth.copy_buffers(1 << 20, "cpu")
    assert len(sets) == 32 and len(copy_bandwidth.copy_buffers(400 << 20, "cpu")) == 2
    assert sum(tensor.nbytes for tensor in sets[0]) == 1 << 20
    monkeypatch.setattr(copy_bandwidth, "capture_graph", lambda run, sets: [run(s) for s in sets])
    monkeypatch.setattr(copy_bandwidth, "time_replay", lambda graph, runs: float(runs))
    assert copy_bandwidth.time_copies(sets, 5) == [32.0] * 5
    assert all(torch.equal(place, -source) for source, place in sets)


class FakeCapturedRuns:
    """Fake of a CUDA graph with three runs; ``draw`` makes the random numbers of one replay."""

    def __init__(self, told: Callable[[torch.Generator], list[torch.Tensor]]) -> None:
        self.draw, self.state = told, torch.Generator().manual_seed(7)

    def __call__(self, seed: int | None = None) -> list[torch.Tensor]:
        if seed is not None:
            self.state.manual_seed(seed)
        return self.draw(self.state)


def drawn(state: torch.Generator) -> list[torch.Tensor]:
    return [torch.rand(4, generator=state) for _ in range(3)]


def test_differing_repeated_and_not_restored_seeds_are_counted() -> None:
    def failures(draw: Callable[[torch.Generator], list[torch.Tensor]]) -> list[int]:
        branch, in_order = FakeCapturedRuns(draw), FakeCapturedRuns(drawn)
        checked = dropout_seeds.check_seeds(branch, in_order, 5)  # type: ignore[arg-type]
        assert checked.pop("results") == 15
        return list(checked.values())

    assert failures(drawn) == [0, 0, 0]
    # Numbers that never change, that repeat within a replay, and that ignore the seed.
    assert failures(lambda state: [torch.full((4,), float(at)) for at in range(3)]) == [15, 3, 0]
    assert failures(lambda state: drawn(state)[:1] * 3) == [10, 2, 0]
    unseeded = torch.Generator().manual_seed(0)
    assert failures(lambda state: drawn(unseeded)) == [15, 0, 3]


def test_a_single_large_output_has_a_streamed_variant(tmp_path: Path) -> None:
    def stitched(name: str) -> StitchedGraph:
        graph = chain_graph(CHAINS[name])
        return stitch(graph, [graph.operators], choice=default_plan, folder=tmp_path)

    norm_kernel = stitched("norm + gelu + mask 4096x5000")
    assert streaming.is_comparable(norm_kernel)
    variants = streaming.stitch_variants(norm_kernel, *kernel_plans(norm_kernel), tmp_path)
    programs = [
        step.program for variant in variants.values() for step in variant.steps if step != 0
    ]
    assert [str(program.plan).endswith(", streamed") for program in programs] == [False, True]
    # Small outputs and outputs that are not stored from registers have no streamed variant.
    assert not streaming.is_comparable(stitched("LSTM cell 8192x1024"))
    assert not streaming.is_comparable(stitched("short attention 512x12x48x64"))


def test_there_are_at_least_16_chains() -> None:
    assert len(CHAINS) >= 16


@pytest.mark.parametrize("name", EACH)
def test_graphs_do_not_depend_on_the_device(name: str) -> None:
    try:
        traced = chain_graph(CHAINS[name], "cuda")
    except BadCapture as error:
        if "not linked with support for cuda" not in str(error):
            raise
        pytest.skip("this PyTorch has no CUDA support, which indexing fake CUDA tensors needs")
    assert traced.key == chain_graph(CHAINS[name]).key


@pytest.mark.parametrize("name", EACH)
def test_captured_graphs_compute_what_the_chains_compute(name: str) -> None:
    chain = small(CHAINS[name])
    torch.manual_seed(0)
    inputs = chain.tensors("cpu")
    fp32_inputs = [x.float() if x.is_floating_point() else x for x in inputs]
    outputs = tensors(chain.function(*fp32_inputs))
    graph = chain_graph(chain)
    if chain.without_dropout is not None:
        assert [tuple(x.shape) for x in outputs] == [graph[i].shape for i in graph.outputs]
        return
    expected = interpret(graph, [x.numpy() for x in fp32_inputs])
    for reference, output in zip(expected, outputs, strict=True):
        assert output.shape == reference.shape and output.is_floating_point() == (
            reference.dtype.kind == "f"
        )
        # The graph casts to fp16 where the chain does; the run in fp32 does not.
        error = abs(output.double().numpy() - reference).max() / max(abs(reference).max(), 1e-6)
        assert error < (1.5 / 127 if output.dtype == torch.int8 else 5e-3)


@pytest.mark.parametrize("name", FIRST)
def test_chains_become_one_kernel_with_the_expected_scheme(name: str) -> None:
    graph = chain_graph(CHAINS[name])
    (group,) = grow_partition(graph)
    schedule = schedule_operators(graph, group)
    program = emit(default_plan(schedule))
    assert str(program.plan).startswith(FIRST[name])
    assert program.outputs == tuple(sorted(graph.results))


def test_sums_of_strided_columns_have_many_rows_per_program() -> None:
    graph = chain_graph(CHAINS["bias + gelu backward 16384x3072"])
    (group,) = grow_partition(graph)
    assert default_plan(schedule_operators(graph, group)).plan.rows >= 16


def test_equal_partitions_are_listed_once() -> None:
    assert list(partitions(chain_graph(CHAINS["SwiGLU 16384x5504"]))) == ["explorer"]


def test_copies_exceed_l2_and_each_tensor_counts_once() -> None:
    chain = CHAINS["softmax + mask 32768x1024"]
    elements = 32768 * 1024
    assert min_bytes(chain_graph(chain)) == elements * (2 + 1 + 2)
    assert copy_count(chain) == 3


def test_looped_programs_have_one_row_so_that_it_stays_in_l2() -> None:
    """With many rows in each program, L2 overflows and every pass reads DRAM."""
    graph = chain_graph(CHAINS["log-sum-exp + softmax 8192x32000"])
    schedule = schedule_operators(graph, graph.operators)
    looped = [plan for plan in plans(schedule).legal_plans if plan.scheme == "looped"]
    assert min(looped, key=lambda plan: sort_key(PlannedKernel(schedule, plan))).rows == 1


# -- errors ----------------------------------------------------------------------------------------


def test_the_accuracy_check_names_the_wrong_output_and_rejects_nan() -> None:
    chain = small(CHAINS["residual + RMSNorm 16384x4096"])
    accuracy = AccuracyCheck(chain, chain.tensors("cpu"))
    assert accuracy.failure(accuracy.errors(Method(lambda inputs: chain.function(*inputs)))) == ""

    def inaccurate(inputs: Inputs) -> list[torch.Tensor]:
        first, second = chain.function(*inputs)
        return [first, second * 1.1]

    assert accuracy.failure(accuracy.errors(Method(inaccurate))).startswith(
        "output 1 is off by 0.1"
    )
    nan_errors = accuracy.errors(
        Method(lambda inputs: [x * float("nan") for x in inaccurate(inputs)])
    )
    assert accuracy.failure(nan_errors).startswith("output 0 is off by nan")


def test_dropout_is_checked_by_kept_values_and_their_share() -> None:
    chain = small(CHAINS["softmax + dropout 16384x2048"])
    chain = replace(chain, inputs=(((512, 2048), torch.float16),))
    accuracy = AccuracyCheck(chain, chain.tensors("cpu"))
    right = Method(lambda inputs: chain.function(*inputs))
    assert accuracy.failure([error / 2 for error in accuracy.errors(right)]) == ""
    assert accuracy.errors(Method(lambda inputs: inputs[0].softmax(-1)))[0] > 0.05
    all_kept = accuracy.errors(Method(lambda inputs: inputs[0].softmax(-1) / 0.9))
    assert accuracy.failure(all_kept).startswith("output 1 is off by 0.1")


# -- other methods ---------------------------------------------------------------------------------


def test_available_options_exist_and_differ_from_the_defaults() -> None:
    settings = SimpleNamespace(
        combo_kernels=False,
        benchmark_combo_kernel=False,
        triton=SimpleNamespace(multi_kernel=0, mix_order_reduction=True),
    )
    assert list(available_options(settings)) == [
        "combo kernels",
        "multi-kernel",
        "no mixed-order reductions",
    ]
    assert set(available_options()) <= set(OPTIONS) and "combo kernels" in available_options()


def test_best_inductor_combines_gains_and_takes_the_fastest_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fusion_chain_methods,
        "available_options",
        lambda: {"a": {"x": 1}, "b": {"y": 1}, "c": {"z": 1}},
    )
    microseconds = {"xmax": 8.0, "x": 9.0, "y": 9.99, "z": 11.0}

    def compile_run(chain: Chain, options: dict[str, object]) -> Run:
        if "z" in options:
            raise RuntimeError("no such thing\nat all")
        key = ("x" if "x" in options else "y") + ("max" if len(options) > 1 else "")
        return lambda _: key

    def time_run(run: Run, sets: Sequence[Inputs]) -> float:
        return microseconds.get(str(run([])), 10.0)

    compiled_runs = {"compile": lambda _: "plain", "max-autotune": lambda _: "tuned"}
    chain = CHAINS["SwiGLU 16384x5504"]
    run, details = best_inductor(chain, [], compiled_runs, 60, time_run, compile_run)
    assert details["taken"] == "max-autotune + a" and run([]) == "xmax"
    assert details["ways"]["c"] == {"failure": "RuntimeError: no such thing"}
    assert details["ways"]["b"] == {"us": 9.99}
    _, details = best_inductor(chain, [], compiled_runs, 60, lambda run, sets: 5.0, compile_run)
    assert details["taken"] == "compile"
    del compiled_runs["compile"]
    assert best_inductor(chain, [], compiled_runs, 60, time_run, compile_run)[1]["taken"] == "a"
    with pytest.raises(RuntimeError, match=r"no torch\.compile variant works"):
        best_inductor(chain, [], compiled_runs, -1, time_run, compile_run)


def test_compilations_of_a_chain_have_separate_code_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []

    def fake_compile(function: object, **options: object) -> object:
        compiled.append((function, options["options"]))
        return function

    monkeypatch.setattr(torch, "compile", fake_compile)
    chain = small(CHAINS["SwiGLU 16384x5504"])
    inputs = chain.tensors("cpu")
    default, with_option = compile_chain(chain), compile_chain(chain, {"combo_kernels": True})
    assert torch.equal(default(inputs), with_option(inputs))
    assert compiled[0][0].__code__ is not compiled[1][0].__code__
    assert [options for _, options in compiled] == [None, {"combo_kernels": True}]


def test_failed_and_wrong_methods_are_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = small(CHAINS["softmax + mask 32768x1024"])

    def fake_compile(_: Chain, options: dict[str, object] | None = None) -> Run:
        if options is None:
            return lambda inputs: chain.function(*inputs) + 1
        return lambda inputs: chain.function(*inputs)

    def fail(*_: object) -> object:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(fusion_chain_methods, "compile_chain", fake_compile)
    monkeypatch.setattr(fusion_chain_methods, "best_inductor", fail)
    inputs = chain.tensors("cpu")
    methods, details = baseline_methods(chain, [inputs], AccuracyCheck(chain, inputs), 60)
    assert list(methods) == ["eager", "eager again", "max-autotune"]
    assert details["failures"]["compile"].startswith("output 0 is off by")
    assert details["failures"]["best Inductor"] == "RuntimeError: out of luck"
    assert details["failures"]["liger"] == "Liger has no kernel that computes softmax_mask"


# -- a committed result ----------------------------------------------------------------------------


def test_kernels_of_a_result_are_rebuilt_without_tuning(tmp_path: Path) -> None:
    result = json.loads((FOLDER / "double_norm_16384x2500.json").read_text())
    stitched = rebuild(CHAINS[result["chain"]], result["stitched"], tmp_path)
    assert kernel_plans(stitched) == result["stitched"]["plans"]
    other = {**result["stitched"], "plans": ["block 1x8, 4 warps"]}
    with pytest.raises(BadInput, match="measure the chain again"):
        rebuild(CHAINS[result["chain"]], other, tmp_path)


@pytest.mark.slow
def test_a_failing_process_gives_its_last_line_of_output(tmp_path: Path) -> None:
    """The process fails with and without a GPU, because the chain does not exist."""
    job = Job("no such chain", ("--out", str(tmp_path), "--one", "no such chain"), monotonic() + 60)
    assert run_in_process(job) == "exit code 1: KeyError: 'no such chain'"


def test_a_process_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: Sequence[str], limit: float) -> tuple[int, str, str]:
        raise TimeoutExpired(command, limit)

    monkeypatch.setattr(chains, "run_within", hangs)
    assert (
        run_in_process(Job("c", (), monotonic() - 9))
        == "the process did not end within the remaining 1 s"
    )
