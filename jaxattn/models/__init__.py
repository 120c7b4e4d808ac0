"""Functional decoder models and checkpoint loading."""
