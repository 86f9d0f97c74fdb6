"""`ramet bench gpu`: correctness and speed of the GPU path."""
