"""Result file of ``benchmarks.parallel.predicted_vs_measured``; several sessions can add to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import head
from benchmarks.parallel.gpu.summary import Records, summary
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_atomically
from nostall.parallel.profile import Profile
from nostall.parallel.profile.profile_file import to_record


@dataclass
class Results:
    """Measured points of earlier sessions and of this one.

    A session has a head (date, command, versions), options, versions and GPU (``about``), and the
    cluster and the profiles that it measured.  The field ``session`` of a record is the index of
    its session.
    """

    path: Path
    options: dict[str, Any]
    sessions: list[dict[str, Any]] = field(default_factory=list)
    records: Records = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, options: Any) -> Results:
        """Load the file if it exists.  Raises BadInput if it was run with other options."""
        results = cls(path, asdict(options))
        if not path.exists():
            return results
        body = json.loads(path.read_text(encoding="utf-8"))
        # Old files of one session have its fields at the top level.
        results.sessions = body.get("sessions") or [
            {k: v for k, v in body.items() if k not in ("kind", "summary", "records")}
        ]
        for session in results.sessions:
            if session["options"] != results.options:
                raise BadInput(
                    f"{path} was run with {session['options']}, not with {results.options}; give "
                    "another --out"
                )
        results.records = [{"session": 0, **r} for r in body["records"] if "measured_s" in r]
        return results

    @property
    def done(self) -> set[tuple[str, str, str]]:
        """(model, links, name) of each measured point."""
        return {
            (r["model"], r["links"], name)
            for r in self.records
            if "measured_s" in r
            for name in r["name"].split(" = ")
        }

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.records)

    def begin(self, about: dict[str, Any], cluster: str, profiles: Mapping[str, Profile]) -> None:
        """Start a new session; later records belong to it."""
        measured = {
            "cluster": cluster,
            "profiles": {name: to_record(p).model_dump() for name, p in profiles.items()},
        }
        self.sessions.append({**head(), "options": self.options, "about": about, **measured})

    def add(self, record: dict[str, Any]) -> None:
        """Add a record and write the file."""
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
