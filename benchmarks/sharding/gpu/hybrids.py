"""Predicted and measured steps of pipelines with sharded stages on the GPUs of one host.

    NCCL_NVLS_ENABLE=0 python -m benchmarks run sharding.gpu_hybrids --gpus 4 --out OUT.json
    python -m benchmarks run sharding.gpu_hybrids --gpus 4 --device cpu --tiny --out OUT.json

As ``sharding.gpu_plans``, with the same models, rates and peers: pipelines of two, four and eight
micro-batches run beside shardings of the whole batch.  For each number of micro-batches these are
the planner's choice, the best plans of stages of one GPU, of two GPUs and of both, stages of data
parallelism and of Megatron's rules, and other cuts.  Loss and gradients of each plan are compared
with those of one process.  The processor launches all plans operator by operator, as ``nostall
launch`` does.

Plans that OUT.json already has are not run again.
"""

from __future__ import annotations

import argparse

from benchmarks.sharding.gpu.models import MODELS
from benchmarks.sharding.gpu.plans import add_run_options, run_ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--model", choices=["all", *MODELS], default="all")


def main(given: argparse.Namespace) -> None:
    run_ranks(
        argparse.Namespace(**vars(given), graphs=False), "benchmarks.sharding.gpu.hybrid_rank"
    )
