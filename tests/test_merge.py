"""merge: partial results over disjoint entries become the result over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cases
import sparse_mla
from cases import Case, Source, strided
from compare import assert_within, expected, snapshot, to_framework, to_numpy
from conftest import Backend
from sparse_mla import reference

DTYPES = ["bfloat16", "float16", "float32"]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def draw(
    count: int,
    dtype: str,
    leading: tuple[int, ...] = (3,),
    heads: int = 5,
    d_v: int = 32,
    seed: int = 0,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Partial results with lses of every size, some of them empty with NaN in their out."""
    rng = np.random.default_rng(seed)
    outs, lses = [], []
    for _ in range(count):
        lse = rng.choice([0.0, 5.0, 80.0, -300.0, 1e4], (*leading, heads))
        lse = (lse + rng.standard_normal(lse.shape)).astype(np.float32)
        out = rng.standard_normal((*leading, heads, d_v)).astype(cases.DTYPES[dtype])
        empty = rng.random(lse.shape) < 0.2
        lse[empty] = -np.inf
        out[empty] = np.nan
        outs.append(out)
        lses.append(lse)
    return outs, lses


def check(outs: list, lses: list, results: tuple[Any, Any], sink: np.ndarray | None = None) -> None:
    """The oracle's result within one rounding, and what float32 weights may err."""
    want_out, want_lse = reference.merge(outs, lses, attn_sink=sink)
    out, lse = (to_numpy(each) for each in results)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}[out.dtype.name]
    largest = np.max(
        [np.where(np.isnan(o.astype(float)), 0, np.abs(o.astype(float))) for o in outs], axis=0
    )
    near = np.where(np.isfinite(want_lse), np.abs(want_lse), 0)
    assert_within("lse", lse, want_lse, 1e-6 + 2.0**-23 * near)
    bound = 1e-8 + 1.01 * unit * np.abs(want_out) + 2.0**-20 * largest
    assert_within("out", out, want_out, bound, out.dtype.name)


@EVERY_DTYPE
@pytest.mark.parametrize("count", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("leading", [(3,), (2, 3), (0,), (2, 0), (200,)])
def test_merge(count: int, leading: tuple[int, ...], dtype: str) -> None:
    outs, lses = draw(count, dtype, leading)
    images = snapshot({"outs": tuple(outs), "lses": tuple(lses)})
    results = sparse_mla.merge(outs, lses)
    assert results[0].dtype == outs[0].dtype
    assert results[1].dtype == np.float32
    check(outs, lses, results)
    assert snapshot({"outs": tuple(outs), "lses": tuple(lses)}) == images


@EVERY_DTYPE
def test_one_part_is_itself(dtype: str) -> None:
    outs, lses = draw(1, dtype)
    lses[0][:] = np.where(np.isinf(lses[0]), 1.0, lses[0])
    outs[0][:] = np.where(np.isnan(outs[0].astype(float)), 2.0, outs[0].astype(float))
    out, lse = sparse_mla.merge(outs, lses)
    np.testing.assert_array_equal(out.astype(float), outs[0].astype(float))
    np.testing.assert_array_equal(lse, lses[0])


def test_base_is_e() -> None:
    """Two halves of the same weight: ln 2 more, not 1 (report 63)."""
    part = np.ones((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
    out, lse = sparse_mla.merge([part[0], 3 * part[0]], [part[1], part[1]])
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(out, 2)


def test_empty_parts() -> None:
    """Nothing from a part without entries, whatever it holds; all empty: 0 and -inf (report 63)."""
    for filling in (0, np.nan, np.inf, 1e30):
        full = np.full((2, 3, 8), 0.5, np.float32), np.full((2, 3), 2.0, np.float32)
        empty = np.full((2, 3, 8), filling, np.float32), np.full((2, 3), -np.inf, np.float32)
        out, lse = sparse_mla.merge([empty[0], full[0], empty[0]], [empty[1], full[1], empty[1]])
        np.testing.assert_array_equal(out, full[0])
        np.testing.assert_array_equal(lse, full[1])
        for sink in (None, np.array([0, np.inf, -np.inf], np.float32)):
            out, lse = sparse_mla.merge([empty[0]] * 2, [empty[1]] * 2, attn_sink=sink)
            assert (out == 0).all()
            assert (lse == -np.inf).all()


@pytest.mark.parametrize("value", [-np.inf, -1e30, -10.0, 0.0, 10.0, 1e4, 1e30, np.inf])
def test_sink_once(value: float) -> None:
    """The sink shrinks out once and leaves lse alone (reports 65, 86)."""
    outs, lses = draw(4, "float32")
    sink = np.full(5, value, np.float32)
    plain = sparse_mla.merge(outs, lses)
    results = sparse_mla.merge(outs, lses, attn_sink=sink)
    np.testing.assert_array_equal(results[1], plain[1])
    check(outs, lses, results, sink)


def test_nan_of_a_part_reaches_its_head_only() -> None:
    outs, lses = draw(3, "float32", heads=4)
    clean = sparse_mla.merge(outs, lses)
    lses[1][2, 3] = np.nan
    out, lse = sparse_mla.merge(outs, lses)
    assert np.isnan(out[2, 3]).all()
    assert np.isnan(lse[2, 3])
    out[2, 3], lse[2, 3] = clean[0][2, 3], clean[1][2, 3]
    np.testing.assert_array_equal(out, clean[0])
    np.testing.assert_array_equal(lse, clean[1])


@EVERY_DTYPE
@pytest.mark.parametrize("sink", [None, "normal", "infinite"])
@pytest.mark.parametrize("size", [2, 5])
def test_shards_are_the_whole(size: int, sink: str | None, dtype: str, backend: Backend) -> None:
    """Context parallelism: every rank attends to its positions in its own block table, without the
    sink; merge with it gives the result of one rank that holds everything."""
    main = Source(paged=True, seq_lens=True, topk=60, holes=0.0, num_blocks=20, max_blocks=6)
    case = Case(leading=(3, 2), dtype=dtype, main=main, sink=sink, query_positions=True)
    whole = cases.make(case, seed=9)
    want = expected(whole)
    interleave, block_size = 4, main.block_size
    sinks = whole.pop("attn_sink", None)
    rows = reference.decode(whole["kv_cache"]).astype(cases.DTYPES[dtype])
    capacity = main.max_blocks * block_size
    parts = []
    for rank in range(size):
        mine = np.array([p for p in range(capacity) if p // interleave % size == rank])
        slots = whole["block_table"][:, mine // block_size] * block_size + mine % block_size
        shard = {
            **whole,
            "kv_cache": rows[:, None],
            "block_table": slots.astype(np.int32),
            "shard": (rank, size, interleave),
            "out": np.empty(want.out.shape, np.float32),
        }
        tensors = backend.tensors(shard)
        parts.append(sparse_mla.attend(**tensors))
    out, lse = sparse_mla.merge(
        [part[0] for part in parts],
        [part[1] for part in parts],
        attn_sink=None if sinks is None else backend.tensors(sinks),
    )
    assert_within("lse", to_numpy(lse), want.lse, 2 * want.bound_lse)
    assert_within("out", to_numpy(out), want.out, 2 * want.bound_out)


def test_outputs_given() -> None:
    outs, lses = draw(3, "bfloat16", (2, 3))
    for dtype in DTYPES:
        out = cases.empty_output((2, 3, 5, 32), cases.DTYPES[dtype], "strided")
        lse = cases.empty_output((2, 3, 5, 1), np.dtype(np.float32), "strided")[..., 0]
        results = sparse_mla.merge(outs, lses, out=out, lse=lse)
        assert results[0] is out
        assert results[1] is lse
        check(outs, lses, results)


def test_any_stride() -> None:
    outs, lses = draw(3, "float32", (2, 3))
    wide = [np.moveaxis(np.ascontiguousarray(np.moveaxis(out, -2, 0)), 0, -2) for out in outs]
    columns = [strided(lse, "columns") for lse in lses]
    sink = strided(np.zeros(5, np.float32), "columns")
    check(outs, lses, sparse_mla.merge(tuple(wide), tuple(columns), attn_sink=sink), sink)
    one = as_strided(outs[0][:1, :1].copy(), (2, 3, 5, 32), (0, 0, 128, 4))
    check([one, *outs], [lses[0], *lses], sparse_mla.merge([one, *outs], [lses[0], *lses]))


def test_in_torch() -> None:
    torch = pytest.importorskip("torch")
    outs, lses = draw(3, "bfloat16")
    results = sparse_mla.merge(to_framework(outs, "torch"), to_framework(lses, "torch"))
    assert all(isinstance(each, torch.Tensor) for each in results)
    assert results[0].dtype == torch.bfloat16
    check(outs, lses, results)


def test_same_input_same_bits() -> None:
    outs, lses = draw(8, "float32", (100,), heads=16, d_v=512)
    first = sparse_mla.merge(outs, lses)
    for _ in range(3):
        again = sparse_mla.merge(outs, lses)
        assert again[0].tobytes() == first[0].tobytes()
        assert again[1].tobytes() == first[1].tobytes()


def changed(**changes: Any) -> dict[str, Any]:
    outs, lses = draw(2, "float32")
    return {"outs": outs, "lses": lses, **changes}


OUT, LSE = draw(1, "float32")[0][0], draw(1, "float32")[1][0]
BAD = {
    "no_parts": (changed(outs=[], lses=[]), ValueError, "outs: expected 1 to 32 tensors, got 0"),
    "too_many": (
        changed(outs=[OUT] * 33, lses=[LSE] * 33),
        ValueError,
        "outs: expected 1 to 32 tensors, got 33",
    ),
    "one_tensor": (changed(outs=OUT), TypeError, "outs: expected a list or tuple"),
    "lses_short": (changed(lses=[LSE]), ValueError, "lses: expected 2 tensors"),
    "none": (changed(outs=[OUT, None]), TypeError, "outs: expected"),
    "float64": (
        changed(outs=[OUT.astype("f8")] * 2),
        TypeError,
        "outs: expected bfloat16, float16 or float32, got float64",
    ),
    "dtypes": (
        changed(outs=[OUT, OUT.astype("f2")]),
        TypeError,
        "outs: expected one dtype for all",
    ),
    "shapes": (changed(outs=[OUT, OUT[:2]]), ValueError, "outs: expected one shape for all"),
    "ndim": (changed(outs=[OUT[0]] * 2), ValueError, "outs: expected shape"),
    "columns": (
        changed(outs=[strided(OUT, "columns")] * 2),
        ValueError,
        "outs: expected a contiguous",
    ),
    "lse_dtype": (
        changed(lses=[LSE, LSE.astype("f2")]),
        TypeError,
        "lses: expected float32, got float16",
    ),
    "lse_shape": (
        changed(lses=[LSE, LSE[:, :4]]),
        ValueError,
        "lses: expected the shape of outs less d_v",
    ),
    "sink_dtype": (
        changed(attn_sink=np.zeros(5)),
        TypeError,
        "attn_sink: expected float32, got float64",
    ),
    "sink_shape": (
        changed(attn_sink=np.zeros(4, "f4")),
        ValueError,
        "attn_sink: expected shape (5,)",
    ),
    "out_shape": (changed(out=OUT[:2].copy()), ValueError, "out: expected shape (3, 5, 32)"),
    "out_dtype": (changed(out=OUT.astype("f8")), TypeError, "out: expected"),
    "lse_out_dtype": (
        changed(lse=LSE.astype("f8")),
        TypeError,
        "lse: expected float32, got float64",
    ),
    "overlap": (changed(outs=[OUT, OUT], out=OUT), ValueError, "out: expected memory of its own"),
    "overlap_lse": (
        changed(lses=[LSE, LSE], lse=LSE),
        ValueError,
        "lse: expected memory of its own",
    ),
    "itself": (
        changed(out=as_strided(np.zeros(500, "f4"), (3, 5, 32), (64, 128, 4))),
        ValueError,
        "out: expected elements",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    arguments, error, text = BAD[name]
    held = {key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()}
    images = snapshot(held, skip=())
    with pytest.raises(error) as raised:
        sparse_mla.merge(**arguments)
    assert str(raised.value).startswith(text), str(raised.value)
    assert snapshot(held, skip=()) == images
