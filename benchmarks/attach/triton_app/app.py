"""Run a decoder of hand-written Triton kernels; prints a checksum every 50 steps."""

import argparse

import layers
import torch

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    decoder = layers.Decoder()
    for number in range(1, options.steps + 1):
        state = layers.step(decoder)
        if number % 50 == 0:
            total = state.double().sum().item()
            chosen = layers.int4_matmul.best_config
            print(f"step {number} sum {total:.12e} ({chosen})", flush=True)
