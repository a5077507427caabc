"""Execution of plans with PyTorch: one process per GPU over torch.distributed (gloo or NCCL).

``run.run_plan`` is one rank's part of a run, in a process group that the caller has set up;
``launcher.launch.launch_ranks`` (``nostall launch``) starts the processes of all ranks.  This file
imports nothing, so the launcher does not load modules that only ranks need.
"""
