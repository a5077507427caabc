"""A stitched kernel called past Triton's launch: the same arguments, and only where they are."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402
from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile.runtime import custom_op  # noqa: E402
from nostall.attach.torch_compile.runtime import launcher as launching  # noqa: E402
from nostall.attach.torch_compile.runtime.launcher import Launcher  # noqa: E402
from nostall.attach.torch_compile.store.records import (  # noqa: E402
    KernelRecord,
    LaunchRecord,
    TensorRecord,
    WorkspaceRecord,
)
from nostall.fusion.codegen.emit.emit import emit  # noqa: E402
from nostall.fusion.codegen.runtime.kernel import BadTensor  # noqa: E402
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators  # noqa: E402
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan  # noqa: E402
from tests.unit.fusion.patterns import layer_norm  # noqa: E402


def written(p0: Any, p1: Any, p2: Any, w: Any, count: Any) -> None:
    """The source of a kernel, for Triton."""


def tensor(*shape: int, dtype: str = "float32") -> TensorRecord:
    strides = tuple(torch.empty(shape).stride())
    return TensorRecord(shape=shape, strides=strides, dtype=dtype)


RECORD = KernelRecord(
    source="s",
    plan="",
    inputs=(tensor(4, 8), tensor(8)),
    outputs=(tensor(4, 8, dtype="float16"),),
    launches=(
        LaunchRecord(
            name="k", arguments=("p1", "p0", "p2", "w"), counts=(4,), grid=(4, 1), num_warps=2
        ),
        LaunchRecord(
            name="k", arguments=("p0", "w", "p2", "p1"), counts=(7,), grid=(2, 3), num_warps=4
        ),
    ),
    workspaces=(WorkspaceRecord(name="w", dtype="float32", elements=20),),
)


class Binary:
    """What Triton has compiled; ``ran`` is what it was run with.  It writes one byte all over its
    result, the third argument of both launches; ``differs``: another one if run directly."""

    function, packed_metadata = 17, (2, 1, 0)

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.differs = False

    def run(self, *arguments: Any) -> None:
        self.ran.append(arguments)
        directly = isinstance(arguments[9], int)
        ctypes.memset(addresses(arguments)[2], 60 + (self.differs and directly), 4 * 8 * 2)

    def launch_metadata(self, *_: Any) -> None: ...


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch) -> Binary:
    """Triton's own launch up to the driver, which is not here."""

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 5

        def get_current_target(self) -> Any:
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    found = Binary()
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", lambda *_, **__: found)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(launching, "_stream_of", lambda device: 5)
    return found


@pytest.fixture
def launcher(binary: Binary) -> Launcher:
    function = triton.runtime.jit.JITFunction(written, do_not_specialize=["count"])
    return Launcher(RECORD, lambda: [function, function])


def inputs() -> list[Tensor]:
    return [torch.ones(4, 8), torch.ones(8)]


def addresses(arguments: tuple[Any, ...]) -> list[int]:
    """The arguments of a launch from the first tensor on."""
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments[9:]]


def test_later_calls_run_the_binary_with_what_triton_gave_it(
    launcher: Launcher, binary: Binary
) -> None:
    given = inputs()
    (first,) = launcher(given)
    by_triton, binary.ran = binary.ran[:2], []
    (second,) = launcher(given)
    assert len(by_triton) == len(binary.ran) == 2
    moved = {first.data_ptr(): second.data_ptr()}
    for mine, its, workspace in zip(binary.ran, by_triton, (3, 1), strict=True):
        assert mine[:6] == its[:6]
        assert mine[6:9] == (None, None, None)
        assert all(isinstance(x, int) for x in mine[9:])
        moved[addresses(its)[workspace]] = addresses(mine)[workspace]
        assert addresses(mine) == [moved.get(a, a) for a in addresses(its)]
    # Both launches share the workspace.
    assert addresses(binary.ran[0])[3] == addresses(binary.ran[1])[1]
    assert (second.shape, second.stride(), second.dtype) == ((4, 8), (8, 1), torch.float16)


def test_who_gives_other_results_than_triton_does_not_take_over(
    launcher: Launcher, binary: Binary, caplog: pytest.LogCaptureFixture
) -> None:
    binary.differs = True
    for _ in range(2):
        binary.ran = []
        (found,) = launcher(inputs())
        assert isinstance(binary.ran[0][9], Tensor)
        assert found.view(torch.uint8).eq(60).all()
    assert "if not launched by Triton" in caplog.text


def test_other_addresses_go_through_triton(launcher: Launcher, binary: Binary) -> None:
    launcher(inputs())
    odd = torch.ones(9)[1:]
    binary.ran = []
    launcher([inputs()[0], odd])
    assert any(isinstance(argument, Tensor) for argument in binary.ran[0])


def test_what_a_kernel_copies_ahead_begins_at_an_even_place(
    launcher: Launcher, binary: Binary
) -> None:
    first, second = RECORD.launches
    launches = (replace(first, aligned=True), second)
    careful = Launcher(replace(RECORD, launches=launches), launcher._functions)
    careful(inputs())
    odd = torch.ones(9)[1:]
    binary.ran = []
    careful([inputs()[0], odd])
    copied, given = addresses(binary.ran[0])[0], addresses(binary.ran[1])[3]
    assert copied % 16 == 0 and copied != odd.data_ptr()
    assert given == odd.data_ptr()  # the other launch does not ask for it


def test_a_record_says_what_is_copied_ahead() -> None:
    graph = layer_norm((64, 12288), "float16")
    of = schedule_operators(graph, graph.operators)
    for ahead in (False, True):
        program = emit(of, KernelPlan("shared", 1, (4096,), 16, async_copies=ahead))
        (launch,) = KernelRecord.of(program).launches
        assert launch.aligned == ahead


def test_a_profilers_hook_is_told_of_every_launch(launcher: Launcher, binary: Binary) -> None:
    launcher(inputs())
    hooks = triton.knobs.runtime.launch_exit_hook

    def hook(*_: Any) -> None: ...

    hooks.add(hook)
    try:
        binary.ran = []
        launcher(inputs())
    finally:
        hooks.remove(hook)
    assert binary.ran[0][8] is hooks


def test_what_lies_otherwise_is_copied_and_what_is_another_tensor_refused(
    launcher: Launcher, binary: Binary
) -> None:
    runner = custom_op.Runner(RECORD, launcher._functions)
    runner(inputs())
    binary.ran = []
    x, y = inputs()
    turned = torch.ones(8, 4).t()
    runner([turned, y])
    assert addresses(binary.ran[0])[0] == y.data_ptr()
    assert addresses(binary.ran[0])[1] != turned.data_ptr()
    with pytest.raises(BadTensor, match=r"takes torch\.float32"):
        runner([x.double(), y])


def test_what_triton_makes_for_a_first_launch_is_made_without_one(
    launcher: Launcher, binary: Binary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 compiles C for every signature then; a launcher that cannot be made stops nothing
    before the launch."""
    made: list[tuple[Any, Any]] = []
    binary.src, binary.metadata = "signature", "metadata"  # type: ignore[attr-defined]
    driver = triton.runtime.driver.active
    monkeypatch.setattr(driver, "launcher_cls", lambda *one: made.append(one), raising=False)
    launcher.warm()
    assert made == [("signature", "metadata")] * 2
    monkeypatch.setattr(driver, "launcher_cls", lambda *one: 1 / 0)
    launcher.warm()
    assert binary.ran == []


def test_a_kernel_that_waits_is_compiled_and_launched_as_one(
    binary: Binary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same options, or what was compiled ahead would not be what is launched."""
    asked: list[tuple[bool, bool]] = []

    def compiled(*given: Any, **_: Any) -> Binary:
        asked.extend((one.launch_pdl, given[-1]) for one in given if hasattr(one, "launch_pdl"))
        return binary

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", compiled)
    first, second = RECORD.launches
    launches = (replace(first, follows=True), second)
    record = replace(RECORD, launches=launches)
    functions = [triton.runtime.jit.JITFunction(written) for _ in launches]
    found = Launcher(record, lambda: functions)
    found.warm()
    found(inputs())
    assert asked == [(True, True), (False, True), (True, False), (False, False)]


def test_a_record_says_that_a_kernel_waits_and_an_older_one_that_it_does_not() -> None:
    graph = layer_norm((64, 768), "float16")
    program = emit(schedule_operators(graph, graph.operators), KernelPlan("looped", 1, (1024,), 4))
    record = KernelRecord.of(program)
    assert [launch.follows for launch in record.launches] == [True]
    told = json.loads(record.launches[0].json)
    del told["follows"]
    assert not LaunchRecord.read(json.dumps(told).encode()).follows
