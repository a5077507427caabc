"""Tests of loading and tracing targets of `nostall fuse`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.core.errors import BadInput
from nostall.tuning.fusing.target import FusionRequest, TracedTarget, trace_target

FILE = """
import torch
from torch import nn
from torch.nn import functional as F

def inputs():
    return torch.randn(64, 512), torch.ones(512)

def named():
    return {"weight": torch.ones(512), "x": torch.randn(64, 512)}

def norm(x, weight):
    return F.rms_norm(x, (512,), weight)

def two(x, weight):
    return x * weight, {"sum": x.sum(-1), "text": "as it is"}

def scaled(x, by, twice=False):
    return x.exp() * (by * 2 if twice else by)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(512, 512, bias=False), nn.LayerNorm(512)
        self.down = nn.Linear(512, 512, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.norm(x + self.down(self.up(x)))

net = Net()

def build():
    return Net(), (torch.randn(8, 512, requires_grad=False),)

def huge():
    return nn.LayerNorm(10**11), torch.empty(10**11)

def branch(x):
    return x * 2 if x.sum() > 0 else x

def in_place(x):
    x.add_(1)
    return x * 2

def some(x):
    return torch.nonzero(x).float() * 2

def product(x):
    return (x * 2).real

def double(x):
    return x.exp() * 2

def broken():
    raise RuntimeError("not today")

def nothing():
    return 3
"""

FILE_WITH_TENSORS = """
import torch
from torch import nn

TABLE = torch.linspace(0, 1, 16)

def with_table(x):
    return x.exp() * TABLE

class Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.linspace(0, 1, 16)

    def forward(self, x):
        return x.exp() * self.slopes

slopes = Slopes()
compiled = torch.compile(slopes)

compiled_function = torch.compile(with_table)

@torch.compile
def calls_compiled(x):
    return compiled_function(x)

TABLES = [TABLE]

def hidden_table(x):
    return x * TABLES[0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("target") / "program.py"
    path.write_text(FILE)
    return str(path)


def trace(file: str, name: str, *more: str | None, backward: bool = False) -> TracedTarget:
    return trace_target(FusionRequest(f"{file}:{name}", *more, backward=backward))


def operator_counts(traced: TracedTarget) -> list[int]:
    return [len(captured.graph.operators) for captured in traced.passes.values()]


def test_inputs_come_from_a_function_of_the_file(file: str) -> None:
    traced = trace(file, "norm")
    assert (traced.name, traced.inputs) == ("norm", ("float32[64, 512]", "float32[512]"))
    assert list(traced.passes) == ["inference"] and operator_counts(traced)[0] > 3
    graph = trace(file, "norm", "named").passes["inference"].graph
    assert {graph[index].shape for index in graph.inputs} == {(64, 512), (512,)}


def test_inputs_and_dtype_come_from_the_request(file: str) -> None:
    traced = trace(file, "norm", "32x512,512", "bfloat16")
    assert traced.inputs == ("bfloat16[32, 512]", "bfloat16[512]")
    graph = traced.passes["inference"].graph
    assert {graph[index].dtype for index in graph.outputs} == {"bfloat16"}


def test_numbers_become_constants(file: str) -> None:
    graph = trace(file, "scaled", "8x8,=0.5,=True").passes["inference"].graph
    assert len(graph.inputs) == 1
    assert [node["value"] for node in graph if node.op == "constant"] == [1.0]


def test_backward_pass_covers_all_results(file: str) -> None:
    traced = trace(file, "two", backward=True)
    assert list(traced.passes) == ["forward", "backward"] and min(operator_counts(traced)) >= 1
    # Both results pass gradients on to x: one of (64, 512), one of (64,).
    graph = traced.passes["backward"].graph
    assert {(64, 512), (64,)} <= {graph[index].shape for index in graph.inputs}


@pytest.mark.parametrize("name", ["Net", "net", "build"])
def test_target_can_be_a_module_a_class_or_a_factory(file: str, name: str) -> None:
    inputs = None if name == "build" else "8x512"
    traced = trace(file, name, inputs, "float16", backward=name == "net")
    forward = traced.passes["forward" if name == "net" else "inference"].graph
    # x, the weight that both products share, the norm's weight and bias; all in half precision.
    assert {forward[index].dtype for index in forward.inputs} == {"float16"}
    assert len(forward.inputs) == 4


def test_model_larger_than_memory_is_traced(file: str) -> None:
    traced = trace(file, "huge")
    assert traced.inputs == ("float32[100000000000]",)
    unsupported = traced.passes["inference"].report.unsupported
    assert {reason for reason, _ in unsupported} == {"more than 2^31 - 1 elements"}


@pytest.mark.parametrize(
    ("name", "inputs", "reason"),
    [
        ("some", "8x64", "data-dependent shape"),
        ("product", "8x8:c64", "dtype complex64"),
        ("double", "65536x32768", "more than 2^31 - 1 elements"),
    ],
)
def test_unsupported_calls_are_counted(file: str, name: str, inputs: str, reason: str) -> None:
    report = trace(file, name, inputs).passes["inference"].report
    assert reason in {counted for counted, _ in report.unsupported}


def test_input_mutated_in_place_is_an_output(file: str) -> None:
    graph = trace(file, "in_place", "8x64").passes["inference"].graph
    assert [graph[index].op for index in graph.outputs] == ["add", "mul"]


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("missing", None, "has no function 'missing'; it has: inputs, named, norm, "),
        ("norm", "8x64", "missing a required argument: 'weight'; give other inputs with --inputs"),
        ("norm", "8x64,5", "PyTorch cannot trace norm: "),
        ("norm", "named2", "input 'named2' is invalid"),
        ("branch", "8x64", "no branches on values of tensors"),
        ("broken", None, "failed: RuntimeError: not today"),
        ("nothing", None, "takes no parameters and returned a int"),
    ],
)
def test_untraceable_targets_are_rejected(
    file: str, name: str, inputs: str | None, message: str
) -> None:
    with pytest.raises(BadInput) as error:
        trace(file, name, inputs)
    assert message in str(error.value) and f"{file}:{name}" in str(error.value)


def test_backward_without_gradients_is_rejected(file: str) -> None:
    with pytest.raises(BadInput, match="no backward pass"):
        trace(file, "some", "8x64", backward=True)


def test_missing_inputs_error_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("def f(x):\n    return x * 2\n")
    with pytest.raises(BadInput, match=r"give --inputs 4096x5000:f16.*inputs\(\)"):
        trace_target(FusionRequest(f"{tmp_path}/bare.py:f"))
    (tmp_path / "bad.py").write_text("import nothing_like_that\n")
    with pytest.raises(BadInput, match="cannot import"):
        trace_target(FusionRequest(f"{tmp_path}/bad.py:f"))


@pytest.fixture(scope="module")
def file_with_tensors(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tensors") / "program.py"
    path.write_text(FILE_WITH_TENSORS)
    return str(path)


@pytest.mark.parametrize("name", ["with_table", "Slopes", "slopes", "compiled", "calls_compiled"])
@pytest.mark.parametrize("backward", [False, True])
def test_tensors_of_the_file_and_compiled_functions_are_traced(
    file_with_tensors: str, name: str, backward: bool
) -> None:
    request = FusionRequest(f"{file_with_tensors}:{name}", "4x16", "bfloat16", backward=backward)
    graph = next(iter(trace_target(request).passes.values())).graph
    (product,) = (node for node in graph if node.op == "mul")
    table = graph[max(product.inputs, key=lambda index: graph[index].op == "input")]
    # The table is an input that keeps its dtype.
    assert (table.op, table.shape, table.dtype) == ("input", (16,), "float32")


def test_a_function_may_read_values_of_tensors_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "values.py").write_text(
        "import torch\nFLAGS = torch.tensor([1, 0, 1])\n"
        "def f(x):\n    for k in FLAGS.tolist():\n        if k: x = torch.tanh(x)\n    return x\n"
    )
    graph = trace_target(FusionRequest(f"{tmp_path}/values.py:f", "4x16")).passes["inference"].graph
    assert [node.op for node in graph].count("tanh") == 2


def test_a_tensor_that_cannot_be_traced_names_the_remedy(file_with_tensors: str) -> None:
    with pytest.raises(BadInput, match="or make them buffers of a module"):
        trace_target(FusionRequest(f"{file_with_tensors}:hidden_table", "8x16"))
