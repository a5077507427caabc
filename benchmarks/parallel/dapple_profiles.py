"""DAPPLE's published profiles as its planner sees them: a chain of layers, one activation each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nostall.parallel.profile import Profile, load_profile
from nostall.parallel.profile.layers import Layer, chain

LSTMS = ("EmuBidirLSTM", "LSTM", "RecurrentAttention")
"""What the 16 layers of GNMT-16 are called; the paper's splits (9:7) count nothing else."""


def published(path: Path) -> Profile:
    """The profile as a chain in which each cut passes on its largest tensor alone.

    The paper's costs have one activation per layer, and its ratios of communication to computation
    for BERT-48 are those of one activation, without the mask that every layer reads.
    """
    found = load_profile(path)
    lstms = path.name.startswith("gnmt")
    kept = [i for i, layer in enumerate(found.layers) if not lstms or layer.name.startswith(LSTMS)]
    layers = [found.layers[i] for i in kept]
    largest = [
        max((t.bytes for t in found.tensors if t.producer < cut <= t.last_consumer), default=0.0)
        for cut in kept[1:]
    ]
    return chain(found.name, _usual(layers) if lstms else layers, largest, found.batch)


def _usual(layers: list[Layer]) -> list[Layer]:
    """The last LSTM's backward pass also has the classifier's in it, which is no layer here: it
    takes as long as that of the layer before, which is alike."""
    return [*layers[:-1], replace(layers[-1], backward_s=layers[-2].backward_s)]
