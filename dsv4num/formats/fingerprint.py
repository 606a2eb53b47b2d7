"""A short hash of what decides the bytes of a layout. SPEC 4.7. Standard library only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from typing import Any

from dsv4num.formats.layout import Layout, Plane

#: What names a thing or says where it comes from, and decides no byte.
_NAMES = {"name", "clause", "aliases", "writers", "source", "evidence"}


def fingerprint(layout: Layout) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a layout's facts as JSON.

    In it stand the width, order and place of every field, pad bytes, page multiple and pools, and the
    facts of the formats and of the rule. Names do not: two projects' names for one record have one
    fingerprint. Numbers that are no integers are written as hex floats. What has its default is left
    out, so that a fact added later changes no fingerprint of a layout that does not use it.
    """
    text = json.dumps(_facts(layout), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _facts(thing: Any) -> Any:
    """A dataclass of facts, and what it holds, as JSON can say it."""
    if isinstance(thing, tuple):
        return [_facts(part) for part in thing]
    if isinstance(thing, range):
        return [thing.start, thing.stop]
    if isinstance(thing, float):
        return thing.hex()
    if thing is None or isinstance(thing, (bool, int, str)):
        return thing
    if isinstance(thing, Plane):  # in whatever order its fields were written down
        thing = replace(thing, fields=tuple(sorted(thing.fields, key=lambda f: f.offset)))
    values = {f: getattr(thing, f.name) for f in fields(thing) if f.name not in _NAMES}
    return {f.name: _facts(value) for f, value in values.items() if value != f.default}
