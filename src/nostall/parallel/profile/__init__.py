"""What a model costs, layer by layer: times, tensors between layers, parameters, memory."""

from nostall.parallel.profile.files import load_profile, save_profile
from nostall.parallel.profile.layers import Layer, Profile, Tensor
from nostall.parallel.profile.pipedream import parse_graph

__all__ = ["Layer", "Profile", "Tensor", "load_profile", "parse_graph", "save_profile"]
