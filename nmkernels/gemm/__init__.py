"""How a GEMM of a sparse layer is done: its description, the methods, an estimate of each, and the one place that chooses."""
