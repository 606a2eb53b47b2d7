"""How fast the kernels and the oracle are. See RESULTS.md."""
