"""Unified paged attention for JAX."""
