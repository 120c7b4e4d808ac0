"""Benchmarks of jaxattn. Speed lives here and never in tests."""
