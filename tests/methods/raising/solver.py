"""Raises."""
def solve(x, in_gate, out_gate, k):
    raise RuntimeError("no kernel for this device")
