"""Quantised weights: the registry of methods, Quark, MXFP4 and FP8."""
