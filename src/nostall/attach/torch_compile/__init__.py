"""``torch.compile(model, backend="nostall")``: a backend that adds stitched kernels to Inductor's.

This file imports nothing, because :mod:`nostall.attach.torch_compile.backend` needs PyTorch.
"""
