"""Claim (c) on a GPU, with blocks at home in host memory."""

from benchmarks.from_disk import main

if __name__ == "__main__":
    main("cuda", "gpu_from_host", "host")
