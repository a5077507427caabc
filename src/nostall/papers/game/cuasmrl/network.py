"""CuAsmRL's network as a feature extractor of stable-baselines3."""

from __future__ import annotations

import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn


class ConvolutionalExtractor(BaseFeaturesExtractor):  # type: ignore[misc]
    """Three convolutions over the observed matrix and one dense layer, as published.

    Convolutions: 1 → 32, 5 x 3, stride 2 x 1, padding 1; 32 → 64, 4 x 4, stride 2, padding 0 x 1;
    64 → 64, 3 x 3. The dense layer has ``features_dim`` outputs. A ReLU follows each layer.
    """

    def __init__(self, observation_space: spaces.Box, features_dim: int = 512) -> None:
        super().__init__(observation_space, features_dim)
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (5, 3), stride=(2, 1), padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2, padding=(0, 1)),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.convolutions(torch.zeros((1, *observation_space.shape))).shape[1]
        self.dense = nn.Sequential(nn.Linear(flat, features_dim), nn.ReLU())

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.dense(self.convolutions(observations))
        return features
