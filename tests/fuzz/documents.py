"""Sound inputs of the readers of traces and tables, for fuzzing."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tests.fuzz.command_line import Original
from tests.unit.workload.trace_events import Event, event, kernel, launch, trace
from tests.unit.workload.traces.chakra.test_reader import METADATA, NODES, stream

H200 = Path(__file__).parents[1] / "unit" / "workload" / "h200"
_EPOCH = 1_700_000_000_000_000
_SHAPES = {"Input Dims": [[64, 128], [128, 32]], "Input type": ["float", "float"]}
_KERNELS = (
    "ampere_sgemm_128x64_nn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
    "triton_poi_fused_add_gelu_0",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
)


def traces() -> Sequence[Original]:
    """Kineto traces of a GPU and of a host, in several layouts, and a piece of a recorded one."""
    gpu, host = trace(*_gpu_events(), world=2), trace(*_host_events(), rank=None)
    recorded = json.loads(gzip.decompress((H200 / "ddp_rank0.json.gz").read_bytes()))
    recorded["traceEvents"] = recorded["traceEvents"][::9][:400]
    gpu_text = json.dumps(gpu).encode()
    other_rank = gpu_text.replace(b'"rank": 0', b'"rank": 1')
    return (
        Original("gpu.json", gpu_text),
        Original("indented.json", json.dumps(gpu, indent=1).encode()),
        Original("list.json", json.dumps(gpu["traceEvents"]).encode()),
        Original("host.json", json.dumps(host).encode()),
        Original("recorded.json", json.dumps(recorded).encode()),
        Original("packed.json.gz", gzip.compress(gpu_text, mtime=0)),
        Original("rank0.json", gpu_text, {"rank1.json": other_rank}),
    )


def _gpu_events() -> list[Event]:
    events = [event("user_annotation", "ProfilerStep#1", _EPOCH, 2000)]
    for n in range(12):
        start = _EPOCH + 100 * n
        events += [
            event("cpu_op", "aten::mm", start, 20, **_SHAPES, **{"External id": n}),
            launch(start + 5, n),
            kernel(_KERNELS[n % 4], start + 15, 60.5, launch=n, stream=7 + n % 2,
                   dtype="Float", **{"External id": n, "In msg nelems": 1000 * n,
                                     "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}),
        ]  # fmt: skip
    copy = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", _EPOCH, 9, stream=7, bytes=4096)
    return [*events, copy, event("cuda_runtime", "cudaDeviceSynchronize", _EPOCH + 1500, 200)]


def _host_events() -> list[Event]:
    events = [event("cpu_op", "enumerate(DataLoader)#_Next", _EPOCH, 90)]
    for n in range(20):
        start = _EPOCH + 100 * (n + 1)
        events += [
            event("cpu_op", "aten::linear", start, 80),
            event("cpu_op", "aten::mm", start, 9),
        ]
    return events


def chakra() -> Sequence[Original]:
    """Chakra traces of 6 and of 60 nodes."""
    return tuple(Original(f"{n}.et", stream(METADATA, *NODES * n)) for n in (1, 10))


_JOBS = """name,architecture,replicas,batch,flops [T],memory_bytes [GB],dense_bytes [MB],precision
resnet,allreduce-local,8,64,1.56,31.9,204,fp32
"ctr, large",PS/Worker,16,512,0.1,1,1,bf16
bert,allreduce-cluster,16,12,2.1,107.3,1000,fp16
speech,1w1g,1,32,7.9,20.4,416,
"""
_STEPS = """model,nodes,gpus,batch,seconds [ms],gradient_bytes [MB]
bert,1,4,8,100,438
bert,2,4,8,190,438
bert,4,4,8,240,438
resnet,1,4,32,90,45
resnet,2,4,32,110,45
resnet,4,4,32,120,45
"""  # fmt: skip


def csv_tables() -> Sequence[Original]:
    """Job tables and step tables, plain and packed."""
    return (
        Original("jobs.csv", _JOBS.encode()),
        Original("jobs.csv.gz", gzip.compress(_JOBS.encode(), mtime=0)),
        Original("steps.csv", _STEPS.encode()),
    )


def parquet_tables() -> Sequence[Original]:
    """Job tables with and without compression and dictionaries."""
    import csv

    import pyarrow
    from pyarrow import parquet

    rows = list(csv.DictReader(io.StringIO(_JOBS)))
    numbers = {"replicas", "batch", "flops [T]", "memory_bytes [GB]", "dense_bytes [MB]"}
    table = pyarrow.table(
        {
            key: [(float(row[key]) if key in numbers else row[key]) or None for row in rows] * 5
            for key in rows[0]
        }
    )
    originals = []
    for number, (compression, dictionary) in enumerate([("snappy", True), ("none", False)]):
        buffer = io.BytesIO()
        parquet.write_table(
            table, buffer, compression=compression, use_dictionary=dictionary, row_group_size=7
        )
        originals.append(Original(f"{number}.parquet", buffer.getvalue()))
    return originals


def hardware_files() -> Sequence[Original]:
    """The presets, each with a job table beside it."""
    folder = resources.files("nostall.workload.hardware").joinpath("presets")
    companions = {"jobs.csv": _JOBS.encode()}
    return tuple(
        Original(file.name, file.read_bytes(), companions)
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
    )
