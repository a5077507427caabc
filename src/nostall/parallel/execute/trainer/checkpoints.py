"""Checkpoints of a trainer: folders that ``torch.distributed.checkpoint`` writes and reads.

DCP writes a checkpoint's ``.metadata`` last and by renaming, so a folder that has it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from nostall.core.errors import one_line
from nostall.parallel.errors import BadCheckpoint
from nostall.parallel.execute.trainer.named_state import NamedParameters, NamedState

METADATA = ".metadata"
"""The file of a checkpoint that is written last."""
_FOLDER = re.compile(r"step-(\d+)")
MODEL, OPTIMIZER, GENERATORS = "model", "optimizer", "generators"
"""Keys of a checkpoint."""


def checkpoint_folder(folder: Path, steps: int) -> Path:
    """The folder of the checkpoint after a number of steps of the optimiser."""
    return folder / f"step-{steps:08d}"


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The complete checkpoint after the most steps in a folder of ``Trainer.save``; None if there
    is none.

    A checkpoint whose processes were killed while they saved it is passed over.
    """
    found = [
        (int(match.group(1)), path.parent)
        for path in Path(folder).glob(f"step-*/{METADATA}")
        if (match := _FOLDER.fullmatch(path.parent.name))
    ]
    return max(found)[1] if found else None


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; a collective call.  An older one in the folder ends before."""
    if dist.get_rank() == 0:
        (path / METADATA).unlink(missing_ok=True)
    dist.barrier()
    writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        raise BadCheckpoint(f"cannot write the checkpoint {path}: {_cause(error)}") from error


def load(path: Path, state: dict[str, Any]) -> None:
    """Read a checkpoint into the tensors of ``state``, and replace its other values."""
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    except CheckpointException as error:
        raise BadCheckpoint(f"cannot read the checkpoint {path}: {_cause(error)}") from error


def check_same(states: Mapping[str, Any]) -> None:
    """Raise :class:`BadCheckpoint` for an entry that ranks have with other values; collective."""
    leaves, _ = tree_flatten_with_path(states)
    own = {keystr(path): text for path, leaf in leaves if (text := _described(leaf))}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    first: dict[str, tuple[int, str]] = {}
    for rank, found in enumerate(ranks):
        for path, text in found.items():
            other, known = first.setdefault(path, (rank, text))
            if text != known:
                raise BadCheckpoint(
                    f"{path} is {known} on rank {other} and {text} on rank {rank}, and DCP writes "
                    "an entry once; name a rank's own entries by its rank (they fit the same plan "
                    "only), or make tensors of shards DTensors"
                )


def _described(leaf: Any) -> str:
    """A value as text, a tensor by its shape and sum; empty for what DCP writes as shards."""
    if isinstance(leaf, DTensor):
        return ""
    if isinstance(leaf, torch.Tensor):
        # float8 has no sum of its own, and that of float16 may overflow
        total = float(leaf.detach().sum(dtype=torch.float64))
        return f"a tensor of shape {tuple(leaf.shape)} with the sum {total:.9g}"
    return repr(leaf) if isinstance(leaf, bool | int | float | str) else ""


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint holds; raises :class:`BadCheckpoint` if it is none, or not complete."""
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except OSError as error:
        raise BadCheckpoint(
            f"{path} is no complete checkpoint: {error.strerror} ({METADATA}, which is written "
            "last); give the folder that Trainer.save got, or one of its step folders"
        ) from error
    except Exception as error:  # the file is a pickle, which may raise any error
        raise BadCheckpoint(f"{path / METADATA} is damaged: {one_line(error)}") from error


def check_model(
    path: Path, metadata: Metadata, own: Mapping[str, torch.Tensor], names: Sequence[str]
) -> None:
    """Raise :class:`BadCheckpoint` if a checkpoint is of another model.

    ``own`` are the rank's entries of the model's state, ``names`` those of all ranks.
    """
    prefix = f"{MODEL}."
    saved = {
        key.removeprefix(prefix): value
        for key, value in metadata.state_dict_metadata.items()
        if key.startswith(prefix)
    }
    for name in names:
        if name not in saved:
            raise BadCheckpoint(f"{path} is of another model: it has no {name}, which this one has")
    for name in saved:
        if name not in names:
            raise BadCheckpoint(f"{path} is of another model: it has {name}, which this one lacks")
    for name, tensor in own.items():
        shape = tuple(getattr(saved[name], "size", ()))
        if shape != tuple(tensor.shape):
            raise BadCheckpoint(
                f"{path} is of another model: {name} has the shape {shape}, and in this one "
                f"{tuple(tensor.shape)}"
            )


def optimizer_template(
    metadata: Metadata, named: NamedParameters, options: NamedState
) -> dict[str, NamedState]:
    """Tensors and values to load a rank's part of the optimiser into; ``options`` are present ones.

    They are those of the checkpoint, so the optimiser need not have stepped before.
    """
    saved = metadata.state_dict_metadata
    template: dict[str, NamedState] = {"state": {}, "param_groups": {}}
    for name in options:
        prefix = f"{OPTIMIZER}.state.{name}."
        keys = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
        parameter = named.part.parameters[name]
        template["state"][name] = {
            key: _empty(value, name, named, parameter)
            for key, value in keys.items()
            if "." not in key  # else it is of a longer name
        }
        template["param_groups"][name] = {
            key: value
            for key, value in options[name].items()
            if f"{OPTIMIZER}.param_groups.{name}.{key}" in saved
        }
    return template


def _empty(value: Any, name: str, named: NamedParameters, parameter: torch.Tensor) -> Any:
    if not isinstance(value, TensorStorageMetadata):
        return None
    dtype = value.properties.dtype
    own = named.whole(name, torch.empty_like(parameter, dtype=dtype))
    if value.size == own.shape and value.size:
        return own
    return torch.empty(value.size, dtype=dtype)


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of this rank's default generators, by names that are this rank's own."""
    own = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    states = {f"cpu, {own}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"cuda, {own}"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the default generators to loaded states."""
    for key, state in states.items():
        if key.startswith("cuda"):
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


def _cause(error: CheckpointException) -> str:
    """The first failure of a rank."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {one_line(failure)}"
