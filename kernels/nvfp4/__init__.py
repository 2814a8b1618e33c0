"""NVFP4, E4M3 scales for blocks of 16 elements, and the Hadamard transform of 16."""
