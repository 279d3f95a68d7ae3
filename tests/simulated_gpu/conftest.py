"""Tests of the simulator: `python -m pytest -p simulated_gpu.plugin tests/simulated_gpu`, with `PYTHONPATH=tests`.

Their process is one whose CUDA device is simulated, which only the plugin can bring about: other runs leave them out.
"""

import sys

collect_ignore_glob = [] if "simulated_gpu.plugin" in sys.modules else ["test_*.py"]
