"""A matrix and its transpose, quantised in one read: MXFP8, MXFP4, NVFP4, FP8 of a tensor."""
