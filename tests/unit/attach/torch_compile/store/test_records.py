"""Records of kernels: made from programs, for every dynamic size, and read strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.records import (  # noqa: E402
    KernelComparisonRecord,
    KernelRecord,
    LaunchRecord,
    RegionRecord,
    SelectionRecord,
    StepRecord,
    TensorRecord,
)
from nostall.fusion.codegen.cost.default_plan import default_plan  # noqa: E402
from nostall.fusion.codegen.emit.emit import emit  # noqa: E402
from nostall.fusion.codegen.emit.program import Program  # noqa: E402
from nostall.fusion.codegen.generate import generate, schedule_operators  # noqa: E402
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan  # noqa: E402
from nostall.fusion.codegen.tiling.plan_space import plans  # noqa: E402
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel  # noqa: E402
from nostall.fusion.graph.dynamic_size import resized  # noqa: E402
from nostall.fusion.graph.graph import Graph  # noqa: E402
from tests.unit.fusion.pattern_tables import DYNAMIC, PACKED, PATTERNS  # noqa: E402
from tests.unit.fusion.patterns import layer_norm  # noqa: E402

NEW_FIELDS = {"products_only", "earlier", "whole_logits"}
"""Fields that records of earlier versions do not have."""


@pytest.mark.parametrize("name", PATTERNS)
def test_a_stored_kernel_is_loaded_unchanged(name: str, tmp_path: Path) -> None:
    graph = PATTERNS[name]()
    schedule = schedule_operators(graph, graph.operators)
    program = emit(default_plan(schedule))
    store = KernelStore(tmp_path)
    record, source = store.load_kernel(store.put(program))
    assert record == KernelRecord.from_program(program)
    assert source == program.source
    assert [(x.counts, x.grid, x.num_warps) for x in record.launches] == [
        (x.counts, x.grid, x.num_warps) for x in program.launches
    ]
    nodes = [program.graph[i] for i in (*program.inputs, *program.outputs)]
    tensors = (*record.inputs, *record.outputs)
    assert [(t.shape, t.strides, t.dtype) for t in tensors] == [
        (n.shape, n.strides, n.dtype) for n in nodes
    ]
    # The arguments of each launch are the same tensors by other names.
    names = {f"p{i}": name for i, name in enumerate(program.argument_names)}
    for stored, launch in zip(record.launches, program.launches, strict=True):
        assert tuple(names.get(a, a) for a in stored.arguments) == launch.arguments


def programs(name: str) -> list[Program]:
    """Programs of a pattern of a dynamic size, by every fifth legal plan."""
    if name == "pack":
        graph = PACKED["dynamic"]()
        return [generate(graph, graph.operators)]
    graph = DYNAMIC[name]()
    schedule = schedule_operators(graph, graph.operators)
    return [emit(plan_kernel(schedule, plan)) for plan in plans(schedule).legal_plans[::5]]


@pytest.mark.parametrize("name", [*DYNAMIC, "pack"])
def test_a_record_with_a_size_equals_a_kernel_of_that_size(name: str, tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    for program in programs(name):
        graph = program.graph
        record, _ = store.load_kernel(store.put(program))
        for size in (1, 16, 1009):
            static = Graph(
                tuple(n.resized(graph.varying, size) for n in graph), graph.outputs, None
            )
            found = record.with_size(size)
            tensors = [torch.empty(tensor.shape) for tensor in found.inputs]
            assert record.dynamic_size(tensors) == size
            for launch, planned in zip(found.launches, program.launches, strict=True):
                numbers = (*planned.counts, *planned.grid)
                expected = [resized(number, graph.varying, size) for number in numbers]
                assert [*launch.counts, *launch.grid] == expected
            spaces = [resized(w.elements, graph.varying, size) for w in program.workspaces]
            assert [w.elements for w in found.workspaces] == spaces
            nodes = [static[i] for i in (*program.inputs, *program.outputs)]
            assert [t.shape for t in (*found.inputs, *found.outputs)] == [n.shape for n in nodes]


def test_a_record_contains_whether_inputs_have_to_be_aligned() -> None:
    graph = layer_norm((64, 12288), "float16")
    schedule = schedule_operators(graph, graph.operators)
    for ahead in (False, True):
        program = emit(
            plan_kernel(schedule, KernelPlan("shared", 1, (4096,), 16, async_copies=ahead))
        )
        (launch,) = KernelRecord.from_program(program).launches
        assert launch.aligned == ahead


def test_a_record_contains_dependent_launches_and_older_records_have_none() -> None:
    graph = layer_norm((64, 768), "float16")
    program = emit(
        plan_kernel(schedule_operators(graph, graph.operators), KernelPlan("looped", 1, (1024,), 4))
    )
    record = KernelRecord.from_program(program)
    assert [launch.follows for launch in record.launches] == [True]
    older = json.loads(record.launches[0].json)
    del older["follows"]
    assert not LaunchRecord.read(json.dumps(older).encode()).follows


def test_subclasses_of_plain_types_are_stored_as_plain_values() -> None:
    record = TensorRecord(shape=torch.Size((2, 3)), strides=(3, 1), dtype="float32")
    assert TensorRecord.read(record.json) == record


def test_files_keep_the_field_names_of_the_schema() -> None:
    """Attributes with other names must not change stored files."""
    step = StepRecord(kernel="k", inputs=(0,), outputs=(2,), operators=(1, 2), reduces=True)
    region = RegionRecord(steps=(step,), not_fused={"too wide": 1})
    assert json.loads(region.json) == {
        "schema_version": 1,
        "steps": [
            {"kernel": "k", "reads": [0], "gives": [2], "operators": [1, 2], "reduces": True}
        ],
        "refused": {"too wide": 1},
    }
    selection = SelectionRecord(
        version="inductor",
        reason="slower as a whole",
        kernels=(),
        kept_in_inductor=("a",),
        comparison=None,
        about={},
        created="",
    )
    assert list(json.loads(selection.json)) == [
        "schema_version",
        "version",
        "reason",
        "kernels",
        "left",
        "regions",
        "compared",
        "about",
        "created",
        "products_only",
        "earlier",
        "whole_logits",
        "fewer_chunks",
        "tuned",
        "blocks",
    ]
    older = {k: v for k, v in json.loads(selection.json).items() if k not in NEW_FIELDS}
    assert SelectionRecord.read(json.dumps(older).encode()) == selection


@pytest.mark.parametrize(
    ("stitched", "null", "faster", "slower"),
    [
        (0.5, 1.0, True, False),
        (1.0, 1.0, False, False),
        (0.9, 0.8, False, False),  # the null gains more than the kernels
        (2.0, 1.0, False, True),
    ],
)
def test_only_a_gain_beyond_the_noise_is_faster(
    stitched: float, null: float, faster: bool, slower: bool
) -> None:
    samples = {"inductor": (1.0,) * 20, "stitched": (stitched,) * 20, "null": (null,) * 20}
    record = KernelComparisonRecord(kernels=("k",), kind="measured", clock="c", **samples)
    assert (record.is_faster, record.is_not_faster, record.is_slower) == (
        faster,
        not faster,
        slower,
    )
    failed = KernelComparisonRecord(
        kernels=("k",), kind="measured", clock="c", **samples, failure="no memory"
    )
    assert not (failed.is_faster or failed.is_not_faster or failed.is_slower)
