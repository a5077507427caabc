"""Settings of the whole process, and loaders: what is set is taken back, or set by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program.changes import ChannelsLast, Compile  # noqa: E402
from nostall.attach.program.changing.loader import Loaders, look_at  # noqa: E402
from nostall.attach.program.changing.settings import (  # noqa: E402
    Attention,
    AttentionCalls,
    ExpandableSegments,
    attention_order,
)
from nostall.attach.program.distances import Outcome, compare  # noqa: E402
from nostall.attach.program.roots import Switch  # noqa: E402
from nostall.attach.program.segments import Segments  # noqa: E402
from nostall.attach.program.shadow import Call  # noqa: E402

nn = torch.nn


def test_the_order_of_attention_is_set_and_taken_back() -> None:
    before, change = attention_order(), Attention([], "cudnn")
    change.on()
    change.on()
    assert attention_order()[0] == "CUDNN_ATTENTION" != before[0]
    change.off()
    change.off()
    assert attention_order() == before
    assert "has set this order" in Attention([], "flash").missing()
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert change.missing() == "the program allows only MATH"
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert change.missing().startswith("the program allows only FLASH_ATTENTION, EFFICIENT")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_another_order_of_attention_is_checked_on_copies() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    switch = Switch(layer, [], lambda *_: None)
    call = Call((*[torch.randn(2, 4, 8)] * 3,), {"need_weights": False}, True, True, None)
    finding = Attention([switch], "cudnn").check({0: [call]})
    assert (finding.result_class, finding.refusal) == ("within rounding", "")


def test_attention_is_noted_until_the_watch_ends() -> None:
    functional, calls = torch.nn.functional, AttentionCalls()
    original = functional.scaled_dot_product_attention
    calls.install(functional)
    functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)
    calls.remove()
    assert functional.scaled_dot_product_attention is original
    assert calls.facts()["calls"] == 0  # on a CPU nothing is to be chosen


def test_expandable_segments_need_a_gpu() -> None:
    if not torch.cuda.is_available():
        assert ExpandableSegments().check({}).refusal == "no GPU is used"


def test_compiled_code_is_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    switch = Switch(model, [], lambda *_: None)
    compiled, layout = Compile([switch], "inductor"), ChannelsLast([switch], [])
    made: list[bool] = []

    def version(self: Compile, module: Any, same_random: bool, own_code: bool = False) -> Any:
        made.append(own_code)
        return len(made)

    monkeypatch.setattr(Compile, "_version", version)
    targets = []
    for on in (False, True, False, True):
        (layout.on if on else layout.off)()
        compiled.on()
        targets.append(switch.target)
    layout.off()
    assert targets == [1, 2, 1, 2] and made == [False, True]


def test_loaders_without_workers_get_some() -> None:
    module = torch.utils.data.dataloader
    loader, init = module.DataLoader, module.DataLoader.__init__
    data = torch.utils.data.TensorDataset(torch.arange(8.0))

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[name-defined,misc]
        def __iter__(self) -> Any:
            return iter(range(3))

    try:
        Loaders("workers=2").install(module)
        changed, own, stream = loader(data, 4), loader(data, 4, num_workers=1), loader(Stream())
    finally:
        loader.__init__ = init
    assert (changed.num_workers, changed.pin_memory) == (2, False)
    first = [batch.tolist() for (batch,) in changed]
    data.tensors = (torch.arange(8.0) + 1,)
    second = [batch.tolist() for (batch,) in changed]
    assert first == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert second == [[1, 2, 3, 4], [5, 6, 7, 8]], "the program changed its data set"
    assert (own.num_workers, stream.num_workers) == (1, 0)


def test_copies_of_a_batch_wait_again_once_the_program_writes_into_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaders = Loaders("workers=2,pinned")
    given: list[Any] = []
    copied = loaders._copied(lambda own, *args, **options: given.append(options))
    batch = torch.ones(2)
    copied(batch, "cuda")
    batch._nostall_version = batch._version
    copied(batch, "cuda")
    copied(batch, "cuda", torch.half, False)
    assert given == [{}, {"non_blocking": True}, {}]
    loaders._batch = [batch]
    batch.add_(1)
    loaders._note(batch)
    copied(batch, "cuda")
    assert given[-1] == {} and "writes into its batches" in capsys.readouterr().err


def test_results_whose_terms_cancel_have_room() -> None:
    """As the gradient of a bias before a batch norm; results of their own size have none."""

    def outcome(bias: float, rest: float = 10.0) -> Outcome:
        return Outcome((), [torch.full((4,), rest), torch.full((4,), bias)], [], False)

    moved = [outcome(1.3e-6, 10.000001)]
    assert compare(outcome(1e-6), outcome(5e-5), moved, 1e-7)[0] == ""
    assert "off by" in compare(outcome(1e-6), outcome(5e-3), moved, 1e-7)[0]
    assert "off by" in compare(outcome(1.0), outcome(1.0 + 5e-5), [outcome(1.0)], 1e-7)[0]


def test_sums_of_batches_end_no_program_and_are_equal_for_equal_batches() -> None:
    assert look_at([torch.empty(2, device="meta"), torch.ones(2)]) == (0.0, False)
    assert look_at([torch.ones(2), {"b": torch.ones(3)}]) == (8.0, False)
    assert look_at(torch.tensor([1.0, float("nan")]))[0] == 1.0, "NaN differs from itself"


@pytest.mark.parametrize("ends", [False, True])
def test_an_optimiser_that_steps_in_the_backward_pass_is_no_part_of_it(ends: bool) -> None:
    clock = [0.0]
    segments = Segments(lambda: clock[0])

    def backward() -> None:
        for seconds in (1.0, 2.0):
            clock[0] += seconds
            segments.optimizer_begins()
            clock[0] += 10 * seconds
            segments.optimizer_ends()
        if ends:  # the step of the program ends here
            assert segments.take()["optimizer"] == 30.0
        clock[0] += 4.0

    segments.timed("backward", backward)()
    assert segments.take() == {
        "forward": 0.0, "backward": 7.0, "optimizer": 0.0 if ends else 30.0, "loader": 0.0
    }  # fmt: skip


def test_sums_of_batches_are_no_time_of_the_loader() -> None:
    clock = [0.0]

    def slow_sum(_: Any) -> tuple[float, bool]:
        clock[0] += 5.0
        return 0.0, False

    segments, module = Segments(lambda: clock[0], slow_sum), torch.utils.data.dataloader
    segments.watch_loader(module)
    try:
        list(module.DataLoader(torch.utils.data.TensorDataset(torch.arange(8.0)), 4))
    finally:
        segments.remove()
    assert (len(segments.batches), segments.seconds["loader"]) == (2, 0.0)
