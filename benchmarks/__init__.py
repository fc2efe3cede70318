"""Measurements of training steps and of reliability; docs/benchmarks.md has results."""
