"""The steps of `benchmarks.gpu.first_contact`, one file a topic, and a rank of `benchmarks.gpu.ranks_nccl`."""
