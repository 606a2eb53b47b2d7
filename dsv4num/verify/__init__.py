"""One runner that holds every kernel to the oracle, byte for byte."""
