"""Profiles of models: each layer's times, parameters and memory, and the tensors between layers."""

from nostall.parallel.profile.layers import Layer, Profile, Tensor
from nostall.parallel.profile.pipedream import parse_graph
from nostall.parallel.profile.profile_file import load_profile, save_profile

__all__ = ["Layer", "Profile", "Tensor", "load_profile", "parse_graph", "save_profile"]
