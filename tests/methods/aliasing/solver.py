"""Right, but in the memory of out_gate: seen even where the caller would not miss its values."""
def solve(x, in_gate, out_gate, k):
    return out_gate.view_as(x)
