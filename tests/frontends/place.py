"""Where the tests of front-ends compute: on the CPU, or on the simulated GPU in a process that has one."""

import sys

DEVICE = "cuda" if "simulated_gpu.plugin" in sys.modules else "cpu"
