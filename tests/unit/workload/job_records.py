"""Hardware, jobs and hypothesis strategies that several tests of the workload model use."""

from __future__ import annotations

from hypothesis import strategies as st

from nostall.workload import Architecture, Hardware, Job, Resource

TEST_HARDWARE = Hardware(
    name="round numbers",
    flops={"fp32": 10e12},
    memory=1e12,
    memory_size=16e9,
    pcie=10e9,
    nvlink=50e9,
    ethernet=3.125e9,
    gpus_per_server=8,
)
"""Link rates of arXiv:1910.05930, which closed-form tests need; other rates are round numbers."""

LINK_AND_MEMORY_RATES = (Resource.MEMORY, Resource.PCIE, Resource.NVLINK, Resource.ETHERNET)


def make_job(architecture: Architecture = Architecture.PS_WORKER, **changes: object) -> Job:
    """A job that uses every resource of its architecture."""
    fields: dict[str, object] = {
        "replicas": 1 if architecture is Architecture.SINGLE else 8,
        "batch": 32,
        "flops": 1e12,
        "memory_bytes": 50e9,
        "input_bytes": 40e6,
        "dense_bytes": 400e6,
        "embedding_bytes": 2e9,
        "touched_bytes": 20e6,
    }
    return Job("job", architecture, **{**fields, **changes})  # type: ignore[arg-type]


byte_counts = st.floats(min_value=0, max_value=1e11)


@st.composite
def jobs(draw: st.DrawFn, *architectures: Architecture) -> Job:
    """Any job with one of these architectures; with any architecture if there are none."""
    architecture = draw(st.sampled_from(architectures or tuple(Architecture)))
    is_single = architecture is Architecture.SINGLE
    return Job(
        name="drawn",
        architecture=architecture,
        replicas=1 if is_single else draw(st.integers(1, 300)),
        batch=draw(st.integers(1, 10_000)),
        flops=draw(st.floats(min_value=1, max_value=1e14)),
        memory_bytes=draw(byte_counts),
        input_bytes=draw(byte_counts),
        dense_bytes=draw(byte_counts),
        embedding_bytes=draw(byte_counts),
        touched_bytes=draw(byte_counts),
        weight_traffic=draw(st.none() | byte_counts),
    )
