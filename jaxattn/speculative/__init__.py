"""Drafting, acceptance and the device-side speculative loop."""
