"""The benchmarks that have a GPU version, on ``cuda`` with blocks at home in host memory."""
