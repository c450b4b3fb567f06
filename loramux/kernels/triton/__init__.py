"""CUDA kernels in Triton, and the adapters' memory on the device that they read."""
