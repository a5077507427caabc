"""Programs of users, compiled in Triton's interpreter and compared with eager PyTorch."""
