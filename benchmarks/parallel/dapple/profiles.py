"""DAPPLE's published profiles as its planner uses them: a chain with one activation per layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nostall.parallel.profile import Profile, load_profile
from nostall.parallel.profile.layers import Layer, chain

LSTMS = ("EmuBidirLSTM", "LSTM", "RecurrentAttention")
"""Name prefixes of the 16 layers of GNMT-16; the splits of the paper (9:7) count only these."""


def load_published(path: Path) -> Profile:
    """The profile as a chain in which each cut sends only its largest tensor.

    The costs in the paper have one activation per layer.  Its communication-to-computation ratios
    for BERT-48 are those of one activation, without the mask that every layer reads.
    """
    profile = load_profile(path)
    is_gnmt = path.name.startswith("gnmt")
    indices = [
        i for i, layer in enumerate(profile.layers) if not is_gnmt or layer.name.startswith(LSTMS)
    ]
    layers = [profile.layers[i] for i in indices]
    cut_bytes = [
        max((t.bytes for t in profile.tensors if t.producer < cut <= t.last_consumer), default=0.0)
        for cut in indices[1:]
    ]
    if is_gnmt:
        layers = _without_classifier(layers)
    return chain(profile.name, layers, cut_bytes, profile.batch)


def _without_classifier(layers: list[Layer]) -> list[Layer]:
    """The layers with the backward time of the last LSTM replaced by that of the LSTM before it.

    The recorded time also contains the backward pass of the classifier, which is not a layer here.
    """
    return [*layers[:-1], replace(layers[-1], backward_s=layers[-2].backward_s)]
