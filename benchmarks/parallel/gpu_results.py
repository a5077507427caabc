"""The result file of ``benchmarks.parallel.predicted_vs_measured``, which several sessions may fill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import head
from benchmarks.parallel.gpu_summary import Records, summary
from nostall.core.errors import BadInput
from nostall.core.files import write_atomically


@dataclass
class Results:
    """Measured points of earlier sessions, and what this one adds.

    A session is a head (date, command, versions), its options, what it ran on (``about``) and the
    cluster as it measured it; ``session`` of a record is the number of its own.
    """

    path: Path
    options: dict[str, Any]
    sessions: list[dict[str, Any]] = field(default_factory=list)
    records: Records = field(default_factory=list)

    @classmethod
    def at(cls, path: Path, options: Any) -> Results:
        """What the file has; raises BadInput for a file of other options."""
        found = cls(path, asdict(options))
        if not path.exists():
            return found
        body = json.loads(path.read_text(encoding="utf-8"))
        # Files of one session have its parts at the top.
        found.sessions = body.get("sessions") or [
            {k: v for k, v in body.items() if k not in ("kind", "summary", "records")}
        ]
        for session in found.sessions:
            if session["options"] != found.options:
                raise BadInput(
                    f"{path} is of {session['options']}; allowed is {found.options}; give another "
                    "--out"
                )
        found.records = [{"session": 0, **r} for r in body["records"] if "measured_s" in r]
        return found

    @property
    def done(self) -> set[tuple[str, str, str]]:
        """(model, links, name) of what need not run again."""
        return {
            (r["model"], r["links"], name)
            for r in self.records
            if "measured_s" in r
            for name in r["name"].split(" = ")
        }

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.records)

    def begin(self, about: dict[str, Any], cluster: str) -> None:
        """Records from now on are of a new session."""
        session = {**head(), "options": self.options, "about": about, "cluster": cluster}
        self.sessions.append(session)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, at once and for good."""
        plan = {"plan": Path(record["plan"]).name} if "plan" in record else {}
        self.records.append({"session": len(self.sessions) - 1, **record, **plan})
        body = {
            "kind": "measured",
            "sessions": self.sessions,
            "summary": self.summary,
            "records": self.records,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (json.dumps(body, indent=1) + "\n").encode())
