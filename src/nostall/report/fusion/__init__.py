"""Report page of a run of ``nostall fuse``: a drawing of the partition, and tables of kernels."""

from nostall.report.fusion.page import is_fusion, write_page

__all__ = ["is_fusion", "write_page"]
