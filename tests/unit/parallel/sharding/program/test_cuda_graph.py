"""A step that cannot be captured as a CUDA graph is an error, and no time of launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="programs need the extra nostall[torch]")

from benchmarks.sharding.gpu import measure  # noqa: E402
from nostall.parallel.errors import CaptureFailed  # noqa: E402


def test_a_failed_capture_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with pytest.raises(CaptureFailed, match=r"not permitted when stream is capturing\)") as raised:
        measure.measure_kernel(torch.device("cpu"))
    assert isinstance(raised.value.__cause__, RuntimeError)
