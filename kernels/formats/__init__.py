"""Number formats: their table, and their codes in PyTorch and inside Triton kernels."""
