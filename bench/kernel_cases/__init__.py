"""What the benchmark adds to the kernels' cases: who competes, which are chosen, and the gate."""
