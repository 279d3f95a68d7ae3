"""Claim (b) on a GPU."""

from benchmarks.equal_peak import main

if __name__ == "__main__":
    main("cuda", "gpu_equal_peak")
