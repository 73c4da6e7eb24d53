"""Measurements, each run with `python -m benchmarks.<name>`."""
