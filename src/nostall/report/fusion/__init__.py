"""Report page of a run of ``nostall fuse``: a drawing of the partition, and tables of kernels."""
