"""State of a rank's parameters and of their optimiser by full names, as DCP saves and loads it.

Shards are DTensors over the memory of the local tensors, so DCP writes each value once, and loads
it onto other meshes.  An option of the optimiser is saved for each parameter, because another plan
has other parameters in a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nostall.parallel.errors import BadCheckpoint
from nostall.parallel.execute.parts.part import Part
from nostall.parallel.sharding.placements import is_sharded, shard_dim

NamedState = dict[str, dict[str, Any]]
"""By the name of a parameter, values by name."""


@dataclass(frozen=True)
class NamedParameters:
    """A rank's parameters with the meshes of their shards."""

    part: Part
    meshes: Sequence[DeviceMesh]
    """Those of ``part.meshes``."""

    def whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A tensor that is held as a parameter is: a DTensor over the local one if sharded."""
        own = self.part.placements.get(name, ())
        if not any(map(is_sharded, own)):
            return local
        placements: list[Placement] = [
            Shard(shard_dim(p)) if is_sharded(p) else Replicate() for p in own
        ]
        return DTensor.from_local(local, self.meshes[self.part.mesh], placements, run_check=False)

    def model_state(
        self, module: torch.nn.Module, unread: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """The entries of ``module.state_dict()`` that this rank has.

        ``unread`` are the parameters that no rank's step reads; these stay as they are.
        """
        first_names = {id(p): name for name, p in module.named_parameters()}
        names = {
            name: first_names[id(p)] for name, p in module.named_parameters(remove_duplicate=False)
        }
        state: dict[str, torch.Tensor] = {}
        for key, value in module.state_dict(keep_vars=True).items():
            name = names.get(key)
            if name is not None and name in self.part.parameters:
                state[key] = self.whole(name, self.part.parameters[name].detach())
            elif name is None or name in unread:
                state[key] = value.detach()
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, NamedState]:
        """State and options of the optimiser by parameter.

        Raises :class:`BadCheckpoint` for a state of a shard that is no shard of a whole state.
        """
        names = {id(p): name for name, p in self.part.parameters.items()}
        state: NamedState = {}
        options: NamedState = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:  # the placeholder
                    continue
                options[name] = {key: v for key, v in group.items() if key not in _OWN}
                state[name] = {
                    key: self._state_value(name, key, value, parameter)
                    for key, value in optimizer.state.get(parameter, {}).items()
                }
        return {"state": state, "param_groups": options}

    def _state_value(self, name: str, key: str, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if value.shape == parameter.shape:
            return self.whole(name, value)
        if any(map(is_sharded, self.part.placements.get(name, ()))):
            raise BadCheckpoint(
                f"the optimiser's state {key} of {name} has the shape {tuple(value.shape)} and its "
                f"shard {tuple(parameter.shape)}, so it fits no other plan; use an optimiser whose "
                "states have the shapes of the parameters (AdamW, SGD), or plan without shards"
            )
        return value

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, loaded: Mapping[str, NamedState]
    ) -> None:
        """Take over what :meth:`optimizer_state` gave, with loaded values."""
        names = {id(p): name for name, p in self.part.parameters.items()}
        document = optimizer.state_dict()
        numbers = [n for group in document["param_groups"] for n in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        document["state"] = {
            number: {key: _held(v, parameter) for key, v in own.items()}
            for number, parameter in zip(numbers, parameters, strict=True)
            if (own := loaded["state"].get(names.get(id(parameter), "")))
        }
        for saved, group in zip(document["param_groups"], optimizer.param_groups, strict=True):
            own_names = [names[id(p)] for p in group["params"] if id(p) in names]
            for key in saved.keys() - _OWN:
                saved[key] = _option(key, saved[key], own_names, loaded["param_groups"])
        optimizer.load_state_dict(document)


_OWN = frozenset({"params", "param_names"})
"""Entries of a group that name its parameters."""


def _held(value: Any, parameter: torch.Tensor) -> Any:
    """A loaded value in the form of its parameter: FSDP2's parameters are DTensors themselves."""
    is_local = isinstance(value, DTensor) and not isinstance(parameter, DTensor)
    return value.to_local() if is_local else value


def _option(key: str, present: Any, names: Sequence[str], loaded: NamedState) -> Any:
    """The loaded option of a group; the present one if the checkpoint has none."""
    values = [loaded[name][key] for name in names if key in loaded.get(name, {})]
    if not values:
        return present
    if any(value != values[0] for value in values):
        raise BadCheckpoint(
            f"the checkpoint has several values of {key} for the parameters of one group of the "
            f"optimiser ({names[0]}, ...); group the parameters as in the run that saved it"
        )
    return values[0]
