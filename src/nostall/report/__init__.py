"""HTML pages and figures: what a run found, as one file that needs no network."""

from nostall.report.tune.page import write_report

__all__ = ["write_report"]
