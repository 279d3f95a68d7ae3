"""Claim (a) on a GPU."""

from benchmarks.everything_fits import main

if __name__ == "__main__":
    main("cuda", "gpu_everything_fits")
