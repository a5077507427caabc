"""HTML pages of `nostall characterize`: one file, no network, own SVG."""

from nostall.report.workload.page import write_page

__all__ = ["write_page"]
