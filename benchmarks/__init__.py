"""Benchmarks, one file per claim: ``python -m benchmarks.NAME [--quick]`` writes ``benchmarks/results/NAME.json``."""
