"""Files: every kind that is read, and hostile ones, from the command line as a user has it."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest

from dsv4num import ArgumentError, UnsupportedError
from dsv4num.cli import main
from dsv4num.explain.files import load_array

BF16 = ml_dtypes.bfloat16
PAGE = 9 * 68


def safetensors(entries, data=b"", metadata=None):
    """A file of the format, whatever its header says."""
    header = dict(entries)
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def of(path, content):
    path.write_bytes(content)
    return str(path)


def saved(save, *args, **kwargs):
    file = io.BytesIO()
    save(file, *args, **kwargs)
    return file.getvalue()


ROWS = np.arange(6, dtype=np.float32).reshape(2, 3).astype(BF16)
CODES = np.arange(12, dtype=np.uint8).reshape(3, 4)


def test_raw_bytes(tmp_path):
    assert np.array_equal(load_array(of(tmp_path / "a.bin", b"\1\2\3")), np.uint8([1, 2, 3]))


def test_npy(tmp_path):
    path = of(tmp_path / "a.npy", saved(np.save, ROWS))
    assert load_array(path).dtype == BF16
    assert np.array_equal(load_array(path), ROWS)
    fp8 = CODES.view(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(load_array(of(tmp_path / "b.npy", saved(np.save, fp8))), CODES)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    path = of(tmp_path / "a.npz", saved(save, k=ROWS, cache=CODES))
    assert np.array_equal(load_array(f"{path}:cache"), CODES)
    assert np.array_equal(load_array(f"{path}:k"), ROWS)
    with pytest.raises(ArgumentError, match="NAME one of: cache, k"):
        load_array(path)
    with pytest.raises(ArgumentError, match="array 'layer'"):
        load_array(f"{path}:layer")


def test_safetensors(tmp_path):
    entries = {
        "cache": {"dtype": "F8_E4M3", "shape": [3, 4], "data_offsets": [0, 12]},
        "k": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [12, 24]},
        "none": {"dtype": "I64", "shape": [0], "data_offsets": [24, 24]},
    }
    content = safetensors(entries, CODES.tobytes() + ROWS.tobytes(), {"by": "me"})
    path = of(tmp_path / "a.safetensors", content)
    assert np.array_equal(load_array(f"{path}:cache"), CODES)
    assert load_array(f"{path}:k").dtype == BF16
    assert np.array_equal(load_array(f"{path}:k"), ROWS)
    assert load_array(f"{path}:none").shape == (0,)


def test_torch(tmp_path):
    torch = pytest.importorskip("torch", reason="kernels need torch")
    rows = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    path = of(tmp_path / "a.pt", saved(lambda file, value: torch.save(value, file), rows))
    assert np.array_equal(load_array(path), ROWS)
    both = {"k": rows, "cache": codes.view(torch.float8_e4m3fn), "step": 3}
    path = of(tmp_path / "b.pt", saved(lambda file, value: torch.save(value, file), both))
    assert np.array_equal(load_array(f"{path}:cache"), CODES)
    strided = of(tmp_path / "c.pt", saved(lambda file, value: torch.save(value, file), codes.t()))
    assert np.array_equal(load_array(strided), CODES.T)


def test_torch_is_not_needed_but_for_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    path = of(tmp_path / "a.pt", b"PK")
    with pytest.raises(UnsupportedError, match="needs torch"):
        load_array(path)


class Evil:
    """Unpickled, it would leave a mark."""

    def __reduce__(self):
        return (print, ("executed",))


def truncated(content, cut=7):
    return content[:-cut]


def zipped(file, name, content):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)


def hostile():
    """Name, content and what the error must say."""
    npy = saved(np.save, np.arange(100, dtype=np.uint8))
    yield "empty.bin", b"", "an empty file"
    yield "cut.npy", truncated(npy), "a whole .npy file"
    yield "head.npy", npy[:9], "a whole .npy file"
    yield "text.npy", b"not an array at all", "a whole .npy file"
    yield "pickle.npy", saved(np.save, np.array([Evil()]), allow_pickle=True), "without objects"
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1, " + b" " * 60000 + b"), }\n"
    huge = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header
    yield "huge.npy", huge, "a whole .npy file"
    shape = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999,), }"
    shape += b" " * (117 - len(shape)) + b"\n"
    yield "shape.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape)) + shape, "a whole .npy"
    code = b"{'descr': '|u1', 'fortran_order': False, 'shape': (__import__('os').getpid(),), }\n"
    yield (
        "code.npy",
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(code)) + code,
        "a whole .npy file",
    )
    text = saved(np.save, np.array(["a", "b"]))
    yield "text_array.npy", text, "dtype <U1"
    npz = saved(np.savez_compressed, a=np.arange(1000))
    yield "cut.npz", truncated(npz, 30), "a whole .npz file"
    damaged = bytearray(npz)
    damaged[60:200] = bytes(140)
    yield "damaged.npz", bytes(damaged), "a whole .npz file"
    yield "none.npz", saved(lambda f: zipfile.ZipFile(f, "w").close()), "it is empty"
    yield "pickle.npz", saved(np.savez, np.array([Evil()], object)), "without objects"
    yield (
        "member.npz",
        saved(lambda f: zipped(f, "a.npy", b"text")),
        "array 'a', which is no .npy file",
    )
    yield "short.safetensors", b"\1\0\0", "a header of"
    yield "header.safetensors", struct.pack("<Q", 1 << 62) + b"{}", f"a header of {1 << 62} bytes"
    yield "long.safetensors", struct.pack("<Q", 50) + b"{}", "a header of 50 bytes"
    yield "junk.safetensors", struct.pack("<Q", 4) + b"junk", "no JSON"
    yield "list.safetensors", struct.pack("<Q", 2) + b"[]", "no object"
    deep = b'{"a":' + b"[" * 100_000
    yield "deep.safetensors", struct.pack("<Q", len(deep)) + deep, "no JSON"
    nan = b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}'
    yield "nan.safetensors", struct.pack("<Q", len(nan)) + nan + b"x", "NaN in place of a number"
    twice = b'{"a":1,"a":2}'
    yield "twice.safetensors", struct.pack("<Q", len(twice)) + twice, "a name twice"
    not_text = b'{"\xff": 1}'
    yield "utf8.safetensors", struct.pack("<Q", len(not_text)) + not_text, "no JSON"
    sound = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    for name, change, said in (
        ("dtype", {"dtype": "F8_E9M9"}, "dtype 'F8_E9M9'"),
        ("negative", {"shape": [-4]}, "without a sound"),
        ("float", {"shape": [4.0]}, "without a sound"),
        ("bool", {"shape": [True]}, "without a sound"),
        ("rank", {"shape": [1] * 100}, "without a sound"),
        ("backward", {"data_offsets": [4, 0]}, "without a sound"),
        ("beyond", {"data_offsets": [0, 400], "shape": [400]}, "at 0..400"),
        ("size", {"shape": [3]}, "4 bytes"),
        ("product", {"shape": [1 << 40, 1 << 40]}, "4 bytes"),
        ("one", {"data_offsets": [0]}, "without a sound"),
    ):
        yield f"{name}.safetensors", safetensors({"a": {**sound, **change}}, b"1234"), said
    yield "entry.safetensors", safetensors({"a": 5}, b"1234"), "without a sound"
    yield "none.safetensors", safetensors({}, b"", {"x": "y"}), "it is empty"


HOSTILE = list(hostile())


@pytest.mark.parametrize(("name", "content", "said"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_hostile_files(tmp_path, capsys, name, content, said):
    path = of(tmp_path / name, content)
    with pytest.raises(ArgumentError) as caught:
        load_array(path)
    assert said in str(caught.value)
    assert main(["guess", path]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("dsv4num: ") and err.count("\n") == 1


def test_hostile_torch_files(tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="kernels need torch")
    for name, value in (("evil", Evil()), ("number", 3), ("sparse", torch.eye(3).to_sparse())):
        path = of(tmp_path / f"{name}.pt", saved(lambda f, v: torch.save(v, f), value))
        with pytest.raises(ArgumentError):
            load_array(path)
    whole = saved(lambda f, v: torch.save(v, f), torch.arange(100))
    with pytest.raises(ArgumentError, match=r"a whole \.pt file"):
        load_array(of(tmp_path / "cut.pt", truncated(whole, 200)))
    assert "executed" not in capsys.readouterr().out


@pytest.mark.filterwarnings("always")
def test_one_line_and_no_warning(tmp_path, capsys, recwarn):
    """NumPy warns of the size in this header, torch of this protocol, before they raise."""
    shape = (
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4294967296), }"
    )
    shape += b" " * (117 - len(shape)) + b"\n"
    of(tmp_path / "a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape)) + shape)
    of(tmp_path / "b.pt", pickle.dumps({"a": 1}, protocol=4))
    for name in ("a.npy", "b.pt"):
        assert main(["guess", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and err.count("dsv4num: ") == 2
    assert not recwarn.list


def test_an_array_that_claims_to_be_huge(tmp_path):
    """The size in the directory of a .npz is looked at before anything is unpacked."""
    content = saved(np.savez_compressed, a=np.zeros(100, np.uint8))
    place = content.rindex(b"PK\1\2") + 24
    lie = content[:place] + struct.pack("<I", 0xFFFFFFF0) + content[place + 4 :]
    with pytest.raises(ArgumentError, match="an array of 4294967280 bytes"):
        load_array(of(tmp_path / "a.npz", lie))


@pytest.mark.parametrize("make", ["directory", "missing"])
def test_no_file(tmp_path, capsys, make):
    path = tmp_path / "page.bin"
    if make == "directory":
        path.mkdir()
    assert main(["inspect", str(path), "--layout", "v4", "--slot", "0"]) == 2
    assert str(path) in capsys.readouterr().err


# Commands.


@pytest.fixture
def pages(tmp_path):
    """Rows of the MXFP4 indexer, right bytes, and those of a writer whose ties go toward zero."""
    from dsv4num.explain import DIALECTS, Dump, Knobs, apply, encode_under
    from dsv4num.explain.probes import probe_rows
    from dsv4num.formats import get_layout

    layout = get_layout("indexer_mxfp4")
    rows = probe_rows(layout, bf16=True)
    slots = np.arange(96, dtype=np.int64)[::-1].copy()
    names = {}
    for name, knobs in (("right", Knobs()), ("mine", apply(DIALECTS["ties-to-zero"]))):
        dump = Dump.of(np.zeros(11 * PAGE, np.uint8), layout, 9)
        records = encode_under(rows, layout, knobs, bf16=True)
        dump.data[dump.offsets(slots)] = records
        names[name] = of(tmp_path / f"{name}.bin", dump.data.tobytes())
    names["k"] = of(tmp_path / "k.npy", saved(np.save, rows.astype(BF16)))
    names["bits"] = of(tmp_path / "bits.npy", saved(np.save, rows.astype(BF16).view(np.uint16)))
    names["slots"] = of(tmp_path / "slots.npy", saved(np.save, slots))
    return names


GEOMETRY = ("--layout", "indexer_mxfp4", "--block-size", "9")


def test_diff(capsys, pages):
    assert main(["diff", pages["right"], pages["right"], *GEOMETRY]) == 0
    assert capsys.readouterr().out == f"no difference in {99 * 68:,} bytes of rows\n"
    assert main(["diff", pages["right"], pages["mine"], *GEOMETRY]) == 1
    out = capsys.readouterr().out
    assert "  scale: 0 of 396" in out and "page 0        codes" in out
    assert main(["diff", pages["right"], pages["mine"], *GEOMETRY, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differing"] == found["fields"]["codes"]["differing"] > 0
    assert found["first"][0]["slot"] == found["rows"][0]
    only = str(found["rows"][0])
    assert main(["diff", pages["right"], pages["mine"], *GEOMETRY, "--rows", only, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["compared"] == 68
    for wrong in ("x", "3-", "-3", "1,,2", "0-99999999999", "99", "7-3", ""):
        assert main(["diff", pages["right"], pages["mine"], *GEOMETRY, f"--rows={wrong}"]) == 2
        assert "--rows" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["k", "bits"])
def test_explain(capsys, pages, rows):
    given = ["--input", pages[rows], "--slots", pages["slots"], *GEOMETRY]
    assert main(["explain", pages["mine"], *given]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("codes")
    assert second.endswith(
        " differing codes bytes is explained by: ties go toward zero instead of to even"
    )
    assert main(["explain", pages["right"], *given]) == 0
    assert capsys.readouterr().out.startswith("no difference")
    assert main(["explain", pages["mine"], *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "explained"
    assert found["hypotheses"][0]["dialects"] == ["ties-to-zero"]


def test_explain_without_slots_or_input(capsys, pages, tmp_path):
    """Rows in order do not fit slots in reverse; expected bytes do not tell ties, but say so."""
    assert main(["explain", pages["mine"], "--input", pages["k"], *GEOMETRY]) == 1
    assert "unexplained" in capsys.readouterr().out
    assert main(["explain", pages["right"], "--expected", pages["right"], *GEOMETRY]) == 0
    assert "no difference" in capsys.readouterr().out


def test_rows_of_which_none_is_written(capsys, pages, tmp_path):
    count = len(load_array(pages["slots"]))
    for slots, said in (
        (np.full(count, -1), "--input: got no row that is written; allowed: one or more"),
        (np.zeros(0, np.int64), "--input: got no row that is written; allowed: one or more"),
        (np.full(count, 2**64 - 1, np.uint64), f"slots: got {2**64 - 1}; allowed: below 2^63"),
    ):
        given = ["--input", pages["k"], "--slots", of(tmp_path / "s.npy", saved(np.save, slots))]
        assert main(["explain", pages["right"], *given, *GEOMETRY]) == 2
        assert said in capsys.readouterr().err


def test_explain_rotated_rows(capsys, tmp_path):
    from dsv4num.reference import build_cos_sin_cache, rope_quant_insert

    rng = np.random.RandomState(0)
    latent = rng.standard_normal((64, 512)).astype(BF16)
    table, positions = build_cos_sin_cache(256), np.arange(100, 164)
    cache = np.zeros((1, 64, 528), np.uint8)
    rope_quant_insert(
        latent,
        positions,
        table,
        cache,
        np.arange(64),
        compress_ratio=1,
        layout="v41_mxfp8",
        bf16_round_trip=True,
    )
    files = {"latent": latent, "positions": positions, "table": table, "page": cache[0].reshape(-1)}
    names = {n: of(tmp_path / f"{n}.npy", saved(np.save, a)) for n, a in files.items()}
    command = ["explain", names["page"], "--layout", "v41_mxfp8", "--input", names["latent"]]
    given = ["--positions", names["positions"], "--cos-sin", names["table"]]
    assert main([*command, *given]) == 0
    assert "the row is rounded to bf16 before it is quantized" in capsys.readouterr().out
    assert main([*command, *given, "--bf16-round-trip"]) == 0
    assert "no difference" in capsys.readouterr().out
    for wrong, said in (
        (given[:2], "--cos-sin"),
        ([*given[:2], "--cos-sin", names["latent"]], "float32 [positions, 64]"),
        (["--positions", names["latent"], *given[2:]], "integers [64]"),
        ([*given, "--ratio", "3"], "a power of two"),
    ):
        assert main([*command, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_inspect_and_guess(capsys, pages):
    assert main(["inspect", pages["right"], *GEOMETRY, "--slot", "95"]) in (0, 1)
    out = capsys.readouterr().out
    assert out.startswith("slot 95: page 10, row 5\ncodes 0..31: scale 0x")
    assert main(["inspect", pages["right"], *GEOMETRY, "--slot", "99"]) == 2
    assert "--slot: got 99; allowed: 0..98" in capsys.readouterr().err
    assert main(["guess", pages["right"], "--block-size", "9"]) == 0
    assert capsys.readouterr().out.startswith("indexer_mxfp4, block size 9: ")
    assert main(["guess", pages["right"], "--block-size", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["layout"] == "indexer_mxfp4"
    assert main(["guess", pages["k"]]) == 2
    assert "a dtype of one byte" in capsys.readouterr().err
    assert main(["guess", pages["right"], "--block-size", "0"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layout", "v5"], "layout: got 'v5'"),
        (["--layout", "v4"], "owned by 64 v4 rows"),
        ([*GEOMETRY[:2], "--block-size", "0"], "block_size: got 0"),
        ([*GEOMETRY, "--page-stride", "0"], "--page-stride: got 0"),
        ([*GEOMETRY, "--page-stride", "5"], "a page stride of 5"),
        ([*GEOMETRY, "--page-stride", str(1 << 62)], f"a page stride of {1 << 62}"),
        (["--layout", "indexer_fp8", "--block-size", "1"], "[rows, 128]"),
    ],
)
def test_bad_input(capsys, pages, tmp_path, options, said):
    rows = of(tmp_path / "rows.npy", saved(np.save, np.zeros((4, 100), np.float32)))
    assert main(["explain", pages["mine"], "--input", rows, *options]) == 2
    assert said in capsys.readouterr().err


def test_options_that_do_not_go_together(capsys, pages):
    expected = ["--expected", pages["right"], "--slots", pages["slots"]]
    assert main(["explain", pages["mine"], *expected, *GEOMETRY]) == 2
    assert "only with --input" in capsys.readouterr().err
    for option in (["--cos-sin", pages["k"]], ["--ratio", "1"], ["--bf16-round-trip"]):
        for known, said in (
            (["--expected", pages["right"]], "given with --expected; allowed: only with --input"),
            (["--input", pages["k"]], "given without --positions; allowed: only with --positions"),
        ):
            assert main(["explain", pages["mine"], *known, *option, *GEOMETRY]) == 2
            assert f"{option[0]}: got {said}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", pages["mine"], *GEOMETRY])


def test_a_page_stride_that_is_not_the_layouts(capsys, tmp_path):
    path = of(tmp_path / "page.bin", bytes(2 * 64 * 584))
    assert main(["diff", path, path, "--layout", "v4"]) == 0
    assert (
        "read as pages of 37,376 bytes; those of the layout have 37,440" in capsys.readouterr().out
    )


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_flipped_bytes(tmp_path, suffix):
    """Whatever a byte becomes, a file is read or refused; nothing else is raised."""
    content = {
        "npy": saved(np.save, CODES),
        "npz": saved(np.savez_compressed, cache=CODES),
        "safetensors": safetensors(
            {"cache": {"dtype": "U8", "shape": [3, 4], "data_offsets": [0, 12]}}, CODES.tobytes()
        ),
    }[suffix]
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(400):
        damaged = np.frombuffer(content, np.uint8).copy()
        damaged[rng.integers(0, len(damaged), 2)] = rng.integers(0, 256, 2)
        try:
            load_array(of(tmp_path / f"a.{suffix}", damaged.tobytes()))
        except ArgumentError:
            refused += 1
    assert 0 < refused < 400


def test_the_commands_need_no_torch(pages):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from dsv4num.cli import main\n"
        f"common = {list(GEOMETRY)!r}\n"
        f"right, mine, k, slots = {[pages[name] for name in ('right', 'mine', 'k', 'slots')]!r}\n"
        "assert main(['diff', right, mine, *common]) == 1\n"
        "assert main(['explain', mine, '--input', k, '--slots', slots, *common]) == 0\n"
        "assert main(['inspect', mine, *common, '--slot', '3']) in (0, 1)\n"
        "assert main(['guess', right, '--block-size', '9']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
