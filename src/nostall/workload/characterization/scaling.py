"""Slow-down of data-parallel steps over several nodes: measured, and predicted for more nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nostall.core.errors import BadInput, BadJob
from nostall.workload.characterization.what_if import WhatIf
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.steps import StepRow, StepTable
from nostall.workload.model.breakdown import ring_allreduce_bytes
from nostall.workload.model.slowdown import (
    BUCKET_BYTES,
    MeasuredStep,
    SlowdownModel,
    fit_slowdown,
    last_bucket_share,
)

MAX_FITTED = 1500
"""Steps that the model is fitted to; of more steps, every n-th one is used."""
MAX_MODELS = 20
"""Models of a table; each one costs a fit without it."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model with the GPUs of a node and the batch of a GPU."""

    model: str
    gpus: int
    batch: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} GPUs, batch {self.batch:g}"


@dataclass(frozen=True, slots=True)
class NodeSlowdown:
    """Step time of one configuration on several nodes."""

    configuration: Configuration
    nodes: int
    one_node_seconds: float
    """Measured, median."""
    gradient_bytes: float
    measured_seconds: float | None
    """Median; None for a prediction."""
    modelled_seconds: float | None
    """None if there is no model."""
    interval: tuple[float, float] | None
    """Modelled 90 % interval of the step time, seconds."""

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.configuration.model,
            "gpus_per_node": self.configuration.gpus,
            "batch": self.configuration.batch,
            "nodes": self.nodes,
            "one_node_seconds": self.one_node_seconds,
            "gradient_bytes": self.gradient_bytes,
        }
        if self.measured_seconds is not None:
            fields["measured_seconds"] = self.measured_seconds
            fields["measured_slowdown"] = self.measured_seconds / self.one_node_seconds
        if self.modelled_seconds is not None:
            fields["modelled_seconds"] = self.modelled_seconds
            fields["modelled_slowdown"] = self.modelled_seconds / self.one_node_seconds
        if self.interval is not None:
            fields["modelled_seconds_90_percent"] = list(self.interval)
        return fields


@dataclass(frozen=True)
class ScalingCharacterization:
    """The result for step tables."""

    measured: tuple[NodeSlowdown, ...]
    predictions: tuple[tuple[WhatIf, tuple[NodeSlowdown, ...]], ...]
    """The answers to ``nodes=N`` questions, one per configuration."""
    network: SlowdownModel | None
    """Fitted model; None if the steps do not determine one."""
    hardware: Hardware
    num_steps: int
    skip_reasons: tuple[str, ...]
    num_skipped: int
    """Number of skipped rows."""
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The JSON output of the command."""
        return {
            "kind": "measured",
            "steps": self.num_steps,
            "slowdown": [row.as_json() for row in self.measured],
            "network": _network_json(self.network, self.hardware) if self.network else None,
            "what_if": [
                {"question": question.text, "kind": "modelled", "answers": [r.as_json() for r in a]}
                for question, a in self.predictions
            ],
            "left_out": self.num_skipped,
            "reasons": list(self.skip_reasons),
            "remarks": list(self.notes),
        }


def characterize_steps(
    tables: Sequence[StepTable],
    hardware: Hardware,
    questions: Sequence[WhatIf] = (),
    unreadable: Sequence[str] = (),
) -> ScalingCharacterization:
    """Compare steps on several nodes with those on one node, and fit a model of the network.

    A step on one node with the same model, GPUs per node and batch is the baseline of a step.
    ``unreadable`` are the reasons for files that could not be read.  Raises
    :class:`~nostall.core.errors.BadJob` if no step has a baseline.
    """
    _check_questions(questions)
    rows = [row for table in tables for row in table.steps]
    baselines = _baselines(rows)
    groups = _by_nodes(rows)
    matched = {key: some for key, some in groups.items() if key[0] in baselines}
    if not matched and not any(question.nodes for question in questions):
        raise BadJob(
            f"{tables[0].path}: no step on several nodes has a step on one node with the same "
            "model, gpus and batch; add rows with nodes = 1"
        )
    notes = [note for table in tables for note in table.notes]
    num_unmatched = len(groups) - len(matched)
    if num_unmatched:
        notes.append(
            f"{num_unmatched} of {len(groups)} combinations of model, GPUs, batch and nodes have "
            "no step on one node and are not compared"
        )
    network = _fit(matched, baselines, hardware, notes)
    measured = [
        _slowdown(key, _typical_bytes(some), baselines[key[0]], network, some)
        for key, some in sorted(matched.items(), key=_sort_key)
    ]
    skip_reasons = [f"{t.path}: {r.position}: {r.reason}" for t in tables for r in t.skipped_rows]
    return ScalingCharacterization(
        measured=tuple(measured),
        predictions=tuple((q, _predict(q, rows, baselines, network)) for q in questions),
        network=network,
        hardware=hardware,
        num_steps=len(rows),
        skip_reasons=(*unreadable, *skip_reasons),
        num_skipped=sum(table.num_skipped for table in tables),
        notes=tuple(notes),
    )


Key = tuple[Configuration, int]
"""(configuration, number of nodes)."""


def _check_questions(questions: Sequence[WhatIf]) -> None:
    for question in questions:
        if question.nodes is None:
            raise BadInput(
                f"--what-if {question.text}: a table of measured steps answers nodes=N only; ask "
                "about rates and architectures with a job table"
            )


def _configuration(row: StepRow) -> Configuration:
    return Configuration(row.model, row.gpus, row.batch)


def _baselines(rows: Sequence[StepRow]) -> dict[Configuration, float]:
    seconds: dict[Configuration, list[float]] = {}
    for row in rows:
        if row.nodes == 1:
            seconds.setdefault(_configuration(row), []).append(row.seconds)
    return {configuration: median(values) for configuration, values in seconds.items()}


def _by_nodes(rows: Sequence[StepRow]) -> dict[Key, list[StepRow]]:
    groups: dict[Key, list[StepRow]] = {}
    for row in rows:
        if row.nodes > 1:
            groups.setdefault((_configuration(row), row.nodes), []).append(row)
    return groups


def _sort_key(item: tuple[Key, list[StepRow]]) -> tuple[str, int, float, int]:
    (configuration, nodes), _ = item
    return configuration.model, configuration.gpus, configuration.batch, nodes


def _typical_bytes(rows: Sequence[StepRow]) -> float:
    return median(row.gradient_bytes for row in rows)


def measured_step(
    group: str, one_node_seconds: float, gradient_bytes: float, nodes: int, seconds: float
) -> MeasuredStep:
    """A step whose nodes exchange the gradients in a ring, in buckets of PyTorch's size."""
    return MeasuredStep(
        group=group,
        compute=one_node_seconds,
        moved_bytes=ring_allreduce_bytes(nodes, gradient_bytes),
        seconds=seconds,
        last_share=last_bucket_share(gradient_bytes, BUCKET_BYTES),
        is_pair=nodes == 2,
    )


def _fit(
    matched: dict[Key, list[StepRow]],
    baselines: dict[Configuration, float],
    hardware: Hardware,
    notes: list[str],
) -> SlowdownModel | None:
    steps = [
        measured_step(
            row.model, baselines[configuration], row.gradient_bytes, row.nodes, row.seconds
        )
        for (configuration, _), some in matched.items()
        for row in some
    ]
    stride = -(-len(steps) // MAX_FITTED) if steps else 1
    models = list(dict.fromkeys(step.group for step in steps))
    fitted = [s for s in steps[::stride] if s.group in models[:MAX_MODELS]]
    if len(fitted) < len(steps):
        notes.append(f"the model of the network is fitted to {len(fitted)} of {len(steps)} steps")
    try:
        return fit_slowdown(fitted, hardware.ethernet)
    except BadInput as error:
        notes.append(f"no model of the network: {error}")
        return None


def _slowdown(
    key: Key,
    gradient_bytes: float,
    one_node: float,
    network: SlowdownModel | None,
    rows: Sequence[StepRow] = (),
) -> NodeSlowdown:
    configuration, nodes = key
    modelled = interval = None
    if network is not None:
        step = measured_step(configuration.model, one_node, gradient_bytes, nodes, 0.0)
        modelled = network.seconds(step)
        interval = network.interval(step) if network.spread else None
    measured = median(row.seconds for row in rows) if rows else None
    return NodeSlowdown(
        configuration, nodes, one_node, gradient_bytes, measured, modelled, interval
    )


def _predict(
    question: WhatIf,
    rows: Sequence[StepRow],
    baselines: dict[Configuration, float],
    network: SlowdownModel | None,
) -> tuple[NodeSlowdown, ...]:
    if network is None:
        raise BadInput(
            f"--what-if {question.text}: the table does not determine a model of the network; add "
            "steps on several nodes of models with different gradient_bytes"
        )
    assert question.nodes is not None
    sizes: dict[Configuration, list[StepRow]] = {}
    for row in rows:
        sizes.setdefault(_configuration(row), []).append(row)
    return tuple(
        _slowdown(
            (configuration, question.nodes),
            question.gradient_bytes or _typical_bytes(sizes[configuration]),
            one_node,
            network,
        )
        for configuration, one_node in sorted(baselines.items(), key=lambda item: item[0].name)
    )


def _network_json(network: SlowdownModel, hardware: Hardware) -> dict[str, Any]:
    return {
        "kind": "modelled",
        "bytes_per_second": network.curve.share * network.peak,
        "share_of_peak": network.curve.share,
        "peak_of": hardware.name,
        "overhead_seconds": network.curve.overhead,
        "hidden_share": network.hidden_share,
        "two_nodes_factor": network.pair_share,
    }
