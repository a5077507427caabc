"""The job of ``nostall fuse``: trace, plan, generate, compile, verify, measure and tune kernels."""
