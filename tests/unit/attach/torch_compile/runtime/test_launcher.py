"""Direct launches of stitched kernels: with Triton's arguments, and only if results are equal."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from nostall.attach.torch_compile.runtime import custom_op, launcher  # noqa: E402
from nostall.attach.torch_compile.runtime.launcher import Launcher  # noqa: E402
from nostall.attach.torch_compile.store.records import (  # noqa: E402
    KernelRecord,
    LaunchRecord,
    TensorRecord,
    WorkspaceRecord,
)
from nostall.fusion.codegen.runtime.kernel import BadTensor  # noqa: E402


def kernel_source(p0: Any, p1: Any, p2: Any, w: Any, count: Any) -> None:
    """The source of a kernel, for Triton's JIT."""


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
    """A compiled kernel that fills its result, the third tensor of both launches, with one byte."""

    function, packed_metadata = 17, (2, 1, 0)

    def __init__(self) -> None:
        # Arguments of each launch.
        self.launches: list[tuple[Any, ...]] = []
        # Whether direct launches write another byte than Triton's.
        self.differs = False

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)
        is_direct = isinstance(arguments[9], int)
        ctypes.memset(addresses(arguments)[2], 60 + (self.differs and is_direct), 4 * 8 * 2)

    def launch_metadata(self, *_: Any) -> None: ...


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch) -> Binary:
    """Triton's launch with a fake binary and a driver without a GPU."""

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 5

        def get_current_target(self) -> Any:
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    fake = Binary()
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", lambda *_, **__: fake)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(launcher, "_current_stream", lambda device: 5)
    return fake


@pytest.fixture
def call(binary: Binary) -> Launcher:
    function = triton.runtime.jit.JITFunction(kernel_source, do_not_specialize=["count"])
    return Launcher(RECORD, lambda: [function, function])


def inputs() -> list[Tensor]:
    return [torch.ones(4, 8), torch.ones(8)]


def addresses(arguments: tuple[Any, ...]) -> list[int]:
    """Addresses of the tensors of a launch, and the integers after them."""
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments[9:]]


def test_direct_launches_pass_the_same_arguments_as_triton(call: Launcher, binary: Binary) -> None:
    tensors = inputs()
    (first,) = call(tensors)
    by_triton, binary.launches = binary.launches[:2], []
    (second,) = call(tensors)
    assert len(by_triton) == len(binary.launches) == 2
    moved = {first.data_ptr(): second.data_ptr()}
    for direct, triton_, workspace in zip(binary.launches, by_triton, (3, 1), strict=True):
        assert direct[:6] == triton_[:6]
        assert direct[6:9] == (None, None, None)
        assert all(isinstance(x, int) for x in direct[9:])
        moved[addresses(triton_)[workspace]] = addresses(direct)[workspace]
        assert addresses(direct) == [moved.get(a, a) for a in addresses(triton_)]
    # Both launches share the workspace.
    assert addresses(binary.launches[0])[3] == addresses(binary.launches[1])[1]
    assert (second.shape, second.stride(), second.dtype) == ((4, 8), (8, 1), torch.float16)


@pytest.mark.parametrize("is_general", [True, False])
def test_other_sizes_of_a_kernel_are_launched_directly_at_once(
    binary: Binary, is_general: bool
) -> None:
    """Unless Triton compiles other binaries for other counts."""
    names = ["count"] if is_general else []
    function = triton.runtime.jit.JITFunction(kernel_source, do_not_specialize=names)
    checked: dict[int, Any] = {}
    first = Launcher(RECORD, lambda: [function, function], use_cache=False, checked=checked)
    first(inputs())
    launches = tuple(structs.replace(each, counts=(8,)) for each in RECORD.launches)
    larger = structs.replace(RECORD, launches=launches)
    binary.launches = []
    Launcher(larger, lambda: [function, function], use_cache=False, checked=checked)(inputs())
    if not is_general:
        assert isinstance(binary.launches[0][9], Tensor)
        return
    assert len(binary.launches) == 2
    assert all(isinstance(each[9], int) and each[-1] == 8 for each in binary.launches)


def test_a_direct_launch_with_other_results_is_not_used(
    call: Launcher, binary: Binary, caplog: pytest.LogCaptureFixture
) -> None:
    binary.differs = True
    for _ in range(2):
        binary.launches = []
        (result,) = call(inputs())
        assert isinstance(binary.launches[0][9], Tensor)
        assert result.view(torch.uint8).eq(60).all()
    assert "if it is launched directly" in caplog.text


def test_misaligned_tensors_are_launched_by_triton(call: Launcher, binary: Binary) -> None:
    call(inputs())
    misaligned = torch.ones(9)[1:]
    binary.launches = []
    call([inputs()[0], misaligned])
    assert any(isinstance(argument, Tensor) for argument in binary.launches[0])


def test_misaligned_tensors_that_a_kernel_changes_are_not_copied_at_each_call(
    call: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Tensor] = []
    changing = Launcher(replace(RECORD, mutated=1), call._functions)
    monkeypatch.setattr(Tensor, "clone", lambda tensor: copies.append(tensor) or tensor)
    changing([torch.ones(33)[1:].view(4, 8), torch.ones(8)])
    assert not copies
    changing(inputs())
    assert copies


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "may_check"),
    [(400, 0, 0, True), (384, 0, 0, False), (100, 900, 600, True), (100, 900, 620, False)],
)
def test_unused_memory_of_the_allocator_counts_as_free(
    call: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    reserved: int,
    allocated: int,
    may_check: bool,
) -> None:
    """The kernel changes 128 bytes, of which three copies are needed."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 30))
    stats = {"reserved_bytes.all.current": reserved, "allocated_bytes.all.current": allocated}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert may_check_on_gpu(call) == may_check


@pytest.mark.parametrize(("free", "may_check"), [(400, True), (384, False)])
def test_an_allocator_without_statistics_has_no_unused_memory(
    call: Launcher, monkeypatch: pytest.MonkeyPatch, free: int, may_check: bool
) -> None:
    def no_statistics(device: Any) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_stats", no_statistics)
    assert may_check_on_gpu(call) == may_check


def may_check_on_gpu(call: Launcher) -> bool:
    """Whether the call of a kernel that changes 128 bytes on a GPU would be checked."""
    changing = Launcher(replace(RECORD, mutated=1), call._functions)
    on_gpu: Any = SimpleNamespace(
        is_cuda=True,
        device="cuda",
        numel=lambda: 32,
        element_size=lambda: 4,
        data_ptr=lambda: 0,
        get_device=lambda: 0,
    )
    return changing._may_check([on_gpu, on_gpu])


IN_PLACE = KernelRecord(
    source="s",
    plan="",
    inputs=(tensor(4, 8, dtype="float16"), tensor(4, 8), tensor(8)),
    outputs=(),
    launches=(
        LaunchRecord(
            name="k", arguments=("p1", "p2", "p0", "p1"), counts=(4,), grid=(4, 1), num_warps=2
        ),
    ),
    workspaces=(),
    mutated=1,
)
"""A kernel over lists: it overwrites its first input, and returns nothing."""


def test_a_direct_call_in_place_allocates_nothing_and_reads_no_value(
    call: Launcher, binary: Binary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it can be captured in a CUDA graph, whose replays run none of its Python code."""
    monkeypatch.setattr(launcher, "_fast_empty", lambda device: out_of_memory)
    changing = Launcher(IN_PLACE, lambda: call._functions()[:1])
    tensors = [torch.zeros(4, 8, dtype=torch.float16), *inputs()]
    assert changing(tensors) == []
    launches = []
    for value in (0.0, float("nan")):
        binary.launches = []
        for each in tensors:
            each.fill_(value)
        with DispatchedOperators() as dispatched:
            assert changing(tensors) == []
        assert dispatched.names == []
        launches.append(binary.launches)
        assert tensors[0].view(torch.uint8).eq(60).all()
    assert launches[0] == launches[1]
    assert len(launches[0]) == 1 and all(isinstance(x, int) for x in launches[0][0][9:])


class DispatchedOperators(TorchDispatchMode):
    """Records the operators that PyTorch runs: copies, allocations, and reads of values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def out_of_memory(*_: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_pool(*_: Any) -> Tensor:
    """As an allocator that is plugged in."""
    raise RuntimeError("std::bad_alloc: out_of_memory")


@pytest.mark.parametrize("clone", [out_of_memory, out_of_pool])
def test_without_memory_for_copies_triton_launches_and_no_copy_is_tried_again(
    call: Launcher, binary: Binary, monkeypatch: pytest.MonkeyPatch, clone: Any
) -> None:
    changing = Launcher(replace(RECORD, mutated=1), call._functions)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", clone)
        (result,) = changing(inputs())
    assert result.view(torch.uint8).eq(60).all()
    binary.launches = []
    changing(inputs())
    assert len(binary.launches) == 2 and isinstance(binary.launches[0][9], Tensor)


def test_without_memory_for_the_results_of_the_check_triton_launches(
    call: Launcher, binary: Binary, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    changing = Launcher(replace(RECORD, mutated=1), call._functions)
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "_fast_empty", lambda device: out_of_memory)
        (result,) = changing(inputs())
    assert result.view(torch.uint8).eq(60).all()
    binary.launches = []
    changing(inputs())
    assert isinstance(binary.launches[0][9], Tensor)
    assert not caplog.records, "nothing is wrong with the kernel"


def test_misaligned_inputs_are_copied_only_for_launches_that_need_alignment(
    call: Launcher, binary: Binary
) -> None:
    first, second = RECORD.launches
    launches = (replace(first, aligned=True), second)
    aligning = Launcher(replace(RECORD, launches=launches), call._functions)
    aligning(inputs())
    misaligned = torch.ones(9)[1:]
    binary.launches = []
    aligning([inputs()[0], misaligned])
    copied, original = addresses(binary.launches[0])[0], addresses(binary.launches[1])[3]
    assert copied % 16 == 0 and copied != misaligned.data_ptr()
    assert original == misaligned.data_ptr()


def test_a_launch_hook_is_called_for_every_launch(call: Launcher, binary: Binary) -> None:
    call(inputs())
    hooks = triton.knobs.runtime.launch_exit_hook

    def hook(*_: Any) -> None: ...

    hooks.add(hook)
    try:
        binary.launches = []
        call(inputs())
    finally:
        hooks.remove(hook)
    assert binary.launches[0][8] is hooks


def test_the_operator_copies_inputs_of_other_strides_and_rejects_other_dtypes(
    call: Launcher, binary: Binary
) -> None:
    op = custom_op.StitchedOp(RECORD, call._functions)
    op(inputs())
    binary.launches = []
    x, y = inputs()
    transposed = torch.ones(8, 4).t()
    op([transposed, y])
    assert addresses(binary.launches[0])[0] == y.data_ptr()
    assert addresses(binary.launches[0])[1] != transposed.data_ptr()
    with pytest.raises(BadTensor, match=r"takes torch\.float32"):
        op([x.double(), y])


def test_compile_also_creates_tritons_launcher_and_ignores_its_errors(
    call: Launcher, binary: Binary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 compiles C code for each signature; errors occur again at the launch."""
    made: list[tuple[Any, Any]] = []
    binary.src, binary.metadata = "signature", "metadata"  # type: ignore[attr-defined]
    driver = triton.runtime.driver.active
    monkeypatch.setattr(driver, "launcher_cls", lambda *args: made.append(args), raising=False)
    call.compile()
    assert made == [("signature", "metadata")] * 2
    monkeypatch.setattr(driver, "launcher_cls", lambda *args: 1 / 0)
    call.compile()
    assert binary.launches == []


def test_dependent_launches_are_compiled_with_the_option_of_the_launch(
    binary: Binary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another binary would be compiled in advance than the one that is launched."""
    # (launch_pdl, whether without a launch) of each compilation.
    compilations: list[tuple[bool, bool]] = []

    def compile_binary(*args: Any, **_: Any) -> Binary:
        compilations.extend(
            (options.launch_pdl, args[-1]) for options in args if hasattr(options, "launch_pdl")
        )
        return binary

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", compile_binary)
    first, second = RECORD.launches
    launches = (replace(first, follows=True), second)
    record = replace(RECORD, launches=launches)
    functions = [triton.runtime.jit.JITFunction(kernel_source) for _ in launches]
    dependent = Launcher(record, lambda: functions)
    dependent.compile()
    dependent(inputs())
    assert compilations == [(True, True), (False, True), (True, False), (False, False)]
