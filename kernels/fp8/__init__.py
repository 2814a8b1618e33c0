"""FP8 with FP32 scales: for a tensor, a row, 128 elements, a square of 128 x 128."""
