"""Scripts that torchrun starts."""

import socket
import subprocess
import sys
from pathlib import Path


def in_two_processes(script: Path, *options: str | Path) -> str:
    """What they say. The address is a number: not every machine can look up its own name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    done = subprocess.run([*command, script, *options], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
