"""Steps per second of the assembly game on the SM model, one CPU core, random legal actions.

python -m benchmarks run learning.steps_per_second \\
    --out benchmarks/learning/results/steps_per_second.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import sources
from nostall.papers.game import AssemblyGame
from nostall.sass import Program
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace


def steps_per_second(game: AssemblyGame, steps: int, seed: int = 0) -> tuple[float, float]:
    """(steps per second of processor time, steps per second of wall time)."""
    rng = np.random.default_rng(seed)
    _, info = game.reset()
    wall, began = perf_counter(), process_time()
    for _ in range(steps):
        legal = np.flatnonzero(info["action_mask"])
        *_, terminated, truncated, info = game.step(int(legal[rng.integers(len(legal))]))
        if terminated or truncated:
            _, info = game.reset()
    return steps / (process_time() - began), steps / (perf_counter() - wall)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--steps", type=int, default=4000)


def main(options: argparse.Namespace) -> None:
    records = []
    for name, source in sources(options.arch):
        program = Program.from_cubin(source.cubin)
        space = ScheduleSpace(program, program.kernel(source.kernel))
        assert source.launch is not None
        model = SmModel(program, space.function, source.launch)
        for observation in ("matrix", "graph"):
            game = AssemblyGame(program, model, kernel=source.kernel, observation=observation)
            if not game.reset()[1]["action_mask"].any():
                print(f"{name}: no legal move")
                break
            steps_per_second(game, 100)  # warm-up: numba compiles, caches fill
            processor, wall = steps_per_second(game, options.steps)
            alone = _evaluations_per_second(model, game)
            records.append(
                {
                    "kernel": name,
                    "arch": options.arch,
                    "observation": observation,
                    "instructions": len(space.function.instructions),
                    "actions": int(game.action_space.n),
                    "issues_per_evaluation": model.trace.length * model.simulated_warps,
                    "steps_per_second": round(processor),
                    "steps_per_second_wall": round(wall),
                    "model_evaluations_per_second": round(alone),
                }
            )
            print(f"{name:24} {observation:7} {records[-1]}", flush=True)
    save(options.out, kind="modelled", steps=options.steps, records=records)


def _evaluations_per_second(model: SmModel, game: AssemblyGame) -> float:
    began = process_time()
    model.evaluate([game.game.state] * 300)
    return 300 / (process_time() - began)
