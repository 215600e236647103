"""The CUDA device: memory, the registered host pool, residency, captured graphs."""
