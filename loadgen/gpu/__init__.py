"""`ramet bench gpu`: what the GPU path computes and how fast, on the machine at hand."""
