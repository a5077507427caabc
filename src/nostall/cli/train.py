"""``nostall train``: learn on many kernels, for searches that begin with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nostall.cli.console import Format, FormatOption, QuietOption, err, out, show_json
from nostall.cli.inputs import ArchOption
from nostall.core import BadInput, BadRun
from nostall.tuning.corpus import modelled, sources
from nostall.tuning.strategies import LOGS, POLICY, need_learning

if TYPE_CHECKING:
    from nostall.sass.game.training import Progress

_CHECKPOINT = "checkpoint.safetensors"


def train(
    corpus: Annotated[
        list[str],
        typer.Option(help="A directory of NAME.cubin with NAME.toml, or path.py:kernel; repeat."),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of the training.")],
    objective: Annotated[str, typer.Option(help="model: learn on the SM model.")] = "model",
    rollouts: Annotated[int, typer.Option(help="Rollouts (128 turns) of each kernel.")] = 100,
    seed: Annotated[int, typer.Option(help="Same seed and corpus: same policy.")] = 0,
    arch: ArchOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out.")] = False,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Train a policy on several kernels; ``nostall tune --policy FILE`` begins with it.

    Ctrl-C leaves the policy and a checkpoint of the last whole rollout.
    """
    need_learning("ppo")
    from nostall.sass.game.ppo_learner import GraphPpoParameters
    from nostall.sass.game.ppo_search import scalar_writer
    from nostall.sass.game.randomness import isolated_random_state
    from nostall.sass.game.training import TrainingKernel
    from nostall.sass.game.training import train as learn

    if objective != "model" or rollouts < 1 or seed < 0:
        raise BadInput(
            f"train got --objective {objective!r}, --rollouts {rollouts} and --seed {seed}; "
            "allowed are model, at least 1, and 0 or more"
        )
    checkpoint = out_dir / _CHECKPOINT
    if checkpoint.exists() != resume:
        there = "holds a training already; go on with --resume" if not resume else "holds none yet"
        raise BadRun(f"{out_dir} {there}, or choose another directory with --out")
    lessons = [TrainingKernel(name, *modelled(source)) for name, source in sources(corpus, arch)]
    out_dir.mkdir(parents=True, exist_ok=True)
    log, last = scalar_writer(out_dir / LOGS), {}

    def observe(progress: Progress) -> None:
        last.update(progress.best)
        for name, value in progress.metrics.items():
            log(f"train/{name}", value, progress.rollout)
        for name, value in progress.best.items():
            log(f"best/{name}", value, progress.rollout)
        if not quiet and format is Format.TABLE:
            best = ", ".join(f"{name} {value:.4f}x" for name, value in progress.best.items())
            err.print(f"rollout {progress.rollout}/{rollouts}: modelled best {best}")

    with isolated_random_state():
        learn(
            lessons,
            GraphPpoParameters(),
            rollouts,
            seed=seed,
            checkpoint=checkpoint,
            policy_path=out_dir / POLICY,
            observe=observe,
        )
    policy = out_dir / POLICY
    if format is Format.JSON:
        show_json({"policy": str(policy), "kind": "modelled", "best": last})
        return
    out.print(f"policy: {policy} (learned on the model, {len(lessons)} kernels)")
    out.print(f"use it: nostall tune KERNEL --policy {policy}")
