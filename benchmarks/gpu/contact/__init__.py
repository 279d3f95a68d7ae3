"""The steps of `benchmarks.gpu.first_contact`, one file a topic."""
