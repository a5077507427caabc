"""Changes of a program's configuration that can be switched on and off between two steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nostall.attach.program.numerics import MatmulPrecision
from nostall.attach.program.roots import Switch
from nostall.attach.program.shadow import Call, Finding, check_module, check_optimizer

FUSED = ("Adam", "AdamW", "SGD")
"""Optimisers whose state is the same with ``fused``, but for the device of its step counters."""
FOREACH = (*FUSED, "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "ASGD")


class Compile:
    """``module.compile(backend=...)`` of every root."""

    def __init__(self, switches: Sequence[Switch], backend: str) -> None:
        self.switches, self.backend = switches, backend
        self._compiled: list[Any] | None = None

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        worst = Finding("within rounding")  # equal bits in one step do not promise them in others
        for switch in self.switches:
            root = switch.root
            if type(root).__name__ == "DistributedDataParallel":
                root = root.module  # a copy of the wrapper would talk to the other ranks
            finding = check_module(root, calls.get(switch.number, ()), self._version)
            if finding.refusal:
                return finding._replace(refusal=f"{type(root).__name__}: {finding.refusal}")
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def _version(self, module: Any, same_random: bool) -> Any:
        options = {"fallback_random": True} if same_random and self.backend == "inductor" else None
        torch = sys.modules["torch"]
        return torch.compile(module._call_impl, backend=self.backend, options=options)

    def on(self) -> None:
        if self._compiled is None:
            self._compiled = [self._version(s.root, False) for s in self.switches]
        for switch, version in zip(self.switches, self._compiled, strict=True):
            switch.target = version

    def off(self) -> None:
        for switch in self.switches:
            switch.target = None


class OptimizerFlag:
    """``fused=True`` or ``foreach=True`` of the optimisers."""

    def __init__(self, optimizers: Sequence[Any], flag: str) -> None:
        self.flag = flag
        self.optimizers = [o for o in optimizers if can_set(o, flag)]

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        worst = Finding("within rounding" if self.flag == "fused" else "bit-equal")
        for optimizer in self.optimizers:
            finding = check_optimizer(optimizer, lambda copy: self._set(copy, True))
            if finding.refusal:
                return finding
            worst = max(worst, finding, key=Finding.rank)
        return worst

    def on(self) -> None:
        for optimizer in self.optimizers:
            self._set(optimizer, True)

    def off(self) -> None:
        for optimizer in self.optimizers:
            self._set(optimizer, None)

    def _set(self, optimizer: Any, value: bool | None) -> None:
        for group in optimizer.param_groups:
            group[self.flag] = value
        if self.flag == "fused":
            for parameter, state in optimizer.state.items():
                if "step" in state:  # fused kernels read it on the parameter's device
                    device = parameter.device if value else "cpu"
                    state["step"] = state["step"].to(device)


def can_set(optimizer: Any, flag: str) -> bool:
    """Whether ``flag`` is unset in an optimiser of PyTorch that can take it at any step."""
    torch = sys.modules["torch"]
    names = FUSED if flag == "fused" else FOREACH
    if type(optimizer) not in [getattr(torch.optim, name) for name in names]:
        return False
    unset = all(
        group.get(flag) is None and not any(map(group.get, ("capturable", "differentiable")))
        for group in optimizer.param_groups
    )
    other = all(not any(map(g.get, ("fused", "foreach"))) for g in optimizer.param_groups)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = all(
        p.is_floating_point()
        and p.device.type in ("cpu", "cuda")
        and (p.grad is None or not p.grad.is_sparse)
        and type(p) in (torch.Tensor, torch.nn.Parameter)
        for p in parameters
    )
    # On GPUs foreach is PyTorch's own choice.
    is_default = flag == "foreach" and any(p.device.type == "cuda" for p in parameters)
    return bool(parameters) and unset and other and plain and not is_default


Change = Compile | OptimizerFlag | MatmulPrecision
"""Each has ``check``, which tries it on copies, ``on`` and ``off``."""


def make_change(
    description: Mapping[str, str], switches: Sequence[Switch], optimizers: Sequence[Any]
) -> Change:
    """The change that a description names: its ``kind`` and ``value``.

    Raises :class:`ValueError` for a kind that this version does not know.
    """
    kind, value = description["kind"], description["value"]
    if kind == "matmul_precision":
        return MatmulPrecision(value)
    if kind == "compile":
        return Compile(switches, value)
    if kind == "optimizer":
        return OptimizerFlag(optimizers, value)
    raise ValueError(f"the change {kind!r} is unknown; this nostall knows compile and optimizer")
