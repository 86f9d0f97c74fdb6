"""Execution of a ForwardBatch: the decoder in torch and in C++, attention, CUDA graphs, tensor parallelism."""
