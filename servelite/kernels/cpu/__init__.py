"""The native CPU kernels of csrc/cpu: which instruction set, and how they are called."""
