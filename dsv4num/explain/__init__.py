"""Why bytes differ: dialects by name, and a search for those that explain what a writer wrote.

SPEC section 8. Works on bytes and NumPy arrays; needs no torch.
"""

from dsv4num.explain.dialects import DIALECTS, Dialect, apply, dialects_of
from dsv4num.explain.encoder import Knobs, encode_under
from dsv4num.explain.pages import Dump
from dsv4num.explain.search import Explanation, Hypothesis, explain_expected, explain_rows
from dsv4num.explain.sources import Latents, Rows, Source, States

__all__ = [
    "DIALECTS",
    "Dialect",
    "Dump",
    "Explanation",
    "Hypothesis",
    "Knobs",
    "Latents",
    "Rows",
    "Source",
    "States",
    "apply",
    "dialects_of",
    "encode_under",
    "explain_expected",
    "explain_rows",
]
