"""The table of rules names every finding of the verifier, and the page shows the table."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.sass.pages import evidence

import nostall.sass.safety
from nostall.sass.safety import Finding
from nostall.sass.safety.verdict import BY_KIND, RULES

FOLDER = Path(nostall.sass.safety.__file__).parent
_KIND = re.compile(r"(?:report|inding|append)\(\(?\s*f?\"([a-z-]+)(\{)?")


def reported_kinds() -> set[str]:
    """The names in the source of the verifier; those with a formatted end are expanded."""
    kinds: set[str] = set()
    for path in FOLDER.rglob("*.py"):
        for name, is_formatted in _KIND.findall(path.read_text()):
            kinds |= {f"{name}{h}" for h in ("raw", "waw", "war")} if is_formatted else {name}
    return kinds


def test_the_table_has_exactly_the_rules_that_findings_name() -> None:
    assert reported_kinds() == set(BY_KIND)
    assert len(BY_KIND) == len(RULES)


def test_a_finding_states_the_requirement_and_the_evidence_of_its_rule() -> None:
    finding = Finding("read-order", "kernel", 32, "LDS R1, [R2]", "passes another", "hazards")
    record = finding.as_record()
    assert record["evidence"] == "documented: PTX ISA, Memory Consistency Model"
    assert record["requirement"] == "two reads of one shared location keep their order"


def test_the_page_is_what_the_command_writes() -> None:
    text = evidence.PAGE.read_text("utf-8")
    assert text == evidence.text(text), "run `python -m benchmarks page verifier-evidence`"
