"""HTML pages of ``nostall characterize``: one file with inline SVG that needs no network."""

from nostall.report.workload.page import write_page

__all__ = ["write_page"]
