"""A user's own plan in a line of text, and the changes of it that the model expects most of.

    dp=2 tp=2 pp=2 schedule=1F1B micro-batches=8

A plan may also be Megatron-LM's flags, and a file may have several lines.  Stages have equal
numbers of layers on consecutive GPUs, replicas next to each other, as Megatron-LM places them.
With tensor parallelism (tp), the GPUs of the workload are groups of consecutive ones.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nostall.core.text.suggest import unknown
from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.cut_positions import balanced_cuts
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.simulate import simulated_s

SCHEDULES: dict[str, Policy] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "interleaved1f1b": "interleaved",
    "zero-bubble": "zero-bubble",
    "interleavedzerobubble": "zero-bubble",
}
"""Policies by the names of Megatron-LM and of torch, in lower case."""
KEYS = ("dp", "tp", "pp", "vp", "schedule", "micro-batches")
MEGATRON = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--num-virtual-stages-per-pipeline-rank": "vp",
    "--num-layers-per-virtual-pipeline-stage": "layers of a chunk",
    "--num-layers": "layers",
    "--micro-batch-size": "micro-batch",
    "--global-batch-size": "batch",
}
"""Flags of Megatron-LM whose numbers are read, with short names."""
_UNPRICED = {"cp": "context", "ep": "expert"}
_WITHOUT_EFFECT = (
    "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups",
    "--kv-channels", "--seq-length", "--max-position-embeddings", "--vocab-size",
    "--make-vocab-size-divisible-by", "--lr", "--min-lr", "--lr-decay-style", "--lr-warmup-iters",
    "--lr-decay-iters", "--weight-decay", "--clip-grad", "--adam-beta1", "--adam-beta2",
    "--init-method-std", "--seed", "--train-iters", "--train-samples", "--data-path", "--split",
    "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--save", "--load",
    "--save-interval", "--eval-interval", "--eval-iters", "--log-interval", "--tensorboard-dir",
    "--bf16", "--fp16", "--distributed-backend", "--hidden-dropout", "--attention-dropout",
    "--attention-backend", "--use-flash-attn", "--group-query-attention", "--normalization",
    "--norm-epsilon", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
    "--position-embedding-type", "--use-rotary-position-embeddings", "--use-mcore-models",
    "--transformer-impl", "--num-workers", "--mock-data", "--manual-gc", "--exit-duration-in-mins",
    "--initial-loss-scale", "--timing-log-level", "--no-load-optim", "--no-load-rng",
    "--nproc_per_node", "--nproc-per-node", "--nnodes", "--node_rank", "--node-rank",
    "--master_addr", "--master-addr", "--master_port", "--master-port",
)  # fmt: skip
"""Flags of the model, which the profile knows, of torchrun, and of what a step's time does not
depend on."""
_PREFIXES = (
    "--lr-", "--adam-", "--init-method-", "--rotary-", "--tokenizer-", "--data-", "--eval-",
    "--log-", "--save-", "--tensorboard-", "--wandb-", "--ckpt-", "--rdzv", "--moe-router-",
)  # fmt: skip
"""Beginnings of further such flags."""
_OTHER_POLICIES: tuple[Policy, ...] = ("1f1b", "pb", "zero-bubble", "gpipe")
_LEAST_GAIN = 1.005
"""Changes that promise less are not named."""


@dataclass(frozen=True)
class OwnPlan:
    """What a line says."""

    replicas: int
    stages: int
    policy: Policy
    micro_batches: int
    chunks: int = 1
    """Stages of each GPU."""
    global_batch: int | None = None
    """Samples of an iteration, if the plan says so."""
    tensor: int = 1
    """GPUs of a group of tensor parallelism; each replica of a stage is such a group."""


@dataclass(frozen=True)
class Change:
    """One change of a plan."""

    text: str
    iteration_s: float
    """Modelled seconds of an iteration with it."""
    speedup: float
    """Modelled time of the plan, divided by that with the change."""


def read_own_plans(text: str, gpus: int, global_batch: int) -> list[tuple[str, OwnPlan]]:
    """The plans of a line, of Megatron-LM's flags, or of a file with one of these, by their texts.

    A file may have a plan in each line; ``#`` begins a comment.  ``gpus`` are those of the cluster
    and ``global_batch`` the samples of an iteration, which Megatron's flags need.  Raises
    :class:`BadPlan` if the file cannot be read, or if a plan is not allowed.
    """
    if "=" not in text and "--" not in text:
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadPlan(
                f"--mine {text}: it cannot be read as a file, and as a plan it lacks key=value; "
                'give a file, Megatron\'s flags, or "pp=2 schedule=1F1B micro-batches=8"'
            ) from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if any(word.startswith("--") for line in lines for word in line.split()):
        flags = " ".join(line.removesuffix("\\").strip() for line in lines)
        return [(flags, parse_megatron_flags(flags, gpus, global_batch))]
    if not lines:
        raise BadPlan('--mine has no plan; write one such as "pp=2 schedule=1F1B micro-batches=8"')
    return [(line, parse_own_plan(line)) for line in lines]


def parse_megatron_flags(text: str, gpus: int, global_batch: int) -> OwnPlan:
    """The plan of Megatron-LM's flags on a number of GPUs.

    What stands before them, up to the name of a Python file, is left out.  Raises :class:`BadPlan`
    for a flag that would change the step's time in a way that is not modelled.
    """
    values = _megatron_values(text)
    for key, kind in _UNPRICED.items():
        if _number(values, key, 1) > 1:
            raise BadPlan(
                f"--mine has {kind} parallelism over {values[key]} GPUs; stages are predicted from "
                f"a profile of whole layers, which knows no {kind} parallelism; leave it out, or "
                "see --planner sharding --mesh"
            )
    stages, size = _number(values, "pp", 1), _number(values, "micro-batch", 1)
    if "micro-batch" not in values:
        raise BadPlan("--mine lacks --micro-batch-size, the samples of a replica's micro-batch")
    samples, tensor = _number(values, "batch", global_batch), _number(values, "tp", 1)
    if gpus % tensor:
        raise BadPlan(f"--mine has groups of {tensor} GPUs (tp) and the cluster {gpus} GPUs")
    gpus //= tensor
    if gpus % stages or samples % (size * (gpus // stages)):
        raise BadPlan(
            f"--mine has {stages} pipeline stages, micro-batches of {size} and {samples} samples; "
            f"{gpus} GPUs{_of_groups(tensor)} must be a multiple of the stages, and the samples "
            "one of micro-batch size x replicas; change --cluster or the flags"
        )
    chunks = _chunks(values, stages)
    policy: Policy = "interleaved" if chunks > 1 else "1f1b"
    replicas = gpus // stages
    return OwnPlan(replicas, stages, policy, samples // (size * replicas), chunks, samples, tensor)


def _chunks(values: dict[str, str], stages: int) -> int:
    """Stages of each GPU by Megatron's flags."""
    chunks = _number(values, "vp", 1)
    if "layers of a chunk" in values:
        layers, chunk = _number(values, "layers", 1), _number(values, "layers of a chunk", 1)
        if "layers" not in values or layers % (stages * chunk):
            raise BadPlan(
                f"--mine has --num-layers-per-virtual-pipeline-stage {chunk}; it needs "
                f"--num-layers N, a multiple of {stages} stages x {chunk}"
            )
        chunks = layers // (stages * chunk)
    return chunks if stages > 1 else 1


def _megatron_values(text: str) -> dict[str, str]:
    """The numbers of the flags that are read, by their short names."""
    words = _expanded(text).split()
    script = max((at for at, word in enumerate(words) if word.endswith(".py")), default=-1)
    if not any(word.partition("=")[0] in MEGATRON for word in words[script + 1 :]):
        script = -1  # a script that keeps its flags in variables, before the line of the start
    values: dict[str, str] = {}
    others, flag = list[str](), ""
    for word in words[script + 1 :]:
        value = word.strip("'\"()")
        if value.startswith("--"):
            flag, _, value = value.partition("=")
            is_known = flag in MEGATRON or flag in _WITHOUT_EFFECT or flag.startswith(_PREFIXES)
            if not is_known:
                others.append(flag)
            if flag in MEGATRON:
                values[MEGATRON[flag]] = value
        elif value and flag in MEGATRON:
            values[MEGATRON[flag]], flag = value, ""
    if others:
        raise BadPlan(
            f"--mine has {', '.join(others[:5])}, whose effect on a step's time is not modelled; "
            "leave it out to predict the step without it; those that count are "
            f"{', '.join(MEGATRON)}"
        )
    return values


def _expanded(text: str) -> str:
    """A script with the numbers of its variables (``TP=2``) in the places that read them."""
    numbers = dict(re.findall(r"(?:^|\s)([A-Za-z_]\w*)=\"?(\d+)\b", text))
    return re.sub(r"\$\{?(\w+)\}?", lambda found: numbers.get(found[1], found[0]), text)


def parse_own_plan(text: str) -> OwnPlan:
    """Read a line; raises :class:`BadPlan` for a key or value that is not allowed."""
    values: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            text = unknown("key of --mine", key or word, KEYS)
            raise BadPlan(f"{text}; JSON, YAML and TOML (DeepSpeed, torchtitan) are not read")
        if key in values:
            raise BadPlan(f"--mine has {key} twice, as {values[key]} and {value}; give it once")
        values[key] = value
    name = values.get("schedule", "1F1B")
    policy = SCHEDULES.get(name.lower().replace("_", "-"))
    if policy is None:
        raise BadPlan(unknown("schedule", name, tuple(SCHEDULES)))
    chunks = _number(values, "vp", 2 if policy == "interleaved" else 1)
    if (chunks > 1) != (policy == "interleaved"):
        raise BadPlan(
            f"--mine has vp={chunks} and schedule={name}; allowed is vp above 1 with "
            "schedule=interleaved, and vp=1 with others"
        )
    if "micro-batches" not in values:
        raise BadPlan("--mine lacks micro-batches=N, the micro-batches of an iteration")
    return OwnPlan(
        _number(values, "dp", 1), _number(values, "pp", 1), policy,
        _number(values, "micro-batches", 1), chunks, tensor=_number(values, "tp", 1),
    )  # fmt: skip


def _number(values: dict[str, str], key: str, default: int) -> int:
    text = values.get(key, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        found = f"{key}={text}" if text else f"{key} without a value"
        raise BadPlan(f"--mine has {found}; allowed is a number from 1 on")
    return int(text)


def own_workload(workload: Workload, own: OwnPlan) -> Workload:
    """The workload in the line's micro-batches.

    Raises :class:`BadPlan` if these or the GPUs do not fit.
    """
    gpus, samples = own.replicas * own.stages, workload.global_batch
    if gpus != len(workload.cluster):
        product = f"dp={own.replicas}{_tensor(own).replace(' ', ' x ')} x pp={own.stages}"
        raise BadPlan(
            f"--mine is for {gpus * own.tensor} GPUs ({product}) and the cluster has "
            f"{len(workload.cluster) * own.tensor}; change one of them"
        )
    if samples % own.micro_batches or samples // own.micro_batches < own.replicas:
        raise BadPlan(
            f"{samples} samples in {own.micro_batches} micro-batches over {own.replicas} replicas "
            "are not equal parts of whole samples; change --global-batch or micro-batches"
        )
    return replace(workload, micro_batch=samples // own.micro_batches)


def stages_plan(workload: Workload, own: OwnPlan, *, balanced: bool = False) -> Plan:
    """The plan of a line: equal numbers of layers, or stages of about equal time.

    Raises :class:`BadPlan` if there are fewer layers than stages.
    """
    layers, count = len(workload.profile), own.stages * own.chunks
    if count > layers:
        raise BadPlan(f"--mine has {count} stages and the model {layers} layers; use fewer stages")
    even = [layers * number // count for number in range(count + 1)]
    cuts = balanced_cuts(workload, count) if balanced else even
    stages = []
    for number, (first, end) in enumerate(itertools.pairwise(cuts)):
        at = number % own.stages * own.replicas
        stages.append(Stage(first, end, tuple(range(at, at + own.replicas))))
    return Plan(tuple(stages), own.policy if count > 1 else "1f1b")


def best_changes(
    workload: Workload,
    own: OwnPlan,
    others: Iterable[tuple[str, Workload, Plan]] = (),
    count: int = 3,
) -> list[Change]:
    """The single changes that shorten the modelled iteration most, best first.

    ``others`` are further ones with their workloads and plans.
    """
    before = simulated_s(workload, stages_plan(workload, own))
    found = []
    for text, changed, plan in (*_changes(workload, own), *others):
        try:
            fitting = fit_to_memory(changed, plan)
            seconds = simulated_s(changed, fitting) if fitting is not None else math.inf
        except BadPlan:  # an order that does not take the changed numbers, as interleaved
            continue
        found.append(Change(text, seconds, before / seconds))
    found.sort(key=lambda change: change.iteration_s)
    return [change for change in found if change.speedup >= _LEAST_GAIN][:count]


def _tensor(own: OwnPlan) -> str:
    return f" tp={own.tensor}" if own.tensor > 1 else ""


def _of_groups(tensor: int) -> str:
    return f" (groups of {tensor})" if tensor > 1 else ""


def _changes(workload: Workload, own: OwnPlan) -> Iterator[tuple[str, Workload, Plan]]:
    """Each change with its workload and plan; those that do not fit are left out."""
    count = own.stages * own.chunks
    if count > 1:
        cuts = [stage.end for stage in stages_plan(workload, own, balanced=True).stages[:-1]]
        text = f"cut after layers {', '.join(str(end - 1) for end in cuts)} (equal times)"
        yield text, workload, stages_plan(workload, own, balanced=True)
    if own.stages > 1:
        for policy in _OTHER_POLICIES:
            if policy != own.policy:
                other = replace(own, policy=policy, chunks=1)
                yield f"schedule {policy}", workload, stages_plan(workload, other)
    gpus = own.replicas * own.stages
    others = [
        (f"micro-batches={number}", replace(own, micro_batches=number))
        for number in (own.micro_batches * 2, own.micro_batches * 4, own.micro_batches // 2)
    ]
    others += [
        (
            f"dp={gpus // stages}{_tensor(own)} pp={stages}",
            replace(own, replicas=gpus // stages, stages=stages),
        )
        for stages in range(1, gpus + 1)
        if gpus % stages == 0 and stages != own.stages
    ]
    for text, other in others:
        try:
            changed = own_workload(workload, other)
            yield text, changed, stages_plan(changed, other)
        except (BadPlan, ZeroDivisionError):
            continue
