"""Takes its process down."""
import os
import signal


def solve(x, in_gate, out_gate, k):
    os.kill(os.getpid(), signal.SIGSEGV)
