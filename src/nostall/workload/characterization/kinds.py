"""Kinds of the programs that traces record, by the operators that they call.

Kinds of the kernels that no rule names, learnt from launch parameters and times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.core.errors import BadInput, BadTrace, MissingPart
from nostall.core.files.atomic import is_stream
from nostall.workload.learning.documents import (
    Document,
    canonical_operator,
    read_documents,
    write_documents,
)
from nostall.workload.traces.host import read_host
from nostall.workload.traces.launches import KernelLaunches, read_launches
from nostall.workload.traces.work_kinds import matching_rule

if TYPE_CHECKING:
    from nostall.workload.learning.kernels import KernelLabeller
    from nostall.workload.learning.labeller import KindLabeller, Label, NewKinds

MAX_KERNELS = 10
"""Kernels that are labelled: those with most time."""


@dataclass(frozen=True, slots=True)
class UnnamedKernel:
    """A kernel that no rule names, and its learnt kind."""

    name: str
    seconds: float
    """Of all its launches."""
    kind: str
    probability: float

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.name,
            "seconds": self.seconds,
            "learnt_kind": self.kind,
            "probability": self.probability,
        }


def label_unnamed_kernels(paths: Sequence[Path]) -> tuple[UnnamedKernel, ...]:
    """Label the unnamed kernels with most time of all traces; needs the extra ``learn``.

    A kernel's parameters are those of its launches with most time.  Kernels whose events lack
    launch parameters are left out.
    """
    seconds: dict[str, float] = {}
    longest: dict[str, KernelLaunches] = {}
    for path in paths:
        for launches in read_launches(path):
            if matching_rule(launches.name) is not None:
                continue
            name = launches.name
            seconds[name] = seconds.get(name, 0.0) + launches.seconds
            if name not in longest or launches.seconds > longest[name].seconds:
                longest[name] = launches
    names = sorted(seconds, key=lambda name: -seconds[name])[:MAX_KERNELS]
    if not names:
        return ()
    from nostall.workload.learning.kernels import Launch

    labels = _labeller().label(
        [
            Launch(
                row.grid, row.block, row.registers, row.shared_memory, 1e6 * row.seconds / row.count
            )
            for row in (longest[name] for name in names)
        ]
    )
    return tuple(
        UnnamedKernel(name, seconds[name], label.kind, label.probability)
        for name, label in zip(names, labels, strict=True)
    )


@cache
def _labeller() -> KernelLabeller:
    """The classifier of the labelled kernels that nostall brings."""
    from nostall.workload.learning.kernels import KernelLabeller, read_launches

    with resources.as_file(resources.files("nostall.workload.learning")) as folder:
        return KernelLabeller(read_launches(folder / "kernel_corpus.json.gz"))


SMALLEST_GROUP = 4
"""Traces of unknown kinds that are grouped; fewer are only listed."""


@dataclass(frozen=True)
class KindsCharacterization:
    """Labels of traces, and the new kinds among those without a known kind."""

    documents: tuple[Document, ...]
    labels: tuple[Label, ...]
    new_kinds: NewKinds | None
    """None if fewer than :data:`SMALLEST_GROUP` traces are of unknown kinds."""
    corpus: str
    """Where the labelled programs come from."""
    threshold: float
    """Novelty from which on a trace is of an unknown kind."""
    confusions: Mapping[tuple[str, str], int]
    """(kind, label) of the labelled programs in cross-validation, and how many there are."""
    reliability: tuple[tuple[float, float, int], ...]
    """(mean probability, share of right labels, programs) of labelled programs, by bins."""
    skip_reasons: tuple[str, ...]
    kernels: tuple[UnnamedKernel, ...] = ()
    """Kernels that no rule names, with learnt kinds; those with most time."""

    @property
    def rows(self) -> list[tuple[Document, Label]]:
        """Each trace with its label."""
        return list(zip(self.documents, self.labels, strict=True))

    def as_json(self) -> dict[str, Any]:
        new = self.new_kinds
        return {
            "corpus": self.corpus,
            "threshold": self.threshold,
            "traces": [
                {
                    "file": document.name,
                    "kind": None if label.is_unknown else label.kind,
                    "most_probable_known_kind": label.kind,
                    "probability": label.probability,
                    "novelty": label.novelty,
                    "nearest": [asdict(neighbour) for neighbour in label.nearest],
                    "decisive_operators": dict(label.words),
                }
                for document, label in self.rows
            ],
            "new_kinds": None
            if new is None
            else {
                "groups": [
                    {"traces": list(kind.members), "operators": list(kind.words)}
                    for kind in new.kinds
                ],
                "number_by_temper": {
                    str(temper): {str(n): share for n, share in posterior.items()}
                    for temper, posterior in new.counts.items()
                },
            },
            "cross_validation": {
                "confusions": [
                    {"kind": kind, "label": label, "programs": count}
                    for (kind, label), count in self.confusions.items()
                    if kind != label
                ],
                "reliability": [list(row) for row in self.reliability],
            },
            "unnamed_kernels": [kernel.as_json() for kernel in self.kernels],
            "skipped": list(self.skip_reasons),
        }


def require_learners() -> None:
    """Raise :class:`~nostall.core.errors.MissingPart` if the extra ``learn`` is not installed."""
    missing = [name for name in ("sklearn", "scipy") if find_spec(name) is None]
    if missing:
        raise MissingPart(
            f"labels of traces need {' and '.join(missing)}; pip install 'nostall[learn]'"
        )


def trace_document(path: Path, kind: str = "") -> Document:
    """The operators that the program of a trace calls on the host.

    Raises :class:`~nostall.core.errors.BadTrace` if the trace has none.
    """
    recording = read_host(path)
    calls: Counter[str] = Counter()
    for index in recording.operators.name.tolist():
        operator = canonical_operator(recording.names[index])
        if operator is not None:
            calls[operator] += 1
    if not calls:
        raise BadTrace(
            f"{path}: it records no PyTorch operators; record the trace with ProfilerActivity.CPU"
        )
    return Document(str(path), kind, dict(sorted(calls.items())))


def read_trace_documents(paths: Sequence[Path], kind: str = "") -> tuple[list[Document], list[str]]:
    """(documents, reasons for traces that cannot be read).

    Raises :class:`~nostall.core.errors.BadTrace` if none can be read.
    """
    documents, reasons = [], []
    for path in paths:
        try:
            documents.append(trace_document(path, kind))
        except BadTrace as error:
            reasons.append(str(error))
    if not documents:
        raise BadTrace(reasons[0])
    return documents, reasons


def learn(paths: Sequence[Path], kind: str, corpus: Path) -> tuple[int, list[str]]:
    """Add traces of a kind to a file of labelled programs; a trace replaces one of its name.

    Returns the number of programs in the file, and the reasons for traces that cannot be read.
    """
    if not kind.strip():
        raise BadInput("--learn needs the kind of the traces; give --kind, for example --kind bert")
    documents, reasons = read_trace_documents(paths, kind.strip())
    names = {document.name for document in documents}
    old = read_documents(corpus) if corpus.exists() and not is_stream(corpus) else []
    together = [document for document in old if document.name not in names] + documents
    write_documents(corpus, together)
    return len(together), reasons


def characterize_kinds(paths: Sequence[Path], corpus: Path | None) -> KindsCharacterization:
    """Label traces with the kinds of a file of labelled programs, by default nostall's own."""
    require_learners()
    from nostall.workload.learning.labeller import KindLabeller, find_new_kinds

    labeller = _own_labeller() if corpus is None else KindLabeller(read_documents(corpus))
    documents, reasons = read_trace_documents(paths)
    usable = [d for d in documents if labeller.knows_operators_of(d)]
    reasons += [
        f"{d.name}: it calls no operator of the labelled programs"
        for d in documents
        if d not in usable
    ]
    labels = labeller.label(usable)
    unknown = [d for d, label in zip(usable, labels, strict=True) if label.is_unknown]
    has_group = len(unknown) >= SMALLEST_GROUP
    new_kinds = find_new_kinds(labeller.documents, unknown) if has_group else None
    return KindsCharacterization(
        documents=tuple(usable),
        labels=tuple(labels),
        new_kinds=new_kinds,
        corpus=str(corpus) if corpus else "nostall's generated models",
        threshold=labeller.threshold,
        confusions=labeller.confusions(),
        reliability=tuple(labeller.reliability()),
        skip_reasons=tuple(reasons),
        kernels=label_unnamed_kernels([Path(document.name) for document in documents]),
    )


@cache
def _own_labeller() -> KindLabeller:
    """The classifier of the labelled programs that nostall brings, fitted once a process."""
    from nostall.workload.learning.labeller import KindLabeller

    with resources.as_file(resources.files("nostall.workload.learning")) as folder:
        return KindLabeller(read_documents(folder / "corpus.json.gz"))
