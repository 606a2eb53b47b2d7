"""Errors raised by this package. SPEC clause 6.

Every error says what was given, what is allowed, and the clause that says so.
"""

from __future__ import annotations


class Dsv4numError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(Dsv4numError, ValueError):
    """An argument has the wrong type, dtype, rank, shape, stride, device or name."""

    def __init__(self, name: str, given: object, allowed: object, clause: str = "6.1") -> None:
        self.name, self.given, self.allowed, self.clause = name, given, allowed, clause
        super().__init__(f"{name}: got {given}; allowed: {allowed} (SPEC {clause})")


class ValueRangeError(ArgumentError):
    """A value inside an array (a slot, a page number, a length) is out of range or repeated."""

    def __init__(self, name: str, given: object, allowed: object, clause: str = "6.2") -> None:
        super().__init__(name, given, allowed, clause)


class UnsupportedError(Dsv4numError, RuntimeError):
    """The request is well formed, but this machine or this installation cannot serve it."""


class MismatchError(Dsv4numError, AssertionError):
    """What an implementation did is not what it should do: the report of a case of `dsv4num.cases`."""
