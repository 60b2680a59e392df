"""Never comes back."""
import time


def solve(x, in_gate, out_gate, k):
    while True:
        time.sleep(1)
