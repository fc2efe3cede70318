"""Timing of training steps; results in docs/benchmarks.md."""
