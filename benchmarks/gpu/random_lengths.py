"""Claim (e) on a GPU."""

from benchmarks.random_lengths import main

if __name__ == "__main__":
    main("cuda", "gpu_random_lengths")
