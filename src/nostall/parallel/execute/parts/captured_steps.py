"""Steps of a part as one CUDA graph, which the processor launches at once.

The graph has the forward and backward pass, the reductions, and the sum of the loss over ranks;
clipping and the optimiser stay outside.  Its first replay is compared with a launched step, with
other weights than at the capture.  A step that does not fit it is launched operator by operator,
and the reason is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.parallel.errors import BadPlan, CaptureFailed
from nostall.parallel.execute.parts.part import LOSS, Part, first_difference
from nostall.parallel.sharding.program.cuda_graph import CudaGraph, all_ranks, wait_in

WARM_UPS = 11
"""Steps before the capture: PyTorch's notes on CUDA graphs ask for these with DDP, which builds its
buckets anew meanwhile."""
FIRST_REPLAY_S = 60.0
"""Longest first replay."""
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative differences of losses and of norms of gradients that a replay may have, by the type of
the computation: kernels that add atomically differ from run to run.  0.03 for other types."""


class CapturedSteps:
    """Steps of a part; all ranks create one, and call the same methods in the same order."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self._part, self._device = part, device
        self._refusal = _refusal(part, device)
        self._has_kept = self._has_whole_loss = False
        self._graph: CudaGraph[torch.Tensor] | None = None
        self._given: list[Any] = []
        """Leaves of the batch that the graph reads."""
        self._gradients: dict[str, torch.Tensor] = {}
        """What the graph writes."""
        self._storage: list[int] = []
        if self._refusal:
            part.note(f"not captured: {self._refusal}")

    @property
    def is_captured(self) -> bool:
        """Whether steps of the plan's batch replay a graph."""
        return self._graph is not None

    @property
    def has_whole_loss(self) -> bool:
        """Whether the loss of the last step is the sum over ranks already."""
        return self._has_whole_loss

    def overwrites(self, gradient: torch.Tensor) -> bool:
        """Whether the next step overwrites a gradient's memory."""
        return self._part.overwrites_gradients or any(
            gradient is own for own in self._gradients.values()
        )

    def step(
        self, inputs: Any, targets: Any, samples: int, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        """As :meth:`.part.Part.step`; gradients may be in memory that the next step overwrites.

        :attr:`has_whole_loss` says whether the returned loss is the sum over ranks.
        """
        self._has_whole_loss = False
        is_whole, self._has_kept = reduce and not self._has_kept, not reduce
        if not self._refusal and self._fits(inputs, targets, samples, is_whole=is_whole):
            if self._graph is None:
                with self._same_buffers():
                    self._capture(inputs, targets)
            if self._graph is not None:
                return self._replay(inputs, targets, scale)
        return self._part.step(inputs, targets, samples, scale=scale, reduce=reduce)

    def close(self) -> None:
        """Destroy the graph, before the process groups that it uses end."""
        if self._graph is not None:
            self._graph.close()
            self._refuse("the graph is closed")
            self._graph = None

    def drop_kept(self) -> None:
        """As :meth:`.part.Part.drop_kept`."""
        self._part.drop_kept()
        self._has_kept = False

    def _fits(self, inputs: Any, targets: Any, samples: int, *, is_whole: bool) -> bool:
        """Whether the graph, if there is one, computes this step; notes why not."""
        reason = ""
        if samples != self._part.samples:
            reason = f"batches of {samples} samples, as the last one of an epoch"
        elif not is_whole:
            reason = "passes of an accumulation with reduce=False"
        elif self._graph is not None and not self._is_like(tree_flatten((inputs, targets))[0]):
            reason = "batches of other shapes, types or values that are no tensors"
        elif self._graph is not None and self._storage != self._pointers():
            reason = "parameters have other memory than at the capture"
        if reason:
            self._part.note(f"launched operator by operator: {reason}")
        return not reason

    def _is_like(self, leaves: list[Any]) -> bool:
        return len(leaves) == len(self._given) and all(map(_is_like, leaves, self._given))

    def _pointers(self) -> list[int]:
        return [_local(p).data_ptr() for p in self._part.parameters.values()]

    def _capture(self, inputs: Any, targets: Any) -> None:
        """Make the graph; a refusal takes its place if that fails on one rank."""
        part, self._graph = self._part, None
        leaves, structure = tree_flatten((inputs, targets))
        self._given = [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]

        def action() -> torch.Tensor:
            own_inputs, own_targets = tree_unflatten(self._given, structure)
            for parameter in part.parameters.values():
                parameter.grad = None
            loss = part.step(own_inputs, own_targets, part.samples)
            dist.all_reduce(loss)
            return loss

        main, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        part.prepare_capture(side)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS - 2):
                action()
            wait = wait_in(action)
            with self._other_weights():
                expected = self._results(action())
        main.wait_stream(side)
        if not all_ranks(not wait):
            self._refuse(f"a step waits for the GPU ({wait or 'on another rank'})")
            return
        try:
            self._graph = CudaGraph.capture(action, warm_ups=0, stream=side)
        except CaptureFailed as error:
            if part.is_lost_by_failed_capture:
                raise BadPlan(
                    f"{part.engine}: {error}; leave --capture or Trainer.capture() out"
                ) from error
            part.drop_capture()
            self._refuse(str(error))
            return
        self._storage = self._pointers()
        self._gradients = {n: p.grad for n, p in part.parameters.items() if p.grad is not None}
        with self._other_weights():
            difference = self._difference(expected)
        if not all_ranks(not difference):
            self._graph.close()
            self._graph = None
            self._refuse(difference or "a replay on another rank differs from a launched step")

    @contextmanager
    def _same_buffers(self) -> Iterator[None]:
        """Undo what the passes before the first replay do to running means and the like."""
        before = [buffer.clone() for buffer in self._part.changed_buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._part.changed_buffers(), before, strict=True):
                    buffer.copy_(value)

    @contextmanager
    def _other_weights(self) -> Iterator[None]:
        """Twice the weights, for a moment: a graph may not keep what depends on them.

        A power of two, so that the weights are exactly the same afterwards.
        """
        own = [_local(p.detach()) for p in self._part.parameters.values()]
        own = [p for p in own if p.is_floating_point() and p.itemsize > 1]  # no product of fp8
        for weight in own:
            weight.mul_(2.0)
        try:
            yield
        finally:  # a caller may go on after an error, such as one of memory
            for weight in own:
                weight.mul_(0.5)

    def _results(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss and the norm of each local gradient."""
        found = {
            f"the norm of the gradient of {n}": torch.linalg.vector_norm(
                _local(p.grad), dtype=torch.float64 if p.dtype is torch.float64 else torch.float32
            )
            for n, p in self._part.parameters.items()
            if p.grad is not None
        }
        return {LOSS: loss.clone(), **found}

    def _difference(self, expected: dict[str, torch.Tensor]) -> str:
        """Replay the graph; where its results differ from those of a launched step, if they do."""
        assert self._graph is not None
        loss = self._graph()
        assert loss is not None
        self._await_first()
        for name, gradient in self._gradients.items():
            self._part.parameters[name].grad = gradient
        found = {name: float(v) for name, v in self._results(loss).items()}
        wanted = {name: float(v) for name, v in expected.items()}
        tolerance = _TOLERANCES.get(self._part.computation_dtype, 0.03)
        if name := first_difference(found, wanted, tolerance):
            values = f"{name} is {found.get(name, 0.0):.6g}, not {wanted[name]:.6g}"
            return f"a replay differs from a launched step: {values}"
        return ""

    def _await_first(self) -> None:
        """Wait for the first replay; NCCL's timeouts do not watch graphs.

        Raises :class:`BadPlan` if ranks wait for each other.
        """
        if self._device.type != "cuda":
            return
        done, until = torch.cuda.Event(), monotonic() + FIRST_REPLAY_S
        done.record()
        while not done.query():
            if monotonic() > until:
                raise BadPlan(
                    f"{self._part.engine}: the first replay of the captured step did not end in "
                    f"{FIRST_REPLAY_S:.0f} s; leave --capture or Trainer.capture() out"
                )
            sleep(0.001)

    def _refuse(self, reason: str) -> None:
        self._refusal, self._gradients = reason, {}
        self._part.note(f"not captured: {reason}")
        for parameter in self._part.parameters.values():
            parameter.grad = None

    def _replay(self, inputs: Any, targets: Any, scale: float) -> torch.Tensor:
        assert self._graph is not None
        leaves, _ = tree_flatten((inputs, targets))
        for own, new in zip(self._given, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new, non_blocking=True)
        loss = self._graph()
        assert loss is not None
        if scale != 1.0 and self._gradients:
            torch._foreach_mul_(list(self._gradients.values()), scale)
        for name, gradient in self._gradients.items():
            self._part.parameters[name].grad = gradient
        self._has_whole_loss = True
        return loss.clone()


def _refusal(part: Part, device: torch.device) -> str:
    """Why no step of a part can be a CUDA graph; empty if one may be."""
    if device.type != "cuda":
        return "a CUDA graph needs a GPU, and this run is on a CPU"
    if "nccl" not in dist.get_backend():
        return f"the processor runs the collectives of {dist.get_backend()}"
    if part.random_operators and not part.no_graph:
        names = ", ".join(part.random_operators[:3])
        return f"each step draws other random numbers ({names})"
    return part.no_graph


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_like(new: Any, own: Any) -> bool:
    """Whether a leaf of a batch can take the place of the captured one."""
    if isinstance(own, torch.Tensor) and isinstance(new, torch.Tensor):
        return bool(new.shape == own.shape and new.dtype == own.dtype)
    return type(new) is type(own) and bool(new == own)
