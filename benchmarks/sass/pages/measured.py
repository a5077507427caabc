"""Write ``docs/results/sass.md``: measured results of searched SASS schedules.

python -m benchmarks page sass
"""

from __future__ import annotations

from benchmarks.harness.markdown import PAGES, page
from benchmarks.harness.result_file import load, results
from benchmarks.harness.schema import read
from benchmarks.sass.pages.agreement import AGREEMENT, agreement_of
from benchmarks.sass.pages.checks_section import checks_section
from benchmarks.sass.pages.gains import GAINS, gains
from benchmarks.sass.pages.reasons_section import reasons_section
from benchmarks.sass.pages.suite_section import HEADLINE, suite_section
from nostall.core.files.atomic import write_atomically

PAGE = PAGES / "sass.md"
SUITE = results("sass") / "suite.json.gz"
REASONS = results("sass") / "stall_reasons.json"


def text() -> str:
    """The whole page."""
    records = read(SUITE).records
    return page(
        "SASS schedules, measured",
        "python -m benchmarks page sass",
        [
            suite_section(SUITE, records),
            reasons_section(REASONS, load(REASONS), records, HEADLINE),
            checks_section(),
        ],
    )


def write() -> None:
    """Write the page, and the agreement of the SM model and the gains that the package ships."""
    write_atomically(PAGE, text().encode())
    write_atomically(GAINS, (gains().model_dump_json(indent=1) + "\n").encode())
    agreement = agreement_of(read(SUITE).records, SUITE.name)
    if agreement is not None:
        write_atomically(AGREEMENT, (agreement.model_dump_json(indent=1) + "\n").encode())
