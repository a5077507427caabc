"""Running a plan on PyTorch: one process a GPU, over torch.distributed (gloo or NCCL).

Needs PyTorch.  ``run.run_plan`` is one rank's part in a process group of the caller's own;
``launch.launch_ranks`` (``nostall launch``) starts all ranks.  Nothing is imported here, so that
the launcher does not load what only ranks need.
"""
