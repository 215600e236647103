"""CUDA kernels in Triton. Import ``ops`` only where triton is installed; nothing else needs it."""
