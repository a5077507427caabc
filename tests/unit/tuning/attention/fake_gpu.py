"""A driver for Triton without a GPU: everything is real but loading and running a cubin.

Triton specialises and compiles for sm_90 and calls the launcher as on a GPU. The launcher computes
attention from the arguments of the launch, and notes which cubin ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from nostall.core.errors import BadInput
from nostall.gpu import Outcome
from nostall.tuning.attention.evaluator import StepEvaluator


class FakeGpu:
    """A driver with one sm_90 GPU, whose launches of ``meta_attention`` compute attention."""

    def __init__(self) -> None:
        self.utils = self
        self.cubins: list[bytes] = []
        """Loaded cubins; the handle of a function is the place in this list."""
        self.ran: dict[str, bytes] = {}
        """The cubin that ran last, by the name of the kernel."""
        self.is_wrong: Callable[[bytes], bool] = lambda cubin: False
        """Whether a cubin computes another result."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.cubins.append(cubin)
        return None, len(self.cubins) - 1, 32, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            cubin = self.cubins[function]
            self.ran[metadata.name] = cubin
            if metadata.name == "meta_attention":
                arguments = dict(zip(source.fn.arg_names, rest[4:], strict=True))
                attend(arguments)
                if self.is_wrong(cubin):
                    arguments["out"][-1, -1, -1] += 1.0

        return launch


def attend(arguments: Mapping[str, Any]) -> None:
    """Causal attention of packed queries over pages, in fp64."""
    query, out = arguments["query"], arguments["out"]
    starts, lengths = arguments["query_starts"].tolist(), arguments["kv_lengths"].tolist()
    group = arguments["HEADS"] // arguments["KV_HEADS"]
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        count = rows.stop - rows.start
        at = torch.arange(length)
        pages = arguments["block_table"][sequence, at // arguments["PAGE"]].long()
        index = (pages, at % arguments["PAGE"])
        keys, values = (
            arguments[name][index].double().repeat_interleave(group, 1)
            for name in ("keys", "values")
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), keys) * arguments["scale"]
        hidden = at[None, :] > (length - count + torch.arange(count))[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


class InProcess:
    """A device whose evaluator runs in this process."""

    def __init__(self, evaluator: StepEvaluator) -> None:
        self.evaluator = evaluator
        self.info = evaluator.info()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(self, cubin: bytes) -> Outcome:
        return self.evaluator.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        if rounds < 2:
            raise BadInput("too few rounds")
        outcome = self.evaluator.check(cubin, 0, checks)
        return outcome if outcome.status != "agrees" else self.evaluator.compare(cubin, rounds)
