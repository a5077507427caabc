"""``torch.compile(model, backend="nostall")``: stitched kernels among what Inductor makes.

Nothing is imported here: :mod:`nostall.attach.torch_compile.backend` needs PyTorch.
"""
