"""The tools as a user types them: `python -m tools ...` in a process of its own."""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_tools(*arguments: object, limit: float = 200, **variables: str) -> subprocess.CompletedProcess:
    """What the command said and its exit status; `variables` are added to the environment, `limit` is in seconds."""
    return subprocess.run([sys.executable, "-m", "tools", *map(str, arguments)], cwd=ROOT, env=os.environ | variables,
                          capture_output=True, text=True, timeout=limit)
