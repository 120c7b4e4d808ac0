"""Audit of compiled kernels: what the machine code uses, and whether every address is 64 bits wide."""
