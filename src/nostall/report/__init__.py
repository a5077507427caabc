"""Reports: HTML pages and figures of runs, plans and workloads, each a single file."""

from nostall.report.tune.page import write_report

__all__ = ["write_report"]
