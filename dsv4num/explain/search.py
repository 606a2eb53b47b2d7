"""Which dialects explain bytes that differ: the search, and what it answers. SPEC section 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.explain.decoded import Decoded
from dsv4num.explain.dialects import Dialect, apply, clash, dialects_of
from dsv4num.explain.encoder import Knobs, encode_under
from dsv4num.explain.facts import Fact, facts_of
from dsv4num.explain.pages import Dump
from dsv4num.explain.probes import probes_like
from dsv4num.explain.sources import Source

__all__ = ["Explanation", "Hypothesis", "explain_expected", "explain_rows"]

#: Rows that are looked at in the search, and rows over which the answer is counted.
_ROWS, _MOST = 256, 1 << 14
#: How many dialects are tried with every other one, and how many rows decide whether a pair is tried on
#: all: those that the first of the pair leaves wrong, and some others.
_PARTNERS, _SAMPLE = 12, 12
#: From here on a hypothesis is worth saying: share of the differing bytes that it explains.
_SHARE = 0.75
#: Knobs of the place; the others make the record.
_PLACE = ("arrangement", "page_multiple", "pages", "slot_shift", "pad_written")
#: Knobs of the rows' origin.
_ORIGIN = (
    *("rotation", "table", "position", "fused", "hadamard"),
    *("bf16_step", "bf16_rounding", "lanes"),
)


@dataclass(frozen=True)
class Hypothesis:
    """One answer, and how well it fits.

    Attributes:
        names: of its dialects, or of the fact.
        text: completes "is explained by: ...".
        explained: differing bytes that are as it says.
        differing: all differing bytes.
        contradicted: bytes that are as expected, though it says otherwise.
        fields: the differing bytes by field that it explains.
        silent: differing bytes in places that it does not write, where anything may be.
    """

    names: tuple[str, ...]
    text: str
    explained: int
    differing: int
    contradicted: int
    fields: dict[str, int] = field(default_factory=dict)
    silent: int = 0

    @property
    def wrong(self) -> int:
        """Bytes that are not as it says."""
        return self.contradicted + self.differing - self.silent - self.explained

    @property
    def exact(self) -> bool:
        """Whether no byte that it speaks of is otherwise."""
        return self.wrong == 0

    @property
    def fits(self) -> bool:
        """Whether it is worth saying."""
        spoken = self.differing - self.silent
        few = (1 - _SHARE) * spoken
        return spoken > 0 and self.explained >= _SHARE * spoken and self.contradicted <= few

    def sentence(self) -> str:
        """The hypothesis with its figures.

        Example:
            >>> Hypothesis(("no-floor",), "no floor", 64, 64, 0, {"scale": 64}).sentence()
            'every one of 64 differing scale bytes is explained by: no floor'
            >>> Hypothesis(("no-floor",), "no floor", 60, 64, 2, {"scale": 60}).sentence()
            '60 of 64 differing bytes (93.8 %) are explained by: no floor; 2 other bytes contradict it'
        """
        parts = ", ".join(f"{count:,} {name}" for name, count in self.fields.items())
        if self.explained + self.silent == self.differing:
            one = len(self.fields) == 1
            of = f"{next(iter(self.fields))} bytes" if one else f"bytes ({parts})"
            subject = f"every one of {self.explained:,} differing {of} is"
        else:
            share = 100 * self.explained / self.differing
            subject = (
                f"{self.explained:,} of {self.differing:,} differing bytes ({share:.1f} %) are"
            )
        rest = f"; {self.silent:,} others lie where it writes nothing" if self.silent else ""
        rest += f"; {self.contradicted:,} other bytes contradict it" if self.contradicted else ""
        return f"{subject} explained by: {self.text}{rest}"

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "dialects": list(self.names),
            "text": self.text,
            "explained": self.explained,
            "differing": self.differing,
            "contradicted": self.contradicted,
            "silent": self.silent,
            "fields": self.fields,
        }


@dataclass(frozen=True)
class Explanation:
    """The answer.

    Attributes:
        status: "no difference"; "explained": one hypothesis explains every byte; "partly explained":
            one explains most; "unexplained".
        compared: bytes that were compared.
        differing: bytes that differ.
        fields: differing bytes by field.
        hypotheses: those that fit, the best first; others that fit equally well come next to it.
        separating: what input would tell apart the first two, where both explain everything.
        left_out: rows that were not counted, because there were very many.
    """

    status: str
    compared: int
    differing: int
    fields: dict[str, int] = field(default_factory=dict)
    hypotheses: tuple[Hypothesis, ...] = ()
    separating: str | None = None
    left_out: int = 0

    @property
    def left(self) -> dict[str, int]:
        """Differing bytes by field that the best of hypotheses which explain a part leaves."""
        if self.status != "partly explained":
            return {}
        best = self.hypotheses[0].fields
        rest = {name: count - best.get(name, 0) for name, count in self.fields.items()}
        return {name: count for name, count in rest.items() if count}

    def lines(self) -> list[str]:
        """Text for people."""
        if self.status == "no difference":
            return [f"no difference: all {self.compared:,} bytes are as expected"]
        parts = ", ".join(f"{count:,} {name}" for name, count in self.fields.items())
        lines = [f"{self.differing:,} of {self.compared:,} bytes differ: {parts}"]
        if self.left_out:
            lines.append(
                f"counted over the pages that differ most; {self.left_out:,} rows left out"
            )
        if not self.hypotheses:
            return [*lines, "unexplained: no dialect, alone or in a pair, explains these bytes"]
        lines.append(self.hypotheses[0].sentence())
        if self.left:
            rest = ", ".join(f"{count:,} {name}" for name, count in self.left.items())
            lines.append(f"not explained by it: {rest}; a further fault may be there")
        for other in self.hypotheses[1:]:
            equal = other.exact and self.hypotheses[0].exact
            lines.append(f"{'fits equally' if equal else 'runner-up'}: {other.sentence()}")
        if self.separating:
            lines.append(f"what would tell: {self.separating}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "status": self.status,
            "compared": self.compared,
            "differing": self.differing,
            "fields": self.fields,
            "hypotheses": [h.as_json() for h in self.hypotheses],
            "separating": self.separating,
            "left": self.left,
            "rows_left_out": self.left_out,
        }


def explain_rows(observed: Dump, source: Source, *, limit: int = 3) -> Explanation:
    r"""Why a writer's bytes are not those of the contract, from what it was given.

    Rule (section 8): each dialect that the layout and the source can show is tried alone, then in
    pairs; the bytes of the rows' slots are compared, no others.

    Args:
        observed: what the writer wrote.
        source: what it was given.
        limit: how many hypotheses to return at most.

    Raises:
        ArgumentError: a slot beyond the dump.

    Example:
        >>> import ml_dtypes
        >>> from dsv4num.explain.sources import Rows
        >>> from dsv4num.formats import get_layout
        >>> page = np.zeros(2 * 68, np.uint8)  # zeros, and scales with the floor 1e-8 on amax
        >>> page[128:] = 0x62
        >>> rows = Rows(np.zeros((2, 128), ml_dtypes.bfloat16), np.int64([0, 1]))
        >>> found = explain_rows(Dump.of(page, get_layout("indexer_mxfp4"), 2), rows)
        >>> print(found.hypotheses[0].sentence().replace(": ", ":\n"))
        every one of 8 differing scale bytes is explained by:
        floor 1e-8 on amax instead of 6 * 2^-126 on amax
    """
    slots = source.slots
    if slots.size and slots.max() >= len(observed.slots):
        allowed = (
            f"below {len(observed.slots)} ({observed.pages} pages of {observed.block_size} rows)"
        )
        raise ArgumentError("slots", int(slots.max()), allowed, "6.2")
    if len(np.unique(slots[slots >= 0])) < int((slots >= 0).sum()):
        raise ArgumentError("slots", "a slot more than once", "each slot once", "6.2")
    source = source.part(np.flatnonzero(slots >= 0))

    def right(rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        part = source.part(rows)
        return encode_under(part.values(Knobs()), observed.layout, Knobs(), bf16=part.bf16)

    rows = _most_telling(observed, source.slots, right)
    return _explain(observed, source.part(rows), right(rows), limit, len(source.slots))


def explain_expected(observed: Dump, expected: Dump, *, limit: int = 3) -> Explanation:
    """Why bytes are not the expected ones, where the input is not known.

    Rows are taken back from the expected bytes, as far as bytes tell them: where a dialect would
    round an element anew, its code may be one off. Rows that nobody wrote, equal and of one byte
    throughout, are left out of the search.

    Args:
        observed: what the writer wrote.
        expected: what it should have written; of the same layout and block size.
        limit: how many hypotheses to return at most.
    """
    count = min(len(observed.slots), len(expected.slots))
    slots = np.arange(count, dtype=np.int64)
    slots = slots[_most_telling(observed, slots, lambda rows: expected.records(slots[rows]))]
    records = expected.records(slots)
    blank = expected.blank(records)  # poison, or zeros: nobody wrote this row
    kept = ~(blank & (records == observed.records(slots)).all(axis=1))
    source = Decoded(records[kept], slots[kept], observed.layout)
    return _explain(observed, source, records[kept], limit, count)


def _most_telling(
    observed: Dump,
    slots: NDArray[np.int64],
    right: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
) -> NDArray[np.int64]:
    """All rows, or of very many those of the pages with the most differing bytes."""
    rows = np.arange(len(slots), dtype=np.int64)
    if len(rows) <= _MOST:
        return rows
    parts = np.array_split(rows, -(-len(rows) // 4096))
    counts = [(observed.records(slots[p]) != right(p)).sum(axis=1) for p in parts]
    return _fullest_pages(observed, slots, np.concatenate(counts), _MOST)


def _fullest_pages(
    dump: Dump, slots: NDArray[np.int64], counts: NDArray[Any], limit: int
) -> NDArray[np.int64]:
    """So many rows, page by page, those of the pages with the most differing bytes first."""
    page = slots // dump.block_size
    by_page = np.bincount(page, counts)
    return np.sort(np.argsort(-by_page[page], kind="stable")[:limit])


@dataclass
class _Task:
    """Rows of one search: what is there, what was expected, and what writers would have written."""

    observed: Dump
    source: Source
    expected: NDArray[np.uint8]
    cache: dict[Knobs, tuple[NDArray[np.uint8], NDArray[np.bool_] | None]] = field(
        default_factory=dict
    )
    values: dict[Knobs, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.where = self.observed.offsets(self.source.slots)
        self.found = self.observed.records(self.source.slots)
        self.differs = np.asarray(self.found != self.expected)
        self.count = int(self.differs.sum())
        # By place in the dump: 0 unknown, 1 as expected, 2 differing.
        self.state = np.zeros(len(self.observed.data), np.uint8)
        there = self.where >= 0
        self.state[self.where[there]] = np.where(self.differs, 2, 1)[there]

    def part(self, rows: NDArray[np.int64]) -> _Task:
        """The same for these rows alone."""
        return _Task(self.observed, self.source.part(rows), self.expected[rows])

    def written(self, knobs: Knobs) -> tuple[NDArray[np.uint8], NDArray[np.bool_] | None]:
        """The records of a writer, and where a code that is one off is as good."""
        numeric = replace(knobs, **_AT_REST)
        if numeric not in self.cache:
            layout = self.observed.layout
            if isinstance(self.source, Decoded):
                self.cache[numeric] = self.source.records(numeric)
            else:
                origin = Knobs(**{name: getattr(knobs, name) for name in _ORIGIN})
                if origin not in self.values:
                    self.values[origin] = self.source.values(origin)
                values = self.values[origin]
                records = encode_under(values, layout, knobs, bf16=self.source.bf16)
                self.cache[numeric] = records, None
        return self.cache[numeric]

    def wrong_rows(self, knobs: Knobs) -> NDArray[np.bool_]:
        """The rows with a byte that is not as this writer would write it."""
        records, near = self.written(knobs)
        where = self.observed.offsets(self.source.slots, knobs)
        there = where >= 0
        right = _agree(records, self.observed.data[where], near) | ~there
        return np.asarray(~right.all(axis=1))

    def outcome(self, knobs: Knobs) -> _Outcome:
        """How well a writer with these knobs explains what is there."""
        records, near = self.written(knobs)
        if all(getattr(knobs, name) == rest for name, rest in _AT_REST.items()):
            right = _agree(records, self.found, near)
            return _Outcome(
                right & self.differs, 0, int((~right & ~self.differs).sum()), self.count
            )
        where = self.observed.offsets(self.source.slots, knobs)
        there = where >= 0
        right = _agree(records, self.observed.data[where], near) & there
        written, agreed = (np.zeros(len(self.observed.data), np.bool_) for _ in range(2))
        written[where[there]] = True
        agreed[where[right]] = True
        explained = agreed[self.where] & self.differs
        silent = int((self.differs & ~written[self.where]).sum())
        wrong = int((there & ~right & (self.state[where] != 2)).sum())
        if there.sum() < there.size / 2:  # it says next to nothing
            wrong += self.count
        return _Outcome(explained, silent, wrong, self.count)


@dataclass(frozen=True)
class _Outcome:
    """How well a hypothesis fits.

    Attributes:
        mark: bool [T, row bytes], the differing bytes that are as it says.
        silent: differing bytes that it does not write.
        contradicted: other bytes that are not as it says.
        differing: all differing bytes.
    """

    mark: NDArray[np.bool_]
    silent: int
    contradicted: int
    differing: int

    @property
    def explained(self) -> int:
        return int(self.mark.sum())

    @property
    def wrong(self) -> int:
        """Bytes that are not as it says."""
        return self.contradicted + self.differing - self.silent - self.explained


_AT_REST = {name: getattr(Knobs(), name) for name in _PLACE}


def _agree(
    records: NDArray[np.uint8], found: NDArray[np.uint8], near: NDArray[np.bool_] | None
) -> NDArray[np.bool_]:
    """Where records are as predicted; where they may be one code off, that counts too."""
    equal: NDArray[np.bool_] = np.asarray(records == found)
    if near is None:
        return equal
    step = np.abs(records.astype(np.int16) - found)
    nibbles = (step % 16 <= 1) | (step % 16 == 15)
    zero = (records & 0x7F == 0) & (found & 0x7F == 0)
    close = (step <= 1) | zero | (nibbles & (step <= 17) & (step >= 15))
    return np.asarray(equal | (near & close))


def _explain(
    observed: Dump, source: Source, expected: NDArray[np.uint8], limit: int, total: int
) -> Explanation:
    """The answer over the rows of `source`, which are some or all of `total` rows."""
    whole = _Task(observed, source, expected)
    compared = int(expected.size)
    if not whole.count:  # then no row differs, also of those that were left out
        return Explanation("no difference", total * observed.layout.row_bytes, 0)
    task = whole
    if len(expected) > _ROWS:
        counts = whole.differs.sum(axis=1)
        task = whole.part(_fullest_pages(observed, source.slots, counts, _ROWS))
    ranked = _search(task)
    hypotheses = [_hypothesis(whole, dialects) for dialects in ranked]
    answers = [h for h in hypotheses if h.fits]
    if not any(h.exact for h in answers):  # a dialect says more than what is true of its bytes
        facts = [_of_fact(whole, fact) for fact in facts_of(observed, source.slots, expected)]
        answers += [h for h in facts if h.fits]
    answers.sort(key=lambda h: h.wrong)  # stable: dialects first
    fields = _by_field(whole, whole.differs)
    left_out = total - len(expected) if len(expected) >= _MOST else 0
    if not answers:
        return Explanation("unexplained", compared, whole.count, fields, left_out=left_out)
    best = set(answers[0].names)
    answers = [
        h for h in answers if h is answers[0] or not set(h.names) < best
    ]  # no mere half of it
    status = "explained" if answers[0].exact else "partly explained"
    separating = _separate(whole, answers, {_names(d): d for d in ranked})
    return Explanation(
        status, compared, whole.count, fields, tuple(answers[:limit]), separating, left_out
    )


def _names(dialects: Sequence[Dialect]) -> tuple[str, ...]:
    return tuple(dialect.name for dialect in dialects)


def _search(task: _Task) -> list[tuple[Dialect, ...]]:
    """Dialects alone and in pairs, the best first; no pair that one of the two is as good as."""
    singles = _distinct(task.observed, dialects_of(task.observed.layout, task.source.kinds))
    place = {dialect.name: index for index, dialect in enumerate(singles)}
    wrong: dict[tuple[str, ...], int] = {}
    chosen: dict[tuple[str, ...], tuple[Dialect, ...]] = {}

    def attempt(*dialects: Dialect) -> None:
        key = _names(dialects)
        wrong[key] = task.outcome(apply(*dialects)).wrong
        chosen[key] = dialects

    for dialect in singles:
        attempt(dialect)
    if min(wrong.values()) > 0:
        for pair in _pairs(task, singles, wrong):
            attempt(*pair)
    names = [
        key for key in chosen if len(key) == 1 or wrong[key] < min(wrong[(name,)] for name in key)
    ]
    names.sort(key=lambda key: (wrong[key], len(key), *(place[name] for name in key)))
    return [chosen[key] for key in names if wrong[key] < task.count][:12]


def _distinct(dump: Dump, dialects: list[Dialect]) -> list[Dialect]:
    """The dialects without those of the place that, at this block size, say what another one says."""
    seen, kept = {dump.place(Knobs())}, []
    for dialect in dialects:
        if dialect.knobs.keys() <= _AT_REST.keys():
            try:
                place = dump.place(apply(dialect))
            except ArgumentError:  # its rows per page do not fill the tiles
                continue
            if place in seen:
                continue
            seen.add(place)
        kept.append(dialect)
    return kept


def _pairs(
    task: _Task, singles: list[Dialect], wrong: dict[tuple[str, ...], int]
) -> Iterable[tuple[Dialect, Dialect]]:
    """The pairs that are worth trying on every row.

    The first of a pair explains something; the second makes rows better that the first leaves wrong.
    """
    best = sorted(
        (d for d in singles if wrong[(d.name,)] < task.count), key=lambda d: wrong[(d.name,)]
    )
    found: list[tuple[Dialect, Dialect]] = []
    seen: set[frozenset[str]] = set()
    for first in best[:_PARTNERS]:
        left = np.flatnonzero(task.wrong_rows(apply(first)))
        others = np.setdiff1d(np.arange(len(task.expected)), left)
        rows = np.concatenate([_spread(left, _SAMPLE), _spread(others, _SAMPLE // 4)])
        sample = task.part(np.sort(rows))
        found += _promising(sample, sample.outcome(apply(first)).wrong, first, singles, seen)
    if not found:  # two that explain nothing alone
        rows = _spread(np.flatnonzero(task.differs.any(axis=1)), 8)
        sample = task.part(rows)
        for index, first in enumerate(singles):
            found += _promising(sample, sample.count, first, singles[index + 1 :], seen)
    return found


def _promising(
    sample: _Task, so_far: int, first: Dialect, others: list[Dialect], seen: set[frozenset[str]]
) -> list[tuple[Dialect, Dialect]]:
    """The partners of a dialect that make a sample better, the best four of them."""
    better = []
    for second in others:
        names = frozenset({first.name, second.name})
        if len(names) == 1 or names in seen or clash(first, second):
            continue
        wrong = sample.outcome(apply(first, second)).wrong
        if wrong < so_far:
            better.append((wrong, second))
            seen.add(names)
    better.sort(key=lambda entry: entry[0])
    return [(first, second) for _, second in better[:4]]


def _spread(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most that many of the rows, spread over them."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


def _hypothesis(task: _Task, dialects: tuple[Dialect, ...]) -> Hypothesis:
    """Dialects and how well they fit all rows."""
    outcome = task.outcome(apply(*dialects))
    return Hypothesis(
        _names(dialects),
        " and ".join(d.describe(task.observed.layout) for d in dialects),
        outcome.explained,
        task.count,
        outcome.contradicted,
        _by_field(task, outcome.mark),
        outcome.silent,
    )


def _of_fact(task: _Task, fact: Fact) -> Hypothesis:
    """A fact about the bytes as a hypothesis."""
    mark = fact.explained & task.differs
    fields = _by_field(task, mark)
    return Hypothesis((fact.name,), fact.text, int(mark.sum()), task.count, 0, fields)


def _by_field(task: _Task, mark: NDArray[np.bool_]) -> dict[str, int]:
    """Marked bytes by the field of the layout that they lie in."""
    counts = {f.name: int(mark[:, where].sum()) for f, where in task.observed.fields}
    return {name: count for name, count in counts.items() if count}


def _separate(
    task: _Task,
    answers: list[Hypothesis],
    dialects: dict[tuple[str, ...], tuple[Dialect, ...]],
) -> str | None:
    """What input would tell apart the first two hypotheses, where both are exact."""
    if len(answers) < 2 or not answers[1].exact:
        return None
    pair = [dialects.get(answer.names) for answer in answers[:2]]
    if pair[0] is None or pair[1] is None:
        return None
    return separate(task.observed, task.source, apply(*pair[0]), apply(*pair[1]))


def separate(dump: Dump, source: Source, a: Knobs, b: Knobs) -> str | None:
    """An input for which two writers write different bytes, in words; None if none was found."""
    layout = dump.layout
    more = Dump(
        np.zeros(max(8 * dump.page_stride, len(dump.data)), np.uint8),
        layout,
        dump.block_size,
        dump.page_stride,
    )
    slots = more.slots
    first, second = more.offsets(slots, a), more.offsets(slots, b)
    moved = np.flatnonzero((first != second).any(axis=1))
    if moved.size:
        slot = int(slots[moved[0]])
        page, row = divmod(slot, dump.block_size)
        return f"a row in slot {slot} (page {page}, row {row}), which the two put elsewhere"
    if isinstance(source, Decoded):
        return "the input rows: give them with --input and --slots"
    probes = probes_like(source, layout)
    records = [
        encode_under(probes.values(knobs), layout, knobs, bf16=probes.bf16) for knobs in (a, b)
    ]
    differ = records[0] != records[1]
    if not differ.any():
        return None
    scales = np.zeros(layout.row_bytes, np.bool_)
    for entry, where in dump.fields:
        scales[where] = entry.kind == "scale"
    best = np.argwhere(differ & scales if (differ & scales).any() else differ)[0]
    row, column = (int(index) for index in best)
    for entry, where in dump.fields:
        place = np.flatnonzero(np.arange(layout.row_bytes)[where] == column)
        if place.size:
            codes = [r[row, column] for r in records]
            return _in_words(probes, row, int(place[0]), entry, codes)
    return None


def _in_words(source: Source, row: int, byte: int, entry: Any, codes: list[Any]) -> str:
    """The group of a probe row that tells, with both codes."""
    values = source.values(Knobs())[row, slice(*entry.dims)]
    text = f"{entry.name} byte {int(codes[0]):02X} by the first, {int(codes[1]):02X} by the second"
    if entry.rule is None:
        return f"an element {values[byte // 2]:.9g}: {text}"
    size = (
        entry.format.width if entry.kind == "codes" else entry.format.width * 1.0 / entry.rule.group
    )
    element = int(byte * 8 / size)
    start = element // entry.rule.group * entry.rule.group
    group = values[start : start + entry.rule.group]
    with np.errstate(invalid="ignore"):
        amax = np.nanmax(np.abs(group)) if not np.isnan(group).all() else np.float32(0)
    special = "".join(
        f" and {what} in it" for what, there in (("a NaN", np.isnan(group)),) if there.any()
    )
    if entry.kind == "scale":
        return f"a group with amax {amax:.9g}{special}: {text}"
    pair = values[element : element + (2 if entry.format.width == 4 else 1)]
    shown = " and ".join(f"{value:.9g}" for value in pair)
    return f"{shown} in a group with amax {amax:.9g}{special}: {text}"
