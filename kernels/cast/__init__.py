"""Plain casts between FP32, BF16, FP16 and element formats without scales."""
