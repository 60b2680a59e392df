"""Needs another folder of the repository."""
from glconv import gated_causal_conv as solve  # noqa: F401
