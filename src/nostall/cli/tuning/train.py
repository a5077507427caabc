"""The command ``nostall train``: train a scheduling policy on several kernels."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nostall.cli.options.inputs import ArchOption
from nostall.cli.terminal.console import Format, FormatOption, QuietOption, err, out, show_json
from nostall.cli.terminal.progress import measured_compile_time
from nostall.core import BadInput, BadRun
from nostall.core.errors import Interrupted
from nostall.core.files.atomic import create_folder
from nostall.core.files.folder_lock import FolderLock
from nostall.tuning.strategies import LOG_FOLDER, POLICY_FILE, load_strategy_class

if TYPE_CHECKING:
    from nostall.papers.game.ppo.learner import Progress, TrainingKernel

CHECKPOINT_FILE = "checkpoint.safetensors"

CorpusOption = Annotated[
    list[str],
    typer.Option(
        help="Directory with pairs of NAME.cubin and NAME.toml, or path.py:kernel; can be repeated."
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="Directory of the training.")]
ObjectiveOption = Annotated[str, typer.Option(help="Only model (the SM model) is supported.")]
RolloutsOption = Annotated[int, typer.Option(help="Rollouts per kernel in all (128 steps each).")]
SeedOption = Annotated[
    int, typer.Option(help="Random seed; the same seed and corpus give the same policy.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue the training in the directory `--out`.")
]


def train(
    corpus: CorpusOption,
    out_dir: OutOption,
    objective: ObjectiveOption = "model",
    rollouts: RolloutsOption = 100,
    seed: SeedOption = 0,
    arch: ArchOption = None,
    resume: ResumeOption = False,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Train a scheduling policy for the strategy ppo of tune.

    `nostall tune --policy FILE` starts with the trained policy. Ctrl-C keeps the policy and a
    checkpoint of the last full rollout. Needs `pip install 'nostall[rl]'`.
    """
    load_strategy_class("ppo")
    from nostall.papers.game.ppo.learner import TrainingKernel
    from nostall.tuning.sources.corpus import load_corpus, modelled_problem

    _check_options(objective, rollouts, seed)
    has_training = (out_dir / CHECKPOINT_FILE).exists()
    if has_training != resume:
        reason = (
            "holds no training yet; leave --resume out"
            if resume
            else "holds a training already; continue it with --resume"
        )
        raise BadRun(f"{out_dir} {reason}, or choose another directory with --out")
    kernels = [
        TrainingKernel(name, *modelled_problem(source))
        for name, source in load_corpus(corpus, arch)
    ]
    create_folder(out_dir)
    is_shown = not quiet and format is Format.TABLE
    lock = FolderLock(out_dir)
    lock.acquire()
    try:
        with measured_compile_time() as compilation:
            best = _train(kernels, out_dir, rollouts, seed, is_shown=is_shown)
    except KeyboardInterrupt as error:
        raise _kept_after_interrupt(out_dir) from error
    finally:
        lock.release()
    compilation.show("")
    policy = out_dir / POLICY_FILE
    if format is Format.JSON:
        show_json({"policy": str(policy), "kind": "modelled", "best": best})
        return
    out.print(f"policy: {policy} (trained on the model, {len(kernels)} kernels)")
    out.print(f"use it: nostall tune KERNEL --policy {shlex.quote(str(policy))}")


def _check_options(objective: str, rollouts: int, seed: int) -> None:
    """Raise :class:`BadInput`, which names the option, for a value that is not allowed."""
    if objective != "model":
        raise BadInput(f"--objective is {objective!r}; a policy is trained on the model only")
    if rollouts < 1:
        raise BadInput(f"--rollouts is {rollouts}; give 1 or more")
    if seed < 0:
        raise BadInput(f"--seed is {seed}; give 0 or a greater whole number")


def _kept_after_interrupt(out_dir: Path) -> Interrupted:
    """The error of Ctrl-C: what the directory keeps, and how to go on."""
    if not (out_dir / CHECKPOINT_FILE).exists():
        return Interrupted("interrupted before the first full rollout; nothing is kept")
    return Interrupted(
        f"interrupted; {out_dir} keeps the policy and a checkpoint of the last full rollout; go on "
        "with the same command and --resume"
    )


def _train(
    kernels: list[TrainingKernel], out_dir: Path, rollouts: int, seed: int, *, is_shown: bool
) -> Mapping[str, float]:
    """Train, log the curves, and return the best ratio of each kernel."""
    from nostall.papers.game.ppo.learner import GraphPpoParameters
    from nostall.papers.game.ppo.learner import train as train_policy
    from nostall.papers.game.ppo.search import scalar_writer
    from nostall.papers.game.randomness import isolated_random_state

    log = scalar_writer(out_dir / LOG_FOLDER)
    last_best: dict[str, float] = {}

    def observe(progress: Progress) -> None:
        last_best.update(progress.best)
        for name, value in progress.metrics.items():
            log(f"train/{name}", value, progress.rollout)
        for name, value in progress.best.items():
            log(f"best/{name}", value, progress.rollout)
        if is_shown:
            best = ", ".join(f"{name} {value:.4f}x" for name, value in progress.best.items())
            err.print(f"rollout {progress.rollout}/{rollouts}: modelled best {best}")

    with isolated_random_state():
        train_policy(
            kernels,
            GraphPpoParameters(),
            rollouts,
            seed=seed,
            checkpoint=out_dir / CHECKPOINT_FILE,
            policy_path=out_dir / POLICY_FILE,
            observe=observe,
        )
    return last_best
