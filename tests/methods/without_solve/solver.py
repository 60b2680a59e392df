"""Has no solve at all."""
def solution(x, in_gate, out_gate, k):
    return x
