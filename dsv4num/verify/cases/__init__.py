"""The cases of every operation, in files named like the modules that define the operations."""
