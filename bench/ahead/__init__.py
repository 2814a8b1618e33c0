"""What the compiler made of the kernels, looked at without a GPU: `sidestream inspect`."""
