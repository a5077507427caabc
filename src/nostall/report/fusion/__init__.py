"""The page of a fusion plan: which operators are in which kernel, as a picture and as tables."""

from nostall.report.fusion.page import is_fusion, write_page

__all__ = ["is_fusion", "write_page"]
