"""Options of the backend: ``options={"nostall.…": …}``; all other keys go to Inductor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from nostall.core.errors import BadInput

PREFIX = "nostall."
FuseScope = Literal["reductions", "all"]
SelectionPolicy = Literal["measure", "stitched", "inductor"]
Fallback = Literal["inductor", "eager"]
KeepRule = Literal["faster", "all"]
ProductScope = Literal["off", "measure"]
AttentionScope = Literal["off", "measure"]
LossScope = Literal["off", "measure", "chunked"]
BlockScope = Literal["off", "small", "all"]
DEFAULT_TUNED_PLANS = 4
"""Fewer than the default of :class:`~nostall.fusion.codegen.autotune.autotuner.Autotuner`, because
the user's process waits for the tuning."""
ALIASES = {"extent": "fuse", "rest": "fallback", "race": "tuned_plans"}
"""Earlier keys, still accepted, and the options that they set."""


@dataclass(frozen=True)
class Options:
    """Validated options of the backend.  Raises :class:`BadInput` if a value is not allowed."""

    # Kernels that may be fused: those with a reduction, or all; and kernels over lists.  Inductor
    # handles chains of elementwise operators well, and can fuse them into its matrix products.
    fuse: FuseScope = "reductions"
    # Version that runs: the measured choice, or always the candidate or Inductor's version.
    choose: SelectionPolicy = "measure"
    # Prepare the candidate in worker processes while Inductor's version runs.
    background: bool = True
    # Approximate duration of one comparison, in seconds.
    seconds: float = 1.0
    # Compiler of everything that is not fused.
    fallback: Fallback = "inductor"
    # Plans of each kernel that are measured: so many of the modelled best ones, and the best one of
    # every scheme.  0 disables tuning.
    tuned_plans: int = DEFAULT_TUNED_PLANS
    # Kernels that are fused: those measured faster than Inductor's for the same operators, or all.
    keep: KeepRule = "faster"
    # Matrix products: all stay with cuBLAS, or those whose kernel with the elementwise operators
    # around them is measured faster are replaced.
    products: ProductScope = "measure"
    # Approximate limit of the time for these measurements, in seconds.
    product_seconds: float = 30.0
    # Calls of attention: all keep their masks, or the candidate keeps those calls whole that
    # PyTorch decomposes because of a mask that masks nothing or of the layout of an operand.
    attention: AttentionScope = "measure"
    # Losses whose logits only they read: all keep them, the candidate computes them in chunks, or
    # every version does, also where that takes longer.
    loss: LossScope = "measure"
    # Block sizes of Inductor's own kernels: all stay as Inductor chooses them, or the backend tries
    # a version with measured ones, in small graphs or in all of them.
    blocks: BlockScope = "small"
    # Approximate limit of the time for the search of these block sizes, in seconds.
    block_seconds: float = 6.0

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for option in fields(self):
            value, type_ = getattr(self, option.name), types[option.name]
            choices = get_args(type_)
            valid = value in choices if choices else type(value) in _accepted_types(type_)
            if valid and type_ in (int, float):
                valid = value > 0 or (type_ is int and value == 0)
            if not valid:
                allowed = " or ".join(map(repr, choices)) or {
                    bool: "True or False",
                    int: "an integer of at least 0",
                }.get(type_, "a number above 0")
                raise BadInput(f"option {PREFIX}{option.name} is {value!r}; allowed is {allowed}")


def _accepted_types(type_: type) -> tuple[type, ...]:
    return (int, float) if type_ is float else (type_,)


def parse_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Split the options of ``torch.compile`` into nostall's and Inductor's.

    Raises :class:`BadInput` for an unknown key with nostall's prefix, for a value that is not
    allowed, and for an option that is set under its old and its new key.
    """
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    known = [option.name for option in fields(Options)]
    for key, value in (options or {}).items():
        if not key.startswith(PREFIX):
            inductor[key] = value
            continue
        name = key.removeprefix(PREFIX)
        name = ALIASES.get(name, name)
        if name not in known:
            raise BadInput(
                f"option {key} is not known; known are {', '.join(PREFIX + k for k in known)}, "
                "and those of Inductor"
            )
        if name in own:
            raise BadInput(f"option {PREFIX}{name} is set twice, once by its old key; remove one")
        own[name] = value
    return Options(**own), inductor
