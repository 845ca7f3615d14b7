"""Triton kernels, one kind a file: the kernel, then the function that launches it on tensors."""
