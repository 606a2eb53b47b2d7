"""`explain`: each dialect is planted and must be named; what is no dialect must not be."""

from __future__ import annotations

import itertools
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from typed_pages import ordinary_rows

from dsv4num import LAYOUTS, ArgumentError, get_layout, reference
from dsv4num.explain import (
    DIALECTS,
    Dump,
    Knobs,
    Latents,
    Rows,
    States,
    apply,
    dialects_of,
    encode_under,
    explain_expected,
    explain_rows,
)
from dsv4num.explain.call import explain_call
from dsv4num.explain.decoded import values_of
from dsv4num.explain.dialects import clash
from dsv4num.explain.probes import probe_rows
from dsv4num.explain.search import separate
from dsv4num.formats import WILD_LAYOUTS
from dsv4num.reference import (
    build_cos_sin_cache,
    compress_norm_rope_store,
    decode_records,
    encode_records,
    quantize_and_insert_k_cache,
    rope_quant_insert,
)
from dsv4num.verify.case import flat, rebase
from dsv4num.verify.operations import OPERATIONS

BF16 = ml_dtypes.bfloat16
TOKENS = 96
#: Rows per page: in every layout, padding to 1, 256, 512 and 576 bytes gives different strides.
BLOCK = 9
POOLING = ("v4", "v4_fnuz", "indexer_fp8", "indexer_mxfp4")
#: Seed and row of 4,096 random tails in which the one or the other product of RoPE, left unrounded,
#: changes a stored code: in latents of ratio 2 at position row | 1, in states of ratio 4 at
#: 4 * row + 3.
FUSED_LATENTS = {
    "v4": ((0, 1642), (0, 1642)),
    "v4_fnuz": ((0, 1642), (0, 1642)),
    "v41_mxfp8": ((6, 13), (2, 1027)),
    "v41_mxfp8_inline": ((6, 13), (2, 1027)),
    "v41_mxfp8_fnuz": ((6, 13), (2, 1027)),
    "v41_nvfp4": ((222, 3221), (181, 4048)),
    "v41_nvfp4_inline": ((222, 3221), (181, 4048)),
}
FUSED_STATES = {
    "v4": ((0, 217), (0, 360)),
    "v4_fnuz": ((0, 217), (0, 360)),
    "indexer_fp8": ((3, 2202), (0, 3501)),
    "indexer_mxfp4": ((100, 996), (138, 2331)),
}


@cache
def table():
    return build_cos_sin_cache(4096, theta=160000.0)


def rows_of(layout, *, bf16=True):
    rows = probe_rows(layout, bf16=bf16)
    return Rows(rows.astype(BF16) if bf16 else rows, np.arange(TOKENS))


def fused_rows(picked, width):
    """Rows whose tails show a fused product."""
    rows = np.zeros((len(picked), width), np.float32)
    for index, (seed, row) in enumerate(picked):
        tails = np.random.RandomState(seed).standard_normal((4096, 64))
        rows[index, -64:] = tails[row].astype(BF16)
    return rows


def latents_of(layout, *, round_trip=False):
    picked = FUSED_LATENTS[layout.name]
    rows = [probe_rows(layout, bf16=True), fused_rows(picked, layout.head_dim)]
    positions = np.concatenate([np.arange(TOKENS) * 41 | 1, [row | 1 for _, row in picked]])
    latent = np.concatenate(rows).astype(BF16)
    return Latents(latent, positions, table(), np.arange(len(latent)), 2, round_trip)


def states_of(layout):
    """Pooled random values; a group at the floor, one without its older half, and fused products."""
    picked = FUSED_STATES[layout.name]
    rng = np.random.RandomState(3)
    count = 24
    shape = count + len(picked), 8, 2 * layout.head_dim
    kv = rng.standard_normal(shape).astype(np.float32)
    score = rng.standard_normal(shape).astype(np.float32)
    present = np.ones(shape[:2], np.bool_)
    kv[0], present[1, :4] = 0, False
    rows = fused_rows(picked, layout.head_dim)
    kv[count:] = np.concatenate([rows, rows], axis=1)[:, None]
    score[count:], present[count:, :4] = 0, False
    at = np.concatenate([np.arange(count) * 41 | 3, [4 * row % 4096 + 3 for _, row in picked]])
    weight = np.ones(layout.head_dim, BF16)
    return States(kv, score, present, at, table(), weight, 1e-6, np.arange(len(at)), 4, True)


@cache
def sources(name):
    """Every kind of input that this layout has an operation for."""
    layout = get_layout(name)
    found = {"rows": rows_of(layout), "fp32 rows": rows_of(layout, bf16=False)}
    if layout.head_dim == 512:
        found["latents"] = latents_of(layout)
        found["rounded latents"] = latents_of(layout, round_trip=True)
    if name in POOLING:
        found["states"] = states_of(layout)
    return found


def planted(layout, source, *dialects, block_size=BLOCK):
    """A dump by a writer with these dialects, as a reader of the contract takes it; 0xA5 elsewhere."""
    layout, knobs = get_layout(layout), apply(*dialects)
    pages = TOKENS // block_size + 10
    dump = Dump.of(
        np.full(pages * layout.page_bytes(block_size), 0xA5, np.uint8), layout, block_size
    )
    records = encode_under(source.values(knobs), layout, knobs, bf16=source.bf16)
    where = dump.offsets(source.slots, knobs)
    there = where >= 0
    assert there.any()
    dump.data[where[there]] = records[there]
    return dump


CASES = [
    (name, kind)
    for name in LAYOUTS
    for kind in ("rows", "fp32 rows", "latents", "rounded latents", "states")
    if kind != "states" or name in POOLING
    if "latents" not in kind or get_layout(name).head_dim == 512
]


@cache
def visible(name, kind):
    """The dialects that this input shows, with the dumps of their writers.

    Those that rows alone show are left to rows; the others need more.
    """
    source, layout = sources(name)[kind], get_layout(name)
    right = planted(name, source).data
    found = {}
    for dialect in dialects_of(layout, source.kinds):
        if not dialect.alone(layout) or (kind != "rows" and not dialect.needs):
            continue
        dump = planted(name, source, dialect)
        if not np.array_equal(dump.data, right):
            found[dialect.name] = dump
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bf16", [True, False])
def test_the_encoder_at_rest_is_the_oracle(name, bf16):
    layout = get_layout(name)
    rows = probe_rows(layout, bf16=bf16)
    given = rows.astype(BF16) if bf16 else rows
    rng = np.random.default_rng(2)
    any_bits = rng.integers(0, 1 << 16, (64, layout.head_dim), np.uint16).view(BF16)
    given = np.concatenate([given, any_bits.astype(given.dtype)])
    written = encode_under(given.astype(np.float32), layout, Knobs(), bf16=bf16)
    assert np.array_equal(written, encode_records(given, layout))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_dialect_alone_is_named_first(name, kind):
    """Each one that this input shows, and no other fits as well."""
    source = sources(name)[kind]
    for planted_name, dump in visible(name, kind).items():
        found = explain_rows(dump, source)
        assert found.status == "explained", (planted_name, found.lines())
        equal = [h.names for h in found.hypotheses if h.exact]
        assert equal == [(planted_name,)], (planted_name, found.lines())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_dialect_of_a_layout_was_planted(name):
    kinds = frozenset().union(*(source.kinds for source in sources(name).values()))
    shown = set().union(*(visible(name, kind) for kind in sources(name)))
    layout = get_layout(name)
    wanted = {dialect.name for dialect in dialects_of(layout, kinds) if dialect.alone(layout)}
    assert wanted == shown


def test_every_dialect_applies_somewhere():
    used = set().union(
        *(
            {d.name for s in sources(name).values() for d in dialects_of(get_layout(name), s.kinds)}
            for name in LAYOUTS
        ),
        *({d.name for d in dialects_of(layout)} for layout in WILD_LAYOUTS.values()),
    )
    assert used == set(DIALECTS)


PAIRS = {
    "v4": [
        ("floor-1e-4-on-scale", "negative-zero-dropped"),
        ("floor-1e-8-on-amax", "page-unpadded"),
        ("floor-1e-4-on-scale", "pad-not-written"),
        ("no-floor-zero-is-one", "ties-away"),
        ("exponent-down", "overflow-to-nan"),
        ("exponent-ocp", "slot-plus-one"),
        ("exponent-cast-nearest", "ties-to-zero"),
        ("scale-rounded-after-use", "inline-read-as-segregated"),
        ("fnuz-read-as-ocp", "page-unpadded"),
        ("qmax-240", "nan-to-largest"),
        ("big-endian", "floor-1e-4-on-scale"),
        ("rows-per-page-twice", "ties-away"),
    ],
    "v41_mxfp8": [
        ("fnuz-read-as-ocp", "negative-zero-is-nan"),
    ],
    "v4_fnuz": [
        ("qmax-240", "negative-zero-is-nan"),
        ("fnuz-early-saturation", "ties-away"),
        ("ocp-read-as-fnuz", "negative-zero-dropped"),
    ],
    "v41_mxfp8_inline": [
        ("floor-1e-4-on-scale", "segregated-read-as-inline"),
        ("nan-poisons-group", "infinite-code-254"),
    ],
    "v41_nvfp4": [
        ("nibbles-swapped", "reciprocal"),
        ("nibbles-halves", "ties-to-zero"),
        ("scale-rounded-up", "negative-zero-dropped"),
        ("no-floor", "ties-away"),
        ("inline-read-as-segregated", "nibbles-swapped"),
    ],
    "indexer_fp8": [
        ("scale-word-unrounded", "floor-1e-6-on-amax"),
        ("scale-word-code-repeated", "inline-read-as-segregated"),
        ("scale-word-unrounded", "negative-zero-dropped"),
    ],
    "indexer_mxfp4": [
        ("floor-1e-4-on-amax", "ties-to-zero"),
        ("floor-1e-4-on-scale", "negative-zero-dropped"),
        ("exponent-ocp", "nibbles-swapped"),
    ],
}


@pytest.mark.parametrize(
    ("name", "pair"), [(name, pair) for name, pairs in PAIRS.items() for pair in pairs]
)
def test_a_pair_is_named_first(name, pair):
    source = sources(name)["rows"]
    dialects = [DIALECTS[part] for part in pair]
    assert not clash(*dialects)
    dump = planted(name, source, *dialects)
    found = explain_rows(dump, source)
    assert found.status == "explained", found.lines()
    assert set(found.hypotheses[0].names) == set(pair), found.lines()
    assert not any(h.exact for h in found.hypotheses[1:]), found.lines()


def test_a_pair_that_is_another_writers_rule_is_named_as_that():
    """Unrounded scales without a floor are the rule F3z, which one name says."""
    source = sources("indexer_fp8")["rows"]
    parts = [DIALECTS[name] for name in ("scale-word-unrounded", "no-floor")]
    found = explain_rows(planted("indexer_fp8", source, *parts), source)
    assert found.status == "explained" and found.hypotheses[0].names == ("rule-F3z",)


@pytest.mark.parametrize(
    "pair", [("rope-halves", "bf16-step-present"), ("rope-position-last", "ties-away")]
)
def test_a_pair_of_rope_and_quantization(pair):
    source = sources("v41_mxfp8")["latents"]
    found = explain_rows(planted("v41_mxfp8", source, *(DIALECTS[p] for p in pair)), source)
    assert set(found.hypotheses[0].names) == set(pair)
    assert found.status == "explained"


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_right_bytes_have_no_difference(name, kind):
    source = sources(name)[kind]
    dump = planted(name, source)
    assert explain_rows(dump, source).status == "no difference"
    other = Dump(dump.data.copy(), dump.layout, dump.block_size, dump.page_stride)
    assert explain_expected(dump, other).status == "no difference"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("count", [1, 17, 400])
def test_damage_is_unexplained(name, count):
    source = sources(name)["rows"]
    right = planted(name, source)
    rng = np.random.default_rng(count)
    data = right.data.copy()
    struck = rng.choice(np.unique(right.offsets(source.slots)), count, replace=False)
    data[struck] ^= rng.integers(1, 256, count).astype(np.uint8)
    damaged = Dump(data, right.layout, BLOCK, right.page_stride)
    for found in (explain_rows(damaged, source), explain_expected(damaged, right)):
        assert (found.status, found.differing) == ("unexplained", count), found.lines()
        assert found.lines()[-1].startswith("unexplained")


def test_random_bytes_are_unexplained():
    source = sources("v4")["rows"]
    right = planted("v4", source)
    data = np.random.default_rng(1).integers(0, 256, right.data.size).astype(np.uint8)
    found = explain_rows(Dump(data, right.layout, BLOCK, right.page_stride), source)
    assert found.status == "unexplained"


def test_a_dialect_is_named_beside_damage():
    source = sources("v4")["rows"]
    dump = planted("v4", source, DIALECTS["floor-1e-4-on-scale"])
    dump.data[dump.offsets(np.int64([50]))[0, 500]] ^= 0x11
    found = explain_rows(dump, source)
    assert found.status == "partly explained"
    assert found.hypotheses[0].names == ("floor-1e-4-on-scale",)
    best = found.hypotheses[0]
    assert (best.explained, best.contradicted) == (best.differing - 1, 0)
    assert f"{best.explained:,} of {best.differing:,} differing bytes" in found.lines()[1]


#: Dialects that expected bytes alone must show: the others need what was rounded away.
FROM_BYTES = (
    *("floor-1e-4-on-scale", "no-floor", "no-floor-zero-is-one", "negative-zero-dropped"),
    *(
        "nibbles-swapped",
        "nibbles-halves",
        "nibbles-group-halves",
        "big-endian",
        "fnuz-read-as-ocp",
        "ocp-read-as-fnuz",
    ),
    *("inline-read-as-segregated", "segregated-read-as-inline", "page-unpadded"),
    *("slot-plus-one", "slot-minus-one", "rows-per-page-twice", "rows-per-page-half"),
    *("scale-word-code-repeated", "scale-word-code-number"),
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_expected_bytes_alone(name):
    layout = get_layout(name)
    source = ordinary_rows(layout, TOKENS)
    right = planted(name, source)
    shown = 0
    for dialect in dialects_of(layout):
        if dialect.name in FROM_BYTES and dialect.alone(layout):
            dump = planted(name, source, dialect)
            found = explain_expected(dump, right)
            assert found.hypotheses, dialect.name
            assert found.hypotheses[0].names == (dialect.name,), (dialect.name, found.lines())
            shown += 1
    assert shown >= 6


# Facts.


def test_rows_that_were_not_written():
    source = sources("v4")["rows"]
    right = planted("v4", source)
    data = right.data.copy()
    data[right.offsets(np.int64([3, 30]))] = 0xA5
    dump = Dump(data, right.layout, BLOCK, right.page_stride)
    for found in (explain_rows(dump, source), explain_expected(dump, right)):
        assert found.status == "explained"
        assert "2 rows never written, the first in slot 3: all A5" in found.lines()[1]


@pytest.mark.parametrize("field", ["rope", "pad"])
def test_a_field_that_was_not_written(field):
    source = sources("v4")["rows"]
    dump = planted("v4", source)
    where = dict((f.name, columns) for f, columns in dump.fields)[field]
    dump.data[dump.offsets(source.slots)[:, where]] = 0x3C
    found = explain_rows(dump, source)
    assert found.status == "explained"
    assert f"{field} holds 3C in 9" in found.lines()[1]


def test_rows_that_moved():
    source = sources("v41_nvfp4")["rows"]
    right = planted("v41_nvfp4", source)
    data = right.data.copy()
    data[right.offsets(np.int64([20, 50]))] = right.records(np.int64([50, 20]))
    found = explain_rows(Dump(data, right.layout, BLOCK, right.page_stride), source)
    assert found.status == "explained"
    assert found.hypotheses[0].names == ("rows-moved",)
    assert "slot 20 that of slot 50, and 1 row more" in found.lines()[1]


def test_equal_values_under_another_scale():
    """The scale of one group is one higher and its codes follow: the values are the same."""
    layout = get_layout("v4")
    rows = Rows(np.ones((8, 512), BF16), np.arange(8))
    dump = planted("v4", rows)
    where = dump.offsets(np.int64([2]))[0]
    dump.data[where[576]] += 1
    dump.data[where[:64]] = 0x70
    found = explain_rows(dump, rows)
    assert found.status == "explained"
    assert found.hypotheses[0].names == ("values-equal",)
    assert "by +1" in found.lines()[1]
    record = dump.records(np.int64([2]))
    assert np.array_equal(decode_records(record, layout), np.ones((1, 512), BF16))


def test_scales_that_the_elements_do_not_follow():
    rows = Rows(np.ones((8, 512), BF16), np.arange(8))
    dump = planted("v41_mxfp8", rows)
    dump.data[dump.offsets(rows.slots)[:, 512:516]] += 3
    found = explain_rows(dump, rows)
    assert found.status == "explained"
    assert "scale codes that are +3" in found.lines()[1]


# What would tell, values, calls, errors.


def test_what_would_tell_two_dialects_apart():
    """Zeros cannot tell a floor of 1e-8 on amax from one of 1e-4 ... but a scale code can."""
    layout = get_layout("v4")
    rows = np.ones((8, 512), BF16)
    rows[:, :64] = 1.5e-5  # both read 6C: 1e-6 and 1e-8 are floors below it
    source = Rows(rows, np.arange(8))
    dump = planted("v4", source, DIALECTS["floor-1e-6-on-amax"])
    found = explain_rows(dump, source)
    exact = [h.names[0] for h in found.hypotheses if h.exact]
    assert set(exact[:2]) == {"floor-1e-6-on-amax", "floor-1e-8-on-amax"}
    assert found.lines()[2].startswith("fits equally: ")
    text = found.separating
    assert text is not None and text.startswith("a group with amax ")
    amax = np.float32(text.split()[4].rstrip(":"))
    told = np.zeros((1, 512), np.float32)
    told[0, 0] = amax
    codes = {
        name: encode_under(told, layout, apply(DIALECTS[name]), bf16=True)[0, 576]
        for name in exact[:2]
    }
    assert len(set(codes.values())) == 2
    assert {f"{code:02X}" for code in codes.values()} <= set(text.replace(",", " ").split())


def test_a_page_that_would_tell():
    """With one page nobody can see where the next one starts."""
    layout = get_layout("v4")
    knobs = [apply(DIALECTS[name]) for name in ("page-unpadded", "page-padded-to-512")]
    source = Rows(np.ones((4, 512), BF16), np.arange(4))
    text = separate(planted("v4", source), source, *knobs)
    assert text is not None and text.startswith(f"a row in slot {BLOCK} (page 1, row 0)")
    assert layout.page_bytes(BLOCK) != BLOCK * layout.row_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_dialects_can_be_told_apart(name):
    """No two dialects that rows alone can show are one and the same."""
    layout, source = get_layout(name), rows_of(get_layout(name))
    records = {
        d.name: encode_under(source.values(Knobs()), layout, apply(d), bf16=True).tobytes()
        for d in dialects_of(layout)
        if not d.knobs.keys()
        & {"arrangement", "page_multiple", "pages", "slot_shift", "pad_written"}
        if d.alone(layout)
    }
    for a, b in itertools.combinations(records, 2):
        assert records[a] != records[b], (a, b)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_of_records(name):
    rng = np.random.default_rng(7)
    records = rng.integers(0, 256, (64, get_layout(name).row_bytes)).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        wide = values_of(records, get_layout(name)).astype(BF16)
    narrow = decode_records(records, name)
    equal = (wide.view(np.uint16) == narrow.view(np.uint16)) | np.isnan(narrow.astype(np.float32))
    assert equal.all()


def test_texts():
    v4, mxfp4 = get_layout("v4"), get_layout("indexer_mxfp4")
    text = DIALECTS["floor-1e-4-on-scale"].describe(mxfp4)
    assert text == "floor 1e-4 on the scale instead of 6 * 2^-126 on amax"
    for layout in (v4, mxfp4):
        for dialect in dialects_of(layout):
            said = dialect.describe(layout)
            assert said and not set("{}") & set(said)


def test_calls_are_explained():
    """The three operations that store records, from their own arguments."""
    rng = np.random.RandomState(5)
    slots = np.array([3, -1, 0, 9, 7, 1, 2, 11], np.int64)
    k = rng.standard_normal((8, 512)).astype(BF16)
    k[3] = 0
    cache = np.zeros((2, 6, 584), np.uint8)
    call = {"k": k, "k_cache": cache, "slot_mapping": slots, "block_size": 6, "layout": "v4"}
    quantize_and_insert_k_cache(**call)
    found = explain_call("quantize_and_insert_k_cache", call, cache)
    assert found is not None and found.status == "no difference"
    assert found.compared == 7 * 584

    cache = np.zeros((2, 6, 528), np.uint8)
    at = np.arange(8, dtype=np.int64)
    given = {"latent": k, "positions": at, "cos_sin_cache": table(), "kv_cache": cache}
    given |= {"slot_mapping": slots, "compress_ratio": 2, "layout": "v41_mxfp8"}
    rope_quant_insert(**given)
    found = explain_call("rope_quant_insert", given, cache)
    assert found is not None and (found.status, found.compared) == ("no difference", 3 * 528)
    found = explain_call("rope_quant_insert", given | {"bf16_round_trip": True}, cache)
    assert found is not None and found.hypotheses[0].names == ("bf16-step-absent",)

    state = rng.standard_normal((3, 4, 2 * 1024)).astype(np.float32)
    cache = np.zeros((2, 4, 584), np.uint8)
    given = {
        "state_cache": state,
        "token_to_req_indices": np.zeros(12, np.int32),
        "positions": np.arange(12),
        "slot_mapping": np.arange(12),
        "block_table": np.int32([[2, 0, 1]]),
        "cos_sin_cache": table(),
        "kv_cache": cache,
        "kv_slot_mapping": np.arange(12) // 4,
        "rms_norm_weight": np.ones(512, BF16),
        "rms_norm_eps": 1e-6,
        "compress_ratio": 4,
        "overlap": True,
        "layout": "v4",
    }
    compress_norm_rope_store(**given)
    found = explain_call("compress_norm_rope_store", given, cache)
    assert found is not None and (found.status, found.compared) == ("no difference", 3 * 584)
    swapped = apply(DIALECTS["overlap-lanes-swapped"])
    source = States.gathered(
        *(
            v
            for k, v in given.items()
            if k not in ("kv_cache", "compress_ratio", "overlap", "layout")
        ),
        compress_ratio=4,
        overlap=True,
    )
    cache[0, :3] = 0
    dump = Dump.of(cache, get_layout("v4"), 4)
    records = encode_under(source.values(swapped), get_layout("v4"), swapped, bf16=False)
    dump.data[dump.offsets(source.slots)] = records
    found = explain_call("compress_norm_rope_store", given, dump.data.reshape(cache.shape))
    assert found is not None and found.hypotheses[0].names == ("overlap-lanes-swapped",)
    assert explain_call("dequantize_and_gather_k_cache", {}, cache) is None


def test_very_many_rows(monkeypatch):
    """Of very many rows those of the pages that differ most are counted, and the answer says so."""
    monkeypatch.setattr("dsv4num.explain.search._MOST", 28)
    source = sources("v4")["rows"]
    dump = planted("v4", source, DIALECTS["floor-1e-4-on-scale"])
    found = explain_rows(dump, source)
    assert (found.compared, found.left_out) == (28 * 584, TOKENS - 28)
    assert found.hypotheses[0].names == ("floor-1e-4-on-scale",)
    assert "68 rows left out" in found.lines()[1]
    right = planted("v4", source)
    assert explain_rows(right, source).compared == TOKENS * 584


def test_slots_are_checked():
    source = sources("v4")["rows"]
    dump = planted("v4", source)
    with pytest.raises(ArgumentError, match="slots: got 9999"):
        explain_rows(dump, Rows(source.rows[:1], np.int64([9999])))
    with pytest.raises(ArgumentError, match="each slot once"):
        explain_rows(dump, Rows(source.rows[:2], np.int64([4, 4])))
    with pytest.raises(ArgumentError, match="page stride"):
        Dump.of(dump.data, dump.layout, BLOCK, 100)
    with pytest.raises(ArgumentError, match="owned by 9 v4 rows"):
        Dump.of(dump.data[:5000], dump.layout, BLOCK)
    with pytest.raises(ArgumentError, match="a dtype of one byte"):
        Dump.of(np.zeros(9000, np.float32), dump.layout, BLOCK)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in ("quantize_and_insert_k_cache", "rope_quant_insert", "compress_norm_rope_store")
        for layout in OPERATIONS[name].variants
    ],
)
def test_what_the_oracle_writes_has_no_difference(name, layout):
    """Every quick case of `verify`: skipped tokens, strides, poisoned buffers, odd pages."""
    for case in OPERATIONS[name].cases(layout, "quick", 0):
        if case.large:
            continue
        given = {**case.arguments, **case.keywords, **case.reference}
        (output,) = case.outputs
        buffer = np.full_like(flat(given[output]), 0xA5)
        given[output] = rebase(given[output], buffer)
        getattr(reference, name)(**{k: v for k, v in given.items() if k != "launch"})
        found = explain_call(name, given, given[output])
        assert found is not None and found.status == "no difference", (case.name, found.lines())
