"""Layouts compared, exported to C, and pages moved from one to another. SPEC 4.6 to 4.8."""

from dsv4num.layouts.compare import compare
from dsv4num.layouts.convert import convert
from dsv4num.layouts.header import c_header

__all__ = ["c_header", "compare", "convert"]
