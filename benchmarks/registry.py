"""The table of all benchmarks; ``python -m benchmarks`` and ``benchmarks/README.md`` use it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

ROOT = Path(__file__).resolve().parent
Needs = Literal["CPU", "GPU", "2 GPUs", "2 or more GPUs", "CPU and public data"]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: a module with ``add_options(parser)`` and ``main(options)``."""

    name: str
    """``LEVEL.NAME``, the argument of ``python -m benchmarks run``."""
    module: str
    """Module below ``benchmarks``."""
    needs: Needs
    question: str
    """Question that the result answers, in one sentence."""
    results: tuple[str, ...] = ()
    """Committed result files or folders below ``benchmarks``."""
    page: str = ""
    """Page below ``docs/results`` that shows the results."""

    def load(self) -> ModuleType:
        return import_module(f"benchmarks.{self.module}")


def _row(
    name: str, needs: Needs, question: str, results: str = "", page: str = "", module: str = ""
) -> Benchmark:
    level = name.partition(".")[0]
    files = tuple(f"{level}/results/{file}" for file in results.split())
    return Benchmark(name, module or name, needs, question, files, page)


BENCHMARKS: tuple[Benchmark, ...] = (
    # SASS schedules
    _row("sass.mobility", "CPU", "How many instructions of each example kernel can move?",
         "mobility.json", "sass-modelled.md"),
    _row("sass.strategies_on_model", "CPU", "Which search strategy wins on the SM model?",
         "strategies_on_model.json", "sass-modelled.md"),
    _row("sass.static_speed", "CPU", "How fast are parsing, verifying, proposing and the SM model?",
         "static_speed.json", "sass-modelled.md"),
    _row("sass.random_walks", "CPU", "Does the verifier accept what legal moves reach?",
         "random_walks.json", "sass-modelled.md", module="sass.verifier.random_walks"),
    _row("sass.cover_rules", "CPU", "Which in-order rules does compiler output need?",
         "cover_rules.json", module="sass.verifier.cover_rules"),
    _row("sass.witnessed_pairs", "CPU",
         "Which pairs of in-order rules does compiler output need, in how many functions?",
         module="sass.verifier.witnessed_pairs"),
    _row("sass.cover_gaps", "CPU", "Which further in-order rules does refused code need?",
         "cover_gaps.json", module="sass.verifier.cover_gaps"),
    _row("sass.warpgroup_audit", "CPU", "Do compilers reuse registers of running products?",
         "warpgroup_audit.json", module="sass.verifier.warpgroup_audit"),
    _row("sass.fuzz", "CPU", "Do damaged cubins end in a clear error?", "fuzz.json",
         module="sass.robustness.fuzz"),
    _row("sass.false_alarms", "CPU",
         "How many functions of libraries that were not mined does the verifier refuse?",
         "false_alarms.json false_alarms_before_repair.json false_alarms_blind.json "
         "false_alarms_blind_after.json false_alarms_blind_2.json false_alarms_blind_2_after.json "
         "false_alarms_blind_3.json false_alarms_blind_4.json false_alarms_blind_4_after.json",
         module="sass.verifier.false_alarms"),
    _row("sass.lowered_stalls", "CPU",
         "Is each lowered stall between dependent neighbours refused?", "lowered_stalls.json",
         module="sass.verifier.lowered_stalls"),
    _row("sass.kill_resume", "CPU", "Does a killed search resume to the same result?",
         "kill_resume.json", module="sass.robustness.kill_resume"),
    _row("kernels.inductor", "GPU",
         "Which kernel does torch.compile write for a layer norm + GELU?"),
    _row("sass.compiler_baseline", "GPU", "What is the fastest compiler configuration of a kernel?",
         "compiler_baseline.json", "sass.md"),
    _row("sass.suite", "GPU", "How much faster do searched schedules run?",
         "suite.json.gz", "sass.md"),
    _row("sass.stall_reasons", "GPU", "What do the suite's kernels wait for (ncu)?",
         "stall_reasons.json", "sass.md"),
    _row("sass.random_walks_on_gpu", "GPU", "Do legal schedules compute the same bits?",
         "random_walks_on_gpu.json", "sass.md",
         "sass.gpu_walks.random_walks_on_gpu"),
    _row("sass.measured_distances", "GPU",
         "How close may a fixed-latency result and its reader issue?",
         "measured_distances.json.gz witnesses.json.gz", "issue-distances.md",
         "sass.distances.measured_distances"),
    _row("sass.freed_slack", "CPU", "How many cycles do measured distances free?",
         "freed_slack.json", "issue-distances.md", "sass.distances.freed_slack"),
    _row("sass.soak", "GPU", "Does a search continue after moves that break kernels on purpose?",
         "soak.json soak_more.json", "sass.md", module="sass.robustness.soak"),
    _row("sass.measurement_checks", "GPU", "Do inputs, comparisons, clocks and nulls hold?",
         "measurement_checks.json", "sass.md"),
    _row("sass.load_overlap", "GPU", "What does loading modules ahead gain?", "load_overlap.json",
         "sass.md"),
    _row("sass.farm_throughput", "2 or more GPUs", "How many candidates a second do N GPUs try?",
         "farm_throughput.json", "sass.md"),
    # PTX
    _row("ptx.validator", "CPU", "Does the validator accept legal PTX and refuse violations?",
         "validator.json", "assembler.md"),
    _row("ptx.random_orders", "CPU", "Does ptxas accept random orders of PTX without new messages?",
         "random_orders.json"),
    _row("ptx.reordered_alarms", "CPU",
         "Does the verifier accept what ptxas makes of re-ordered PTX?",
         "reordered_alarms.json"),
    _row("ptx.regressions", "CPU",
         "Which kernels get worse static properties from a newer ptxas, and what is recovered?",
         "regressions.json.gz", "assembler.md"),
    _row("ptx.regression_times", "GPU",
         "How much time do kernels lose to a newer ptxas, and how much is recovered?",
         "regression_times.json.gz", "assembler.md"),
    _row("ptx.assembler_suite", "GPU", "What does searching the input of ptxas gain?",
         "assembler_suite.json assembler_filling.json unseen_suite.json assembler_peers.json "
         "assembler_low_budgets.json assembler_ablation.json assembler_long.json",
         "assembler.md"),
    _row("ptx.dependent_launch", "GPU", "What do late waits of dependent launches gain in chains?",
         "dependent_launch.json", "assembler.md"),
    _row("ptx.transfer", "GPU", "Do gains survive on another GPU and with another ptxas?",
         "transfer.json", "assembler.md"),
    _row("ptx.stall_reasons", "GPU", "Which stall reasons change with the assembler search?",
         "stall_reasons.json", "assembler.md"),
    # Store
    _row("store.soak", "CPU", "Does the store lose records by kills, a full disk or damage?",
         "soak.json"),
    # Learning
    _row("learning.strategies", "CPU", "Does learning beat annealing on the SM model?",
         "strategies.json", "learning.md"),
    _row("learning.steps_per_second", "CPU", "How many steps a second does the assembly game take?",
         "steps_per_second.json", "learning.md"),
    # Using results
    # Learners
    _row("learners.corpus", "CPU", "Which operators do models of random size call?"),
    _row("learners.gpu_traces", "GPU", "Which kernels do models of random size launch?",
         "gpu_traces.json.gz"),
    _row("learners.kernels", "CPU", "Are kinds of kernels told apart without their names?",
         "kernels.json kernels_max_margin.json", "learners.md"),
    _row("learners.digits", "CPU", "How exact is the multi-view classifier on digits?",
         "digits.json digits_adaptive.json digits_nonlinear.json multiple_features.json",
         "learners.md"),
    _row("learners.topics", "CPU", "Does the topic model find the number of new kinds?",
         "topics.json", "learners.md"),
    _row("learners.operators", "CPU", "Are kinds of models told apart by their operators?",
         "operators.json", "learners.md"),
    _row("learners.seeded_errors", "CPU", "Do tests of single steps catch errors of the samplers?",
         "seeded_errors.json", "learners.md"),
    _row("learners.simulated_calibration", "CPU", "Are ranks of true values uniform?",
         "simulated_calibration.json", "learners.md"),
    _row("attach.attach_points", "GPU", "Does each way in load the optimised bytes?",
         "attach_points.json"),
    # Fusion
    _row("fusion.explorers", "CPU", "How far are the explorers from the proven optimum?",
         "explorers.json", "fusion.md"),
    _row("fusion.coverage", "CPU", "Which operators do fused kernels compute?",
         "coverage.json", "fusion-coverage.md"),
    _row("fusion.host_cost", "CPU", "What does a call of a fused kernel cost on the host?",
         "host_cost.json host_cost_h200.json", "fusion.md"),
    _row("fusion.chains", "GPU", "How fast are fused chains beside torch.compile?",
         "chains", "fusion-chains.md", "fusion.chains.chains"),
    _row("fusion.copy_bandwidth", "GPU", "How long does a copy of a chain's bytes take?",
         "copy_bandwidth.json", "fusion-chains.md", "fusion.chains.mechanisms.copy_bandwidth"),
    _row("fusion.dram_traffic", "GPU", "How many bytes does each method move (ncu)?",
         "dram_traffic.json", "fusion-chains.md", "fusion.chains.mechanisms.dram_traffic"),
    _row("fusion.dropout_seeds", "GPU", "What does drawing seeds in a graph branch gain?",
         "dropout_seeds.json", "fusion-chains.md", "fusion.chains.mechanisms.dropout_seeds"),
    _row("fusion.streamed_outputs", "GPU", "What does evicting large outputs first gain?",
         "streamed_outputs.json", "fusion-chains.md", "fusion.chains.mechanisms.streamed_outputs"),
    _row("fusion.shared_memory_reuse", "GPU", "What does reuse of shared-memory buffers gain?",
         "shared_memory_reuse.json", "fusion-chains.md",
         "fusion.chains.mechanisms.shared_memory_reuse"),
    _row("fusion.program_start_rate", "GPU", "How fast can programs of a kernel start?",
         "program_start_rate.json", "fusion-chains.md",
         "fusion.chains.mechanisms.program_start_rate"),
    _row("fusion.dependent_launch", "GPU", "What does programmatic dependent launch gain?",
         "dependent_launch.json", "fusion-chains.md", "fusion.chains.mechanisms.dependent_launch"),
    _row("fusion.unseen_chains", "GPU",
         "How fast are chains that no rule was written for, and their plans?",
         "unseen_test.json.gz unseen_test_changed.json unseen_autotuned.json unseen_reported.json "
         "unseen_named.json unseen_train.json.gz unseen_fit.json plans_80153b1a.json",
         "fusion-unseen.md", "fusion.unseen.run"),
    _row("fusion.optimizer_steps", "GPU", "What can fused optimiser steps gain?",
         "optimizer_steps.json", "fusion-unseen.md"),
    _row("fusion.list_plans", "GPU", "Which blocks suit kernels over lists of tensors?",
         "list_plans.json", "fusion-unseen.md"),
    _row("fusion.cost_model", "GPU", "Does the cost model rank kernel plans as a GPU does?",
         "cost_model.json.gz", "fusion-cost-model.md", "fusion.cost_model.evaluate"),
    _row("fusion.cost_model_fit", "CPU", "Which coefficients fit the measured plans?",
         "cost_model_fit.json", "fusion-cost-model.md", "fusion.cost_model.fit"),
    _row("fusion.random_graphs", "CPU", "Do kernels of random graphs agree with fp64?",
         "random_graphs_h200.json random_graphs_interpreted.json",
         "fusion.md", "fusion.correctness.random_graphs"),
    _row("fusion.shared_memory_rows", "GPU", "Do kernels with rows in shared memory agree?",
         "shared_memory_rows_h200.json", "fusion.md", "fusion.correctness.shared_memory_rows"),
    _row("fusion.multi_pass_rows", "GPU", "Do kernels that read rows several times agree?",
         "multi_pass_rows_h200.json", "fusion.md", "fusion.correctness.multi_pass_rows"),
    _row("fusion.all_fp32_values", "GPU", "How exact are functions at every fp32 value?",
         "all_fp32_values_h200.json", "fusion.md", "fusion.correctness.all_fp32_values"),
    _row("fusion.opinfo", "CPU", "Do PyTorch's operator samples agree?",
         "opinfo_h200.json opinfo_interpreted.json", "fusion.md", "fusion.correctness.opinfo"),
    # torch.compile
    _row("torch_compile.models", "GPU", "How fast are whole models with backend=\"nostall\"?",
         "models models_repeated models_slow_host", "torch-compile.md"),
    _row("torch_compile.user_models", "GPU",
         "Do whole models gain, as users write them (with --zoo users)?",
         "user_models", "fusion-unseen.md", "torch_compile.models"),
    _row("torch_compile.product_kernels", "GPU",
         "What do kernels of matrix products with their elementwise readers gain over cuBLAS?",
         "product_kernels.json.gz", "fusion-unseen.md"),
    _row("torch_compile.losses", "GPU", "What do losses without logits in memory cost and save?",
         "losses.json losses_backend.json", "torch-compile.md"),
    _row("torch_compile.guarantees", "GPU", "Do the documented guarantees of the backend hold?",
         "guarantees_h200.json", "torch-compile.md"),
    # Pipeline plans
    _row("parallel.dapple_tables", "CPU and public data", "Which published DAPPLE rows match?",
         "dapple_tables.json", "parallel.md", module="parallel.dapple.tables"),
    _row("parallel.optimality_gap", "CPU", "How far are planners from the optimum?",
         "optimality_gap.json", "parallel.md"),
    _row("parallel.planning_time", "CPU", "How long does planning of large models take?",
         "planning_time.json", "parallel.md"),
    _row("parallel.profile_error", "2 or more GPUs",
         "Are whole passes slower than the sum of their profiled layers, and why?",
         "profile_error_4.json profile_error_2.json", "parallel.md"),
    _row("parallel.pass_times", "2 or more GPUs",
         "Which passes take longer than predicted, and why?",
         "pass_times_4.json", "parallel.md"),
    _row("parallel.killed_rank", "2 or more GPUs, or CPU",
         "Does a run end with an error if a rank is killed?",
         "killed_rank_cpu.json killed_rank_4.json", "parallel.md"),
    _row("parallel.captured_steps", "2 or more GPUs",
         "Do captured steps of trainers have the losses and gradients of one process?",
         "captured_steps_2.json", "parallel.md"),
    _row("parallel.peers", "2 or more GPUs",
         "Are captured plans as fast as DDP, FSDP2 and TP, compiled and captured?",
         "peers_2.json", "parallel.md", module="parallel.peers.run"),
    _row("parallel.torch_versions", "CPU", "Do plans train as one process does, by torch version?",
         "torch_versions_2.11.0.json torch_versions_2.13.0.json", "parallel.md"),
    _row("parallel.torchtitan", "CPU", "Does torchtitan run exported plans?",
         "torchtitan.json", "parallel.md"),
    _row("sharding.correctness", "CPU", "Do sharding plans train as one process does?",
         "correctness.json"),
    _row("sharding.planning", "CPU", "How fast are modelled plans beside rules, and how exact?",
         "planning.json"),
    _row("sharding.gpu_plans", "2 or more GPUs",
         "Are sharding plans ranked as they run, and as fast as FSDP2 and tensor parallelism?",
         "gpu_plans_2.json gpu_plans_4_launched.json gpu_plans_4.json gpu_plans_4_busy.json",
         "parallel.md", module="sharding.gpu.plans"),
    _row("sharding.gpu_hybrids", "2 or more GPUs",
         "Are pipelines of sharded stages ranked as they run, among shardings and peers?",
         "gpu_hybrids_4.json", "parallel.md", module="sharding.gpu.hybrids"),
    _row("sharding.processor_fit", "CPU",
         "Do the processor's launches explain the measured sharding plans?",
         "processor_fit.json", "parallel.md"),
    _row("sharding.torch_versions", "CPU", "Which PyTorch versions capture and run shardings?",
         "torch_versions_2.11.0.json torch_versions_2.12.0.json torch_versions_2.13.0.json"),
    _row("sharding.annealing", "CPU", "How far from the optimum is annealing by trees?",
         "annealing.json"),
    _row("sharding.large", "CPU", "How long does sharding a large model on 64 GPUs take?",
         "large.json"),
    _row("sharding.improvement", "CPU", "Does a DQN on improvement episodes pay?",
         "improvement.json"),
    _row("sharding.automap", "CPU", "How many dimensions do Auto-MAP's games partition?",
         "automap.json"),
    _row("sharding.automap_pipelines", "CPU",
         "Which pipeline cuts of Auto-MAP's paper does its explorer find?",
         "automap_pipelines.json"),
    _row("parallel.predicted_vs_measured", "2 or more GPUs",
         "How exact are predicted iteration times?",
         "predicted_vs_measured_2.json predicted_vs_measured_4.json", "parallel.md"),
    # Serving
    _row("serving.table_build", "CPU", "How long does building task tables take?",
         "table_build.json.gz", "serving.md"),
    _row("serving.host_time", "GPU",
         "How long does the host build vLLM's metadata of a decode step?",
         "host_time_h200.json"),
    _row("serving.compile_report", "CPU",
         "Which registers, spills and shared memory do the serving kernels use on sm_90?",
         "compile_report.json", module="serving.checks.compile_report"),
    _row("serving.attention", "GPU",
         "How fast is attention of mixed batches beside FlashAttention-3 and others?",
         "attention.json.gz attention_flashinfer.json.gz attention_sweep_h200.json.gz "
         "tall_variants_h200.json.gz constants_h200.json",
         "serving.md", module="serving.attention.comparison"),
    _row("serving.prefix_groups", "GPU",
         "What does it bring to read a prefix that requests share once for their group?",
         "prefix_groups_h200.json.gz kernel_check_prefixes.json plan_search_h200.json "
         "plan_search_from_rule_h200.json",
         "serving.md", module="serving.attention.prefix_groups"),
    _row("serving.prefix_forests", "GPU",
         "How fast are decodes that read each shared prefix once, beside FlashAttention-3?",
         "prefix_forests_h200.json.gz", "serving.md", module="serving.attention.prefix_forests"),
    _row("serving.fixed_cost", "GPU",
         "What does attention of a decode step cost beside reading its keys?",
         "fixed_cost_h200.json.gz", "serving.md", module="serving.attention.fixed_cost"),
    _row("serving.native_winners", "GPU",
         "What do native schedules of the attention kernels gain over what Triton compiles?",
         "native_winners_h200.json native_winners_later_h200.json native_portfolio.json",
         "serving.md",
         module="serving.attention.native_winners"),
    _row("serving.kernel_check", "GPU",
         "Do the attention kernels compute exact attention, and read nothing out of bounds?",
         "kernel_check.json", "serving.md", module="serving.checks.kernel_check"),
    _row("serving.vllm_checks", "GPU",
         "Does vLLM with nostall's back end survive sleep and stress, and compute the same?",
         "sleep_h200.json stress_h200.json ngram_h200.json", module="serving.checks.vllm_checks"),
    _row("serving.sanitized_forests", "GPU",
         "Do decodes of random prefix forests read and write nothing out of bounds?",
         "sanitized_forests_h200.json", module="serving.checks.sanitized_forests"),
    _row("serving.gemm", "GPU", "What does the table over M gain over F.linear?",
         "gemm_h200.json.gz gemm_tp8_h200.json.gz gemm_best_h200.json.gz", "serving.md"),
    _row("serving.rollouts", "GPU",
         "How fast does vLLM decode samples of shared prompts with nostall's plug-in?",
         "rollouts_shared_h200.json rollouts_unshared_h200.json rollouts_engines_h200.json "
         "rollouts_slots_h200.json",
         "serving.md",
         module="serving.engine.rollouts"),
    _row("serving.vllm_engine", "GPU", "How fast does vLLM serve with nostall's plug-in?",
         "vllm_engine.json vllm_engine_unspeculated.json vllm_engine_alone.json", "serving.md",
         module="serving.engine.vllm_engine"),
    _row("serving.forced_tokens", "GPU",
         "Does vLLM with nostall's plug-in compute what it computes with FlashAttention alone?",
         "forced_tokens_h200.json.gz forced_shared_h200.json.gz forced_tp_h200.json.gz",
         "serving.md",
         module="serving.engine.forced_tokens"),
    _row("serving.step_costs", "GPU", "How long do vLLM's steps take, by what they compute?",
         module="serving.engine.step_costs"),
    _row("serving.simulated_engine", "CPU and public data",
         "How far is the simulated engine from a real vLLM?", "simulated_engine.json",
         "serving.md", module="serving.engine.simulated_engine"),
    # Whole programs
    _row("optimizing.programs", "GPU",
         "How fast are whole programs as written, with their best settings, and with a bundle?",
         "programs_h200.json", module="optimizing.whole_programs"),
    # Readers of files
    _row("readers.fuzz", "CPU", "Do damaged files end in a result or in a clear error?",
         "fuzz fuzz_more"),
    # Jobs and traces
    _row("workload.gpu", "GPU", "How long do operators, copies and steps take?",
         "gpu.json", "workload.md"),
    _row("workload.fit", "CPU", "How exact is the job model with fitted efficiencies?",
         "fit.json", "workload.md"),
    _row("workload.slowdown", "CPU and public data", "How exact is predicted multi-node slow-down?",
         "slowdown.json", "workload.md"),
    _row("workload.hta", "CPU and public data", "Do trace figures agree with HTA?",
         "hta.json", "workload.md"),
    _row("workload.tracelens", "CPU and public data", "Do trace figures agree with TraceLens?",
         "tracelens.json", "workload.md"),
    _row("workload.kernel_kinds", "CPU and public data",
         "Do the kernels of public traces have the kinds that they have by hand?",
         "kernel_kinds.json"),
    _row("workload.reading_speed", "CPU", "How fast are traces read?", "reading_speed.json",
         "workload.md"),
    _row("workload.synthetic_population", "CPU", "What does the model say of synthetic jobs?",
         "synthetic_population.json", "workload.md"),
)  # fmt: skip


def find(name: str) -> Benchmark:
    """The benchmark with this name; raises KeyError with the allowed names."""
    for benchmark in BENCHMARKS:
        if benchmark.name == name:
            return benchmark
    known = ", ".join(benchmark.name for benchmark in BENCHMARKS)
    raise KeyError(f"unknown benchmark {name!r}; allowed are {known}")
