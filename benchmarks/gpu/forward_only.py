"""Calls without gradients on a GPU, with blocks at home in host memory."""

from benchmarks.forward_only import main

if __name__ == "__main__":
    main("cuda", "gpu_forward_only", "host")
