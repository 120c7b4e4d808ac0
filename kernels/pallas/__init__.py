"""Kernels through `pallas_call`, compiled by its Triton backend on GPUs and interpreted on a CPU."""
