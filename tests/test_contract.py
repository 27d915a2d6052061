"""The contract of `attend`, line by line: test_2_NN_* belongs to line NN.

Where a number stands in parentheses behind "report", it is that of a public report of another
decoder that went wrong on such an input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cases
import memory
import sparse_mla
from cases import Case, Source
from compare import (
    INDEXING,
    assert_within,
    distance,
    excess,
    expected,
    snapshot,
    to_framework,
    to_numpy,
)
from conftest import Backend
from sparse_mla import reference

BF16 = cases.DTYPES["bfloat16"]
F32 = np.dtype(np.float32)
EVERY_DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
PACKED = ["fp8_ds_mla", "fp8_ds_mla_norope", "fp8_tensor"]
EVERY_FORMAT = pytest.mark.parametrize("cache_format", ["dense", *PACKED])
RNG = np.random.default_rng


def source(cache_format: str = "dense", **fields: Any) -> Source:
    return Source(cache_format=cache_format, **fields)


def width(cache_format: str) -> int:
    return 512 if cache_format == "fp8_ds_mla_norope" else 576


def simple(
    rows: int = 1, slots: int = 8, d: int = 16, dtype: str = "float32", seed: int = 0
) -> dict[str, Any]:
    """A call with one head whose slots hold random numbers; indices are for the test to give."""
    rng = RNG(seed)
    return {
        "q": rng.standard_normal((rows, 1, d)).astype(cases.DTYPES[dtype]),
        "kv_cache": rng.standard_normal((slots, 1, d)).astype(cases.DTYPES[dtype]),
        "softmax_scale": 0.25,
        "head_dim_v": d,
    }


# --------------------------------------------------------------------------- 1: what is valid


def one_entry(**arrays: Any) -> dict[str, Any]:
    """Two blocks of two slots of which only slot 1 holds numbers, and a block table of one row."""
    arguments = simple(rows=1, slots=4)
    cache = arguments["kv_cache"].reshape(2, 2, 16)
    cache.reshape(4, 16)[[0, 2, 3]] = np.nan
    arguments["kv_cache"] = cache
    arguments["validate"] = "mask"
    arguments.update(arrays)
    return {name: np.array(v) if isinstance(v, list) else v for name, v in arguments.items()}


VALID_ONCE = {
    "the_entry_alone": one_entry(indices=[[1]]),
    "padding": one_entry(indices=[[-1, 1, -1, -1]]),
    "index_negative": one_entry(indices=[[-2, 1, -(2**31), -(2**63)]]),
    "slot_at_capacity": one_entry(indices=[[4, 1, 5, 2**31 - 1, 2**62, 2**63 - 1]]),
    "slot_of_2_32": one_entry(indices=[[2**32, 1, 2**32 + 1, 2**40 + 1, -(2**32) + 1]]),
    "past_topk_lens": one_entry(indices=[[1, 0, 1, 2]], topk_lens=[1]),
    "past_seq_lens": one_entry(indices=[[1, 2, 3]], block_table=[[0, 1]], seq_lens=[2]),
    "after_query": one_entry(indices=[[1, 2, 3]], block_table=[[0, 1]], query_positions=[1]),
    "no_such_logical_block": one_entry(indices=[[1, 2, 3]], block_table=[[0]]),
    "unallocated": one_entry(indices=[[0, -1, 3]], block_table=[[-1, 0]]),
    "unallocated_first": one_entry(indices=[[0, 1, 3]], block_table=[[-1, 0]]),
    "block_at_num_blocks": one_entry(indices=[[1, 2, 5]], block_table=[[0, 2, 2**31 - 1]]),
    "block_of_2_32": one_entry(indices=[[1, 2, 4]], block_table=[[0, 2**32, 2**32 + 1]]),
    "block_negative": one_entry(indices=[[1, 2, 4]], block_table=[[0, -2, -(2**62)]]),
    "other_shard": one_entry(indices=[[0, 2, 5, 3, 4, 7]], block_table=[[0, 1]], shard=(1, 4, 1)),
    "seq_lens_of_2_32": one_entry(indices=[[1]], block_table=[[0, -1]], seq_lens=[2**32 + 2]),
    "topk_lens_of_2_32": one_entry(indices=[[-1, 1]], topk_lens=[2**32 + 1]),
    "query_position_of_2_32": one_entry(
        indices=[[1, -1]], block_table=[[0, 1]], query_positions=[2**32]
    ),
}


@pytest.mark.parametrize("name", VALID_ONCE)
def test_2_01_valid_means(name: str, backend: Backend) -> None:
    """One entry is valid, so its row is the result; all other entries fail one of the tests."""
    arguments = VALID_ONCE[name]
    row = arguments["kv_cache"][0, 1].astype(np.float64)
    score = 0.25 * (arguments["q"][0, 0].astype(np.float64) @ row)
    out, lse = backend.attend(**arguments)
    np.testing.assert_allclose(out[0, 0], row, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], score, rtol=1e-5, atol=1e-6)


def test_2_01_integers_are_checked_in_their_own_width(backend: Backend) -> None:
    """4294967301 is not slot 5, nor position, block, request or length 5."""
    five = 2**32 + 5
    arguments = simple(slots=8)
    arguments.update(validate="mask", indices=np.array([[five]]))
    table = np.tile(np.arange(8), (6, 1))
    paged = dict(arguments, block_table=table, indices=np.array([[5]]))
    for wrong in (
        arguments,
        dict(paged, indices=np.array([[five]])),
        dict(paged, block_table=np.full((6, 8), five)),
        dict(paged, request_ids=np.array([five])),
        dict(paged, request_ids=np.array([-(2**32) + 1])),
        dict(paged, query_positions=np.array([-(2**32) + 5])),
        dict(paged, seq_lens=np.full(6, -(2**32) + 6)),
        dict(paged, topk_lens=np.array([-(2**32) + 1])),
    ):
        out, lse = backend.attend(**wrong)
        assert (out == 0).all()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_2_01_entries_resolve_as_the_oracle_says(case: Case) -> None:
    """Slot or cause of every entry, for every case of the table."""
    for seed in (1, 2):
        arguments = cases.make(case, seed)
        keywords = {name: arguments[name] for name in INDEXING if name in arguments}
        main = (arguments["kv_cache"], arguments["indices"])
        if main[1] is None and "query_positions" not in keywords and "request_ids" not in keywords:
            keywords["request_ids"] = np.arange(case.leading[0], dtype=np.int32)
        want = reference.resolve(*main, **keywords)
        found = sparse_mla._core.resolve(*main, **keywords)
        assert len(found) == len(want)
        for mine, theirs in zip(want, found, strict=True):
            np.testing.assert_array_equal(theirs, mine)


def test_2_01_resolve_keeps_the_leading_shape() -> None:
    """Without indices as well: the shape of the rows, then as many entries as a row may have."""
    cache, table = np.zeros((4, 4, 16), F32), np.zeros((6, 2), np.int32)
    for shape in ((6,), (6, 1), (2, 3)):
        lens = np.full(6, 8, np.int32)
        positions = np.full(shape, 5, np.int32)
        (slots,) = sparse_mla._core.resolve(
            cache, None, block_table=table, seq_lens=lens, query_positions=positions
        )
        assert slots.shape == (*shape, 8)


# --------------------------------------------------------------------------- 2: never dereferenced

FENCED = r"""
import sys; sys.path.insert(0, {tests!r})
import cases, memory, numpy as np, sparse_mla
from compare import expected, assert_close
for name in {names!r}:
    case = next(c for c in cases.CASES if c.name == name)
    for before in (False, True):
        for seed in range(3):
            arguments = cases.make(case, seed)
            want = expected(arguments)
            for output in ("out", "lse", "max_logits"):
                arguments.pop(output, None)
            shape = want.out.shape
            dtype = (arguments["q"][0] if case.q_rope else arguments["q"]).dtype
            arguments["out"] = np.empty(shape, dtype)
            arguments["lse"] = np.empty(shape[:-1], np.float32)
            arguments["max_logits"] = np.empty(shape[:-1], np.float32)
            arguments = memory.fence(arguments, before)
            out, lse = sparse_mla.attend(**arguments)
            assert_close(out, lse, want, arguments["max_logits"])
print("done")
"""
FENCED_CASES = [
    case.name
    for case in cases.CASES
    if "zero" not in (case.main.layout, case.small_layout) and cases.entries(case) <= 600
]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter, so that a crash is a failed test and the environment is read afresh."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_2_02_nothing_outside_an_array_is_touched(backend: Backend) -> None:
    """Every array ends, then begins, at a page that faults: an invalid entry that became an address
    would crash, and so would a vector load past the end of a row (reports 2, 66, 82)."""
    if backend.framework != "numpy":
        pytest.skip("needs arrays at addresses of the test's choice")
    code = FENCED.format(tests=os.path.dirname(__file__), names=FENCED_CASES)
    done = python(code, SPARSE_MLA_KERNEL=backend.kernel or "")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "done\n"


@EVERY_FORMAT
@pytest.mark.parametrize("unused", ["nan", "random"])
def test_2_02_unused_slots_hold_anything(cache_format: str, unused: str, backend: Backend) -> None:
    """Slot 0 and the slots around the used ones hold NaN or random bytes, half of the entries are
    not valid, a first chunk of a row is empty (reports 18, 49, 68)."""
    main = source(cache_format, padding=0.5, unused=unused, num_blocks=40, topk=300)
    case = Case(d_qk=width(cache_format), main=main, heads=3)
    arguments = cases.make(case, seed=4)
    arguments["indices"][0, :200] = -1
    backend.check(arguments)


def test_2_02_used_slots_change_and_nothing_else_does(backend: Backend) -> None:
    """The bits of a result do not depend on what an invalid entry points at."""
    case = Case(main=Source(padding=0.5, faults=("index", "slot")), leading=(5,))
    arguments = cases.make(case, seed=3)
    first = backend.attend(**arguments)
    slots = reference.resolve(arguments["kv_cache"], arguments["indices"])[0]
    unused = np.setdiff1d(np.arange(8 * 16), slots)
    assert unused.size
    for filling in (0, np.inf, 3e38):
        arguments["kv_cache"].reshape(-1, 576)[unused] = filling
        again = backend.attend(**arguments)
        assert first[0].tobytes() == again[0].tobytes()
        assert first[1].tobytes() == again[1].tobytes()


# --------------------------------------------------------------------------- 3: empty rows


EMPTY = {
    "padding": Case(main=Source(padding=1.0)),
    "topk_0": Case(main=Source(topk=0)),
    "no_blocks": Case(main=Source(num_blocks=0)),
    "extra_too": Case(main=Source(padding=1.0), extra=Source(topk=0)),
    "no_positions": Case(main=replace(cases.ALL, max_blocks=0)),
}


@EVERY_DTYPE
@pytest.mark.parametrize("sink", [None, "normal", "large", "infinite"])
@pytest.mark.parametrize("name", EMPTY)
def test_2_03_a_row_without_entries(
    name: str, sink: str | None, dtype: str, backend: Backend
) -> None:
    """out = 0 and lse = -inf, with a sink too (reports 7, 16, 17, 20, 80)."""
    case = replace(EMPTY[name], sink=sink, dtype=dtype, out="own", lse="given", max_logits="given")
    tensors = backend.tensors(cases.make(case))
    out, lse = sparse_mla.attend(**tensors)
    assert (to_numpy(out).astype(np.float32) == 0).all()
    assert (to_numpy(lse) == -np.inf).all()
    assert (to_numpy(tensors["max_logits"]) == -np.inf).all()


@pytest.mark.parametrize(
    "emptied",
    [
        {"topk_lens": np.array([3, 0, 3], np.int32)},
        {"request_ids": np.array([0, -1, 2], np.int32)},
        {"seq_lens": np.array([24, 0, 24], np.int32)},
        {"query_positions": np.array([24, -1, 24], np.int32)},
    ],
    ids=lambda emptied: next(iter(emptied)),
)
def test_2_03_an_empty_row_among_others(emptied: dict[str, Any], backend: Backend) -> None:
    """Padding rows of a graph: zero in their rows whatever was there (reports 16, 50, 52)."""
    main = Source(paged=True, topk=6, block_size=4, max_blocks=6, num_blocks=20, holes=0, padding=0)
    case = Case(leading=(3,), main=main, out="own", lse="given", sink="normal")
    arguments = {**cases.make(case), **emptied}
    want = expected(arguments)
    assert want.entries[1] == 0
    assert want.entries[0] > 0
    backend.check(arguments)


@pytest.mark.parametrize("leading", [(0,), (0, 3), (3, 0)])
def test_2_03_no_rows(leading: tuple[int, ...], backend: Backend) -> None:
    """Zero query rows return at once, in every mode (reports 27, 72)."""
    for validate in ("deferred", "raise", "record", "mask"):
        case = Case(leading=leading, main=cases.PAGED, extra=cases.SMALL, validate=validate)
        out, lse = backend.attend(**cases.make(case))
        assert out.shape == (*leading, 4, 512)
        assert lse.shape == (*leading, 4)


# --------------------------------------------------------------------------- 4: duplicates, order


@EVERY_DTYPE
def test_2_04_duplicates_count_each_time(dtype: str, backend: Backend) -> None:
    """Two entries for slot 0 and one for slot 1 weigh 2 exp(s_0) against exp(s_1)."""
    arguments = simple(dtype=dtype)
    arguments["indices"] = np.array([[0, 1, 0]], np.int32)
    k = arguments["kv_cache"][:2, 0].astype(np.float64)
    s = 0.25 * k @ arguments["q"][0, 0].astype(np.float64)
    weights = np.array([2, 1]) * np.exp(s)
    out, lse = backend.attend(**arguments)
    unit = reference.UNIT[dtype]
    np.testing.assert_allclose(lse[0, 0], np.log(weights.sum()), atol=1e-3)
    np.testing.assert_allclose(
        out[0, 0].astype(np.float64), weights @ k / weights.sum(), atol=8 * unit
    )
    arguments["indices"] = np.zeros((1, 1000), np.int32)
    out, lse = backend.attend(**arguments)
    np.testing.assert_allclose(lse[0, 0], s[0] + np.log(1000), atol=1e-3)
    np.testing.assert_allclose(out[0, 0].astype(np.float64), k[0], atol=4 * unit)


@EVERY_FORMAT
def test_2_04_order_does_not_matter(cache_format: str, backend: Backend) -> None:
    """Entries in another order, -1 in other places: the same within the bound (report 81)."""
    main = source(cache_format, topk=300, num_blocks=20, padding=0.3)
    arguments = cases.make(Case(d_qk=width(cache_format), main=main, spread=4.0), seed=2)
    want = expected(arguments)
    rng = RNG(0)
    for arrange in (lambda row: row[::-1], np.sort, rng.permutation, lambda row: -np.sort(-row)):
        arguments["indices"] = np.stack([arrange(row) for row in arguments["indices"]])
        out, lse = backend.attend(**arguments)
        assert_within("lse", lse, want.lse, want.bound_lse)
        assert_within("out", out, want.out, want.bound_out, "bfloat16")


# --------------------------------------------------------------------------- 5: the sink


@pytest.mark.parametrize("topk", [3, 2048])
@pytest.mark.parametrize("heads", [1, 16])
def test_2_05_sink_once(topk: int, heads: int, backend: Backend) -> None:
    """out is multiplied by 1 / (1 + exp(sink - lse)) once, however many parts a row is cut into;
    lse stays as it is (reports 65, 86)."""
    case = Case(leading=(1,), heads=heads, out="float32", main=Source(topk=topk, num_blocks=20))
    arguments = cases.make(case)
    plain = [array.copy() for array in backend.attend(**arguments)]
    sink = RNG(1).normal(np.log(topk), 2, heads).astype(np.float32)
    out, lse = backend.attend(**arguments, attn_sink=sink)
    np.testing.assert_array_equal(lse, plain[1])
    factor = 1 / (1 + np.exp(sink - plain[1].astype(np.float64)))
    np.testing.assert_allclose(out, plain[0] * factor[..., None], rtol=2e-3, atol=1e-6)
    backend.check({**arguments, "attn_sink": sink})


@pytest.mark.parametrize(
    ("sink", "factor"),
    [(-np.inf, 1), (-1e30, 1), (-1e4, 1), (1e4, 0), (1e30, 0), (3e38, 0), (np.inf, 0)],
)
def test_2_05_large_and_infinite_sinks(sink: float, factor: int, backend: Backend) -> None:
    for spread in (1.0, 100.0):
        arguments = cases.make(Case(spread=spread))
        plain = backend.attend(**arguments)
        out, lse = backend.attend(**arguments, attn_sink=np.full(4, sink, np.float32))
        np.testing.assert_array_equal(lse, plain[1])
        np.testing.assert_array_equal(out.astype(np.float32), plain[0].astype(np.float32) * factor)


def test_2_05_sink_of_a_split_call(backend: Backend) -> None:
    """Two halves without the sink, joined by merge with it, are the whole with it."""
    case = Case(main=Source(topk=100, num_blocks=20), sink="normal")
    arguments = cases.make(case)
    want = expected(arguments)
    sink = arguments.pop("attn_sink")
    halves = [
        sparse_mla.attend(**backend.tensors({**arguments, "indices": half}))
        for half in np.split(arguments["indices"], 2, axis=1)
    ]
    out, lse = sparse_mla.merge(
        [half[0] for half in halves],
        [half[1] for half in halves],
        attn_sink=backend.tensors(sink),
    )
    assert_within("lse", to_numpy(lse), want.lse, want.bound_lse)
    assert_within("out", to_numpy(out), want.out, 2 * want.bound_out, "bfloat16")


# --------------------------------------------------------------------------- 6: scores of any size


def scored(scores: np.ndarray, dtype: str, heads: int = 3) -> dict[str, Any]:
    """A call whose scores are exactly those given, and whose last value is 1 in every row."""
    rng = RNG(2)
    cache = rng.standard_normal((len(scores), 1, 32)).astype(np.float32)
    cache[:, 0, 0] = scores
    cache[:, 0, 31] = 1
    q = np.zeros((1, heads, 32), np.float32)
    q[..., 0] = 1
    cache = cache.astype(cases.DTYPES[dtype])
    assert (cache[:, 0, 0].astype(np.float64) == scores).all()
    return {
        "q": q.astype(cases.DTYPES[dtype]),
        "kv_cache": cache,
        "indices": np.arange(len(scores), dtype=np.int32)[None],
        "softmax_scale": 1.0,
        "head_dim_v": 32,
        "out": np.empty((1, heads, 32), np.float32),
    }


HUGE = {
    "1e5": [99840.0, 100352.0, 99328.0, 100352.0] * 20,
    "-1e5": [-99840.0, -100352.0, -99328.0, -99328.0] * 20,
    "both": [98304.0, -98304.0, 0.0, 98304.0] * 20,
    "1e30": [2.0**100, 2.0**100, -(2.0**100)] * 20,
    "-1e30": [-(2.0**100)] * 50,
    "near_the_end": [-(2.0**126), -(2.0**127), -(2.0**126)] * 20,
    "a_ramp": [float(256 * i) for i in range(128)],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", HUGE)
def test_2_06_scores_of_any_size(name: str, dtype: str, backend: Backend) -> None:
    """Only the entries of the largest score count, exactly as many as there are; weights add up to
    one at scores of 1e5 as well; -1e30 is a score, not a mask."""
    scores = np.array(HUGE[name]).astype(cases.DTYPES["bfloat16"]).astype(np.float64)
    arguments = scored(scores, dtype)
    best = scores == scores.max()
    values = arguments["kv_cache"][:, 0].astype(np.float64)
    out, lse = backend.attend(**arguments)
    unit = reference.UNIT[dtype]
    np.testing.assert_allclose(out[0, :, 31], 1, rtol=unit)
    want = np.broadcast_to(values[best].mean(axis=0), (3, 32))[:, 1:]
    np.testing.assert_allclose(out[0, :, 1:], want, atol=8 * unit)
    top = scores.max() + np.log(best.sum())
    np.testing.assert_allclose(lse, top, rtol=1.3e-4)


@pytest.mark.parametrize("topk", [40, 700])
def test_2_06_very_negative_scores_after_padding(topk: int, backend: Backend) -> None:
    """A first chunk of -1, then scores far below any sentinel (report 18)."""
    arguments = scored(np.full(topk, -(2.0**110)), "float32")
    padded = np.full((1, 3 * topk), -1, np.int32)
    padded[0, 2 * topk :] = arguments["indices"]
    arguments["indices"] = padded
    arguments["max_logits"] = np.empty((1, 3), np.float32)
    tensors = backend.tensors(arguments)
    out, lse = (to_numpy(tensor) for tensor in sparse_mla.attend(**tensors))
    want = arguments["kv_cache"][:, 0].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(out[0, 0, 1:], want[1:], atol=1e-5)
    assert (lse == np.float32(-(2.0**110))).all()
    assert (to_numpy(tensors["max_logits"]) == np.float32(-(2.0**110))).all()


def test_2_06_tanh_of_logit_cap(backend: Backend) -> None:
    """c tanh(s / c) to 2^-22 of itself: scores are exact, one entry a row, max_logits tells."""
    magnitudes = np.concatenate([np.geomspace(1e-30, 30, 4000), np.linspace(0.1, 10, 4000)])
    scores = np.concatenate([magnitudes, -magnitudes, [0, 100, -1e30]]).astype(np.float32)
    rows = len(scores)
    for cap in (1.0, 0.5, 64.0):
        q = np.zeros((rows, 1, 16), np.float32)
        q[:, 0, 0] = scores
        cache = np.ones((1, 1, 16), np.float32)
        arguments = {
            "q": q,
            "kv_cache": cache,
            "indices": np.zeros((rows, 1), np.int32),
            "softmax_scale": cap,
            "logit_cap": cap,
            "head_dim_v": 1,
            "max_logits": np.empty((rows, 1), np.float32),
        }
        tensors = backend.tensors(arguments)
        _, lse = sparse_mla.attend(**tensors)
        want = cap * np.tanh(scores.astype(np.float64))
        got = to_numpy(tensors["max_logits"])[:, 0].astype(np.float64)
        allowed = np.abs(want) * 2.0**-22
        assert (np.abs(got - want) <= allowed).all()
        np.testing.assert_allclose(to_numpy(lse)[:, 0], want, rtol=2e-4, atol=1e-6)


# --------------------------------------------------------------------------- 7: scales as stored


SCALES = [2.0**60, 2.0**-60, 1 / 3, 0.0, 0.0123 / 448, 448.0, 3e38, -1.5, 1e-30, 2.0**-126]


@EVERY_DTYPE
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_norope"])
def test_2_07_scales_as_stored(cache_format: str, dtype: str, backend: Backend) -> None:
    """An entry alone in its row is its own value, e4m3 times its scale, to the precision of the
    kernel, in every group and for any float32 (reports 1, 57). q is 0, or infinity would meet 0."""
    fmt = reference.FORMATS[cache_format]
    raw = np.zeros((len(SCALES), 1, fmt.row_bytes), np.uint8)
    raw[..., :512] = 0x38  # 1.0
    raw[..., :512:3] = 0xC0  # -2.0
    groups = np.array([np.roll(SCALES, -i)[:4] for i in range(len(SCALES))], "<f4")
    raw[:, 0, 512:528] = groups.view(np.uint8)
    large = np.abs(groups) > 1e38
    raw[:, 0, :512][np.repeat(large, 128, axis=1)] = 0x38
    rows = len(SCALES)
    arguments = {
        "q": np.zeros((rows, 2, fmt.d_qk), cases.DTYPES[dtype]),
        "kv_cache": raw,
        "cache_format": cache_format,
        "indices": np.arange(rows, dtype=np.int32)[:, None],
        "softmax_scale": 0.1,
        "out": np.empty((rows, 2, 512), np.float32),
    }
    out, lse = backend.attend(**arguments)
    want = reference.decode(raw, cache_format)[:, None, :512]
    error = np.abs(out - want)
    assert (error <= 3 * reference.UNIT[dtype] * np.abs(want)).all(), (error / want).max()
    assert (lse == 0).all()


@EVERY_DTYPE
def test_2_07_groups_far_apart(dtype: str, backend: Backend) -> None:
    """0, 2^60 and 2^-60 in one row: every group has its own precision, and the small one keeps it
    beside the large one."""
    main = source("fp8_ds_mla", scales="wild", topk=60)
    arguments = cases.make(Case(dtype=dtype, main=main, out="float32"))
    want = expected(arguments)
    out, _ = backend.attend(**arguments)
    backend.check(arguments)
    relative = want.bound_out - (1e-7 if dtype == "float32" else 1e-5)
    small = slice(384, 512)
    assert np.abs(want.out[..., small]).max() < 1e-15
    error = np.abs(out - want.out)[..., small]
    assert (error <= relative[..., small]).all(), (error / relative[..., small]).max()
    assert (out[..., 128:256] == 0).all()


def test_2_07_cache_scale(backend: Backend) -> None:
    """fp8_tensor: any one scale, as it is."""
    for scale in (2.0**60, 2.0**-60, 1 / 3, 0.0, 1e-3, -0.5):
        case = Case(main=source("fp8_tensor", topk=5), out="float32")
        arguments = {**cases.make(case), "cache_scale": scale}
        arguments["q"] = np.zeros_like(arguments["q"])
        rows = reference.decode(arguments["kv_cache"], "fp8_tensor", scale)
        arguments["indices"][:, 1:] = -1
        arguments["indices"][:, 0] = np.maximum(arguments["indices"][:, 0], 0)
        slots = arguments["indices"][:, 0]
        arguments["indices"] = np.where(np.isnan(rows[slots, :1]), -1, arguments["indices"])
        kept = arguments["indices"][:, 0] >= 0
        out, _ = backend.attend(**arguments)
        want = rows[slots][:, None, :512]
        assert (np.abs(out - want)[kept] <= 3 * 2.0**-8 * np.abs(want[kept])).all()


@EVERY_DTYPE
def test_2_07_accumulation_is_float32(dtype: str, backend: Backend) -> None:
    """A mean of 60,000 equal numbers is that number, and a sum of many small scores is exact
    (report 75: float16 accumulators stop at 2048)."""
    arguments = simple(d=512, dtype=dtype)
    arguments["kv_cache"][:] = 1
    arguments["q"][:] = 1
    arguments["softmax_scale"] = 1.0
    arguments["indices"] = np.zeros((1, 60_000), np.int32)
    arguments["out"] = np.empty((1, 1, 512), np.float32)
    out, lse = backend.attend(**arguments)
    np.testing.assert_allclose(out, 1, rtol=reference.UNIT[dtype])
    np.testing.assert_allclose(lse, 512 + np.log(60_000), rtol=1e-5)


# --------------------------------------------------------------------------- 8: NaN


@EVERY_DTYPE
@pytest.mark.parametrize("where", ["first", "value_end", "rope"])
def test_2_08_nan_in_q(where: str, dtype: str, backend: Backend) -> None:
    """NaN in one head's q: that head is NaN, every other head and row has the bits that it had."""
    arguments = cases.make(Case(dtype=dtype, heads=18, main=Source(topk=100)))
    clean = backend.attend(**arguments)
    arguments["q"][1, 5, {"first": 0, "value_end": 511, "rope": 575}[where]] = np.nan
    out, lse = backend.attend(**arguments)
    assert np.isnan(out[1, 5].astype(np.float32)).all()
    assert np.isnan(lse[1, 5])
    others = np.ones((3, 18), bool)
    others[1, 5] = False
    assert out[others].tobytes() == clean[0][others].tobytes()
    assert lse[others].tobytes() == clean[1][others].tobytes()


@EVERY_FORMAT
@pytest.mark.parametrize("filling", [np.nan, np.inf])
def test_2_08_nan_in_an_entry(cache_format: str, filling: float, backend: Backend) -> None:
    """NaN in an entry of one row: all heads of this row, in out and lse; other rows as they were.
    An infinity there: anything, but in this row only."""
    main = source(cache_format, topk=40, num_blocks=40, padding=0)
    case = Case(d_qk=width(cache_format), main=main, heads=18, leading=(4,))
    arguments = cases.make(case)
    row = RNG(0).permutation(40 * 16)[: 4 * 40].reshape(4, 40)
    cache = arguments["kv_cache"]
    arguments["indices"][:] = row
    rows = RNG(1).standard_normal((40 * 16, case.d_qk)).astype(np.float32)
    raw = reference.encode(rows, cache_format, arguments.get("cache_scale"), dtype=cache.dtype)
    cache[...] = raw.reshape(cache.shape)
    clean = backend.attend(**arguments)
    for place in (0, 511, case.d_qk - 1):
        spoilt = cache.copy()
        slot = spoilt.reshape(-1, cache.shape[-1])[row[2, 17]]
        if cache_format == "dense":
            slot[place] = filling
        elif place < 512 or cache_format == "fp8_tensor":
            if np.isinf(filling):
                continue
            slot[place] = 0x7F
        else:
            slot[528:].view(BF16)[place - 512] = filling
        out, lse = backend.attend(**{**arguments, "kv_cache": spoilt})
        if np.isnan(filling):
            assert np.isnan(out[2].astype(np.float32)).all()
            assert np.isnan(lse[2]).all()
        for other in (0, 1, 3):
            assert out[other].tobytes() == clean[0][other].tobytes()
            assert lse[other].tobytes() == clean[1][other].tobytes()


def test_2_08_nan_scale(backend: Backend) -> None:
    """A NaN scale of a group makes its row NaN like a NaN number."""
    arguments = cases.make(Case(main=source("fp8_ds_mla", topk=4, padding=0)))
    slot = arguments["indices"][0, 2]
    arguments["kv_cache"].reshape(-1, 656)[slot, 520:524] = 0xFF
    out, lse = backend.attend(**arguments)
    assert np.isnan(out[0].astype(np.float32)).all()
    assert np.isnan(lse[0]).all()


# --------------------------------------------------------------------------- 9: addresses

GIB = 2**30


@pytest.mark.parametrize("cache_format", ["dense", "fp8_ds_mla"])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_2_09_caches_past_4_gib(
    cache_format: str, index_dtype: type, backend: Backend, request: pytest.FixtureRequest
) -> None:
    """Slots around 2 GiB and 4 GiB, the last one, and the one where a cache of rows of 1152 bytes
    passes 2^32 (reports 14, 41, 42, 59)."""
    if backend.device != "cpu":
        request.getfixturevalue("room")(10)
    row = 1152 if cache_format == "dense" else 656
    slots = 9 * GIB // row
    cache = memory.lazy(slots * row, np.uint8).reshape(slots, row)
    near = [0, 2 * GIB // row, 4 * GIB // row, 8 * GIB // row, 3_728_270, slots - 2]
    used = np.unique([slot + i for slot in near for i in (0, 1)])
    numbers = RNG(0).standard_normal((len(used), 576)).astype(np.float32)
    stored = reference.encode(numbers, cache_format, dtype=BF16).view(np.uint8)
    cache[used] = stored
    arguments = cases.make(Case(leading=(len(used),), main=Source(topk=3)))
    arguments["kv_cache"] = cache.view(BF16) if cache_format == "dense" else cache
    arguments["cache_format"] = cache_format
    lines = np.stack([used, np.roll(used, 1), np.roll(used, 5)], axis=1)
    arguments["indices"] = lines.astype(index_dtype)
    if backend.device == "cpu":
        check_large(backend, arguments)
    arguments["kv_cache"] = arguments["kv_cache"].reshape(-1, 1, arguments["kv_cache"].shape[-1])
    blocks = slots // 3
    arguments["kv_cache"] = arguments["kv_cache"][: blocks * 3].reshape(blocks, 3, -1)
    arguments["indices"] = np.minimum(arguments["indices"], blocks * 3 - 1)
    assert arguments["indices"].max() // 3 > 65_535  # report 46
    check_large(backend, arguments)


def check_large(backend: Backend, arguments: dict[str, Any]) -> None:
    """`Backend.check` without copies of the arrays."""
    want = expected(arguments)
    out, lse = backend.attend(**arguments)
    assert_within("lse", lse, want.lse, want.bound_lse)
    assert_within("out", out, want.out, want.bound_out, out.dtype.name)


def test_2_09_blocks_far_apart(backend: Backend) -> None:
    """A few blocks with a stride of gigabytes, in both caches, by slots and by a block table; block
    ids past 65,535 and past 2^23 (reports 46, 47, 93)."""
    if backend.device != "cpu":
        pytest.skip("needs virtual memory that is not there")
    stride = 3 * GIB + 2 * 1152
    pool = memory.lazy(7 * GIB // 2, np.uint16).view(BF16)
    cache = as_strided(pool, (3, 4, 576), (stride, 1152, 2))
    rows = RNG(0).standard_normal((12, 576)).astype(BF16)
    cache[...] = rows.reshape(3, 4, 576)
    arguments = cases.make(Case(main=Source(topk=12)))
    arguments.update(kv_cache=cache, indices=np.tile(np.arange(12, dtype=np.int32), (3, 1)))
    check_large(backend, arguments)
    many = memory.lazy(10_000_000 * 16, np.float32).reshape(10_000_000, 1, 16)
    far = np.array([65_535, 65_536, 8_400_001, 9_999_999])
    many[far] = RNG(1).standard_normal((4, 1, 16)).astype(np.float32)
    paged = simple()
    paged.update(kv_cache=many, block_table=far[None], indices=np.array([[3, 1, 0, 2]]))
    check_large(backend, paged)


def test_2_09_outputs_past_2_31_elements(backend: Backend) -> None:
    """Rows of q and of every output billions of elements apart."""
    if backend.device != "cpu":
        pytest.skip("needs virtual memory that is not there")
    stride = 3 * 2**29 + 64
    arguments = simple(rows=3)
    pool = memory.lazy(2 * stride + 16, np.float32)
    arguments["out"] = as_strided(pool, (3, 1, 16), (4 * stride, 64, 4))
    arguments["lse"] = as_strided(pool[100:], (3, 1), (4 * stride, 4))
    arguments["max_logits"] = as_strided(pool[200:], (3, 1), (4 * stride, 4))
    q = as_strided(memory.lazy(2 * stride + 16, np.float32), (3, 1, 16), (4 * stride, 64, 4))
    q[...] = arguments["q"]
    arguments["q"] = q
    arguments["indices"] = RNG(0).integers(0, 8, (3, 5))
    assert 2 * stride > 2**31
    check_large(backend, arguments)


# --------------------------------------------------------------------------- 10: strides


LAYOUTS = [
    case
    for case in cases.CASES
    if case.main.layout != "contiguous" or case.q_layout != "contiguous"
]
LAYOUTS += [
    case for case in cases.CASES if case.small_layout != "contiguous" or case.out == "strided"
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@EVERY_DTYPE
def test_2_10_any_stride(case: Case, dtype: str, backend: Backend) -> None:
    """The layouts of the table with every dtype (reports 26, 30, 56, 61, 70, 84)."""
    if backend.framework == "torch" and case.main.layout == "reversed":
        pytest.skip("PyTorch has no negative strides")
    for seed in (1, 2):
        backend.check(cases.make(replace(case, dtype=dtype), seed))


@EVERY_FORMAT
def test_2_10_alignment_of_an_element_is_enough(cache_format: str, backend: Backend) -> None:
    """Every array begins at an odd multiple of its element's size (report 78)."""
    main = source(cache_format, paged=True, seq_lens=True, topk_lens="row", layout="offset")
    case = Case(d_qk=width(cache_format), main=main, sink="normal", out="own", lse="given")
    arguments = cases.make(case)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and name != "kv_cache":
            moved = np.zeros(value.size + 1, value.dtype)[1:].reshape(value.shape)
            moved[...] = value
            arguments[name] = moved
    backend.check(arguments)


def overlapping(name: str) -> tuple[dict[str, Any], str]:
    """A call with one forbidden overlap, and the argument that has to be named."""
    case = Case(leading=(3,), dtype="float32", d_qk=32, d_v=32, main=cases.SMALL)
    arguments = cases.make(case)
    shape = (3, 4, 32)
    if name == "out_itself":
        arguments["out"] = as_strided(np.zeros(400, F32), shape, (64 * 4, 16 * 4, 4))
    elif name == "out_rows_are_one":
        arguments["out"] = as_strided(np.zeros(400, F32), shape, (0, 128, 4))
    elif name == "out_is_q":
        arguments["out"] = arguments["q"]
    elif name == "out_over_the_end_of_q":
        pool = np.zeros(800, F32)
        pool[:384] = arguments["q"].ravel()
        arguments["q"], arguments["out"] = pool[:384].reshape(shape), pool[383:767].reshape(shape)
    elif name == "out_in_the_cache":
        arguments["kv_cache"] = np.zeros((4, 4, 32), F32)
        arguments["out"] = arguments["kv_cache"].reshape(-1)[:384].reshape(shape)
    elif name == "out_over_indices":
        pool = np.zeros(384, F32)
        arguments["out"], arguments["indices"] = (
            pool.reshape(shape),
            pool[:36].view(np.int32).reshape(3, 12),
        )
    elif name == "out_over_sink":
        pool = np.zeros(384, F32)
        arguments["out"], arguments["attn_sink"] = pool.reshape(shape), pool[5:9]
    elif name == "out_over_lse":
        pool = np.zeros(400, F32)
        arguments["out"], arguments["lse"] = pool[:384].reshape(shape), pool[380:392].reshape(3, 4)
        return arguments, "lse"
    elif name == "lse_is_max_logits":
        arguments["lse"] = arguments["max_logits"] = np.zeros((3, 4), F32)
        return arguments, "max_logits"
    elif name == "lse_rows_are_one":
        arguments["lse"] = as_strided(np.zeros(4, F32), (3, 4), (0, 4))
        return arguments, "lse"
    elif name == "max_logits_over_q":
        arguments["max_logits"] = arguments["q"].reshape(-1)[:12].reshape(3, 4)
        return arguments, "max_logits"
    elif name == "out_reversed_over_q":
        arguments["out"] = arguments["q"][::-1]
    return arguments, "out"


OVERLAPS = [
    "out_itself",
    "out_rows_are_one",
    "out_is_q",
    "out_over_the_end_of_q",
    "out_in_the_cache",
    "out_over_indices",
    "out_over_sink",
    "out_over_lse",
    "lse_is_max_logits",
    "lse_rows_are_one",
    "max_logits_over_q",
    "out_reversed_over_q",
]


@pytest.mark.parametrize("name", OVERLAPS)
def test_2_10_outputs_may_not_overlap(name: str) -> None:
    arguments, culprit = overlapping(name)
    images = snapshot(arguments, skip=())
    with pytest.raises(ValueError, match=rf"^{culprit}: .*(overlap|memory of their own)"):
        sparse_mla.attend(**arguments)
    assert snapshot(arguments, skip=()) == images


@pytest.mark.parametrize("name", ["heads", "halves", "columns", "rows", "blocks"])
def test_2_10_interleaved_views_are_no_overlap(name: str, backend: Backend) -> None:
    """Views that share a range of addresses but no element are accepted."""
    if backend.device != "cpu":
        pytest.skip("the interleaving would be lost on the way")
    case = Case(leading=(3,), dtype="float32", d_qk=32, d_v=32, main=cases.SMALL)
    arguments = cases.make(case)
    want = expected(arguments)
    if name == "heads":  # q and out alternate, head by head
        pool = np.zeros((3, 8, 32), F32)
        pool[:, ::2] = arguments["q"]
        arguments["q"], arguments["out"] = pool[:, ::2], pool[:, 1::2]
    elif name == "halves":  # the wide row of a projection: q, out, lse, max_logits side by side
        pool = np.zeros((3, 4, 66), F32)
        pool[..., :32] = arguments["q"]
        arguments.update(q=pool[..., :32], out=pool[..., 32:64])
        arguments.update(lse=pool[..., 64], max_logits=pool[..., 65])
    elif name == "columns":
        pool = np.zeros((3, 4, 2), F32)
        arguments.update(lse=pool[..., 0], max_logits=pool[..., 1])
    elif name == "rows":  # every second row, backwards
        pool = np.zeros((6, 4, 32), F32)
        pool[4::-2] = arguments["q"]
        if backend.framework == "torch":
            pool[:6:2] = arguments["q"]
            arguments["q"] = pool[:6:2]
        else:
            arguments["q"] = pool[4::-2]
        arguments["out"] = pool[1::2]
    elif name == "blocks":  # out lies in the blocks of the pool that belong to another layer
        cache = arguments["kv_cache"]
        pool = np.zeros((4, 2, 4, 32), F32)
        pool[:, 0] = cache
        arguments["kv_cache"] = pool[:, 0]
        arguments["out"] = pool[:3, 1]
    out, lse = sparse_mla.attend(**backend.tensors(arguments))
    assert_within("out", to_numpy(out), want.out, want.bound_out)
    assert_within("lse", to_numpy(lse), want.lse, want.bound_lse)


# --------------------------------------------------------------------------- 11: any shape


@pytest.mark.parametrize("cache_format", ["dense", "fp8_ds_mla"])
def test_2_11_any_number_of_heads(cache_format: str, backend: Backend) -> None:
    """Every count from 1 to 40, then around multiples of 16 up to 256 (reports 34, 35, 58)."""
    several = [*range(1, 41), *(n + i for n in (48, 64, 96, 128, 160, 192) for i in (-1, 0, 1))]
    for heads in (*several, 255, 256):
        main = source(cache_format, topk=9, num_blocks=4, block_size=4)
        backend.check(cases.make(Case(leading=(1,), heads=heads, main=main), seed=heads))


def test_2_11_any_topk(backend: Backend) -> None:
    """Every topk up to 70 and around the usual ones (reports 3, 21, 39)."""
    several = [*range(71), *(n + i for n in (128, 192, 256, 512, 1152, 2048) for i in (-1, 0, 1))]
    for topk in (*several, 2051, 4100):
        case = Case(leading=(1,), heads=2, d_qk=64, d_v=32, main=Source(topk=topk, num_blocks=40))
        backend.check(cases.make(case, seed=topk))


@pytest.mark.parametrize("cache_format", ["dense", "fp8_ds_mla"])
def test_2_11_any_block_size(cache_format: str, backend: Backend) -> None:
    for block_size in (1, 2, 3, 5, 7, 16, 31, 32, 63, 64, 65, 128, 480, 1280):
        main = source(cache_format, topk=20, paged=True, num_blocks=3, block_size=block_size)
        backend.check(cases.make(Case(heads=2, main=main), seed=block_size))


@EVERY_DTYPE
def test_2_11_any_width(dtype: str, backend: Backend) -> None:
    """Dense rows of every width up to 40 and some beyond, and every number of values of them."""
    for d_qk in (*range(1, 41), 63, 64, 65, 100, 128, 192, 320, 575, 577, 640, 1024):
        d_v = 1 + d_qk * 7 // 10 if d_qk % 3 else d_qk
        case = Case(heads=3, d_qk=d_qk, d_v=d_v, dtype=dtype, main=Source(topk=5), leading=(2,))
        backend.check(cases.make(case, seed=d_qk))
        if d_qk > 1:
            pair = replace(case, q_rope=1 + d_qk // 3)
            backend.check(cases.make(pair, seed=d_qk))


@pytest.mark.parametrize("leading", [(70_000,), (35_000, 2), (2, 35_000)])
def test_2_11_any_number_of_rows(leading: tuple[int, ...], backend: Backend) -> None:
    """70,000 rows (reports 4, 5, 15): with one entry each a row's result is its own slot."""
    rng = RNG(0)
    cache = rng.standard_normal((1000, 1, 16)).astype(np.float32)
    indices = rng.integers(-1, 1000, (*leading, 1)).astype(np.int32)
    q = rng.standard_normal((*leading, 1, 16)).astype(np.float32)
    out, lse = backend.attend(
        q=q, kv_cache=cache, indices=indices, softmax_scale=0.25, head_dim_v=16
    )
    slots = indices[..., 0]
    want = np.where((slots >= 0)[..., None], cache[slots, 0], 0)
    np.testing.assert_allclose(out[..., 0, :], want, rtol=1e-6)
    scores = 0.25 * (q[..., 0, :].astype(np.float64) * cache[slots, 0]).sum(axis=-1)
    scores = np.where(slots >= 0, scores, -np.inf)
    np.testing.assert_allclose(lse[..., 0], scores, rtol=2e-4, atol=2e-6)


def test_2_11_any_number_of_requests(backend: Backend) -> None:
    """100,000 requests, of which a few rows name some, the last included."""
    rng = RNG(0)
    requests = 100_000
    arguments = simple(rows=4)
    arguments.update(
        block_table=rng.integers(0, 8, (requests, 3)).astype(np.int32),
        seq_lens=rng.integers(0, 4, requests).astype(np.int32),
        request_ids=np.array([0, requests - 1, 65_536, 77_777], np.int32),
        indices=rng.integers(0, 3, (4, 6)).astype(np.int32),
    )
    backend.check(arguments)


# --------------------------------------------------------------------------- 12: the same bits


@pytest.mark.parametrize("case", cases.REPEAT, ids=str)
def test_2_12_same_input_same_bits(case: Case, backend: Backend) -> None:
    arguments = cases.make(case)
    first = backend.attend(**arguments)
    for _ in range(3):
        again = backend.attend(**arguments)
        assert again[0].tobytes() == first[0].tobytes()
        assert again[1].tobytes() == first[1].tobytes()


THREADS = r"""
import sys; sys.path.insert(0, {tests!r})
import hashlib, json, cases, sparse_mla
digests = []
for case in cases.REPEAT:
    for batch_invariant in (False, True):
        arguments = cases.make(case)
        arguments["batch_invariant"] = batch_invariant
        results = sparse_mla.attend(**arguments)
        digests.append([hashlib.sha256(array.tobytes()).hexdigest() for array in results])
print(json.dumps(digests))
"""


def test_2_12_bits_do_not_depend_on_threads(backend: Backend) -> None:
    if backend.framework != "numpy":
        pytest.skip("CPU kernels only")
    code = THREADS.format(tests=os.path.dirname(__file__))
    digests = []
    for threads in (1, 2, 5, 64):
        done = python(
            code, SPARSE_MLA_NUM_THREADS=str(threads), SPARSE_MLA_KERNEL=backend.kernel or ""
        )
        assert done.returncode == 0, done.stderr[-2000:]
        digests.append(json.loads(done.stdout))
    assert all(each == digests[0] for each in digests)


@EVERY_FORMAT
@pytest.mark.parametrize("topk", [50, 2048])
def test_2_12_batch_invariant(cache_format: str, topk: int, backend: Backend) -> None:
    """With batch_invariant a row alone has the bits that it has among 70, in any place, and with
    other rows' lengths being what they are."""
    main = source(cache_format, topk=topk, num_blocks=40, topk_lens="row")
    case = Case(leading=(70,), d_qk=width(cache_format), heads=5, main=main, batch_invariant=True)
    arguments = cases.make(case)
    arguments["topk_lens"][:3] = topk
    everything = backend.attend(**arguments)
    for row in (0, 1, 2, 37, 69):
        for rows in ([row], [row, 3], [5, 6, row]):
            alone = {
                name: value[rows] if name in ("q", "indices", "topk_lens") else value
                for name, value in arguments.items()
            }
            place = rows.index(row)
            out, lse = backend.attend(**alone)
            assert out[place].tobytes() == everything[0][row].tobytes()
            assert lse[place].tobytes() == everything[1][row].tobytes()


# --------------------------------------------------------------------------- 13: replays


def test_2_13_same_objects_new_contents(backend: Backend) -> None:
    """What a replay does: the same arrays with other contents, padded rows included (reports 16,
    52). Nothing of an earlier call is left in a later one."""
    main = replace(cases.PAGED, topk_lens="row")
    case = Case(leading=(6,), main=main, request_ids=True, out="own", lse="given")
    held = backend.tensors(cases.make(case))
    for seed in range(5):
        fresh = cases.make(case, seed)
        if seed % 2:
            fresh["request_ids"][3:] = -1
            fresh["topk_lens"][1] = 0
            fresh["indices"][2] = -1
        want = expected(fresh)
        for name, value in backend.tensors(fresh).items():
            if name not in ("out", "lse") and hasattr(value, "shape"):
                held[name][...] = value
        out, lse = sparse_mla.attend(**held)
        assert_within("out", to_numpy(out), want.out, want.bound_out, "bfloat16")
        assert_within("lse", to_numpy(lse), want.lse, want.bound_lse)


@pytest.mark.gpu
def test_2_13_replay_of_a_captured_graph() -> None:
    """A first call inside a capture works; replays see changed device contents."""
    import torch

    main = replace(cases.PAGED, topk_lens="row")
    case = Case(leading=(6,), main=main, request_ids=True, out="own", lse="given")
    held = to_framework(cases.make(case), "torch", "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla.attend(**held)
    for seed in range(5):
        fresh = cases.make(case, seed)
        fresh["request_ids"][3:] = -1
        want = expected(fresh)
        for name, value in to_framework(fresh, "torch", "cuda").items():
            if name not in ("out", "lse") and hasattr(value, "shape"):
                held[name].copy_(value)
        graph.replay()
        assert_within("out", to_numpy(held["out"]), want.out, want.bound_out, "bfloat16")
        assert_within("lse", to_numpy(held["lse"]), want.lse, want.bound_lse)


# --------------------------------------------------------------------------- 14: inputs, errors


FULL = Case(
    leading=(2, 3),
    main=replace(cases.PAGED, topk_lens="row"),
    extra=replace(cases.PAGED, topk_lens="row"),
    request_ids=True,
    query_positions=True,
    sink="normal",
    q_rope=64,
    out="own",
    lse="given",
    max_logits="given",
)


def test_2_14_inputs_may_be_read_only() -> None:
    """Arrays that nobody may write are accepted as inputs."""
    arguments = cases.make(FULL)
    want = expected(arguments)
    for name, value in arguments.items():
        for array in value if isinstance(value, tuple) else (value,):
            if isinstance(array, np.ndarray) and name not in ("out", "lse", "max_logits"):
                array.flags.writeable = False
    out, lse = sparse_mla.attend(**arguments)
    assert_within("out", out, want.out, want.bound_out, "bfloat16")
    assert_within("lse", lse, want.lse, want.bound_lse)


def test_2_14_inputs_are_never_written(backend: Backend) -> None:
    """Every byte of every input is what it was (report 75); `check` compares them."""
    for seed in range(4):
        backend.check(cases.make(FULL, seed))


def test_2_14_a_failed_call_changes_nothing() -> None:
    """An error that is found last, behind everything else that is right."""
    arguments = cases.make(FULL)
    arguments["max_logits"] = arguments["max_logits"].astype(np.float64)
    images = snapshot(arguments, skip=())
    with pytest.raises(TypeError, match=r"max_logits"):
        sparse_mla.attend(**arguments)
    assert snapshot(arguments, skip=()) == images


# --------------------------------------------------------------------------- 15: bad arguments


def bad(name: str, error: type[Exception], *words: str, case: Case = FULL, **changes: Any) -> Any:
    """A call that is right but for `changes`; a value that is a function is applied to the
    argument. The message begins with the argument's name and contains the words."""
    return pytest.param(case, changes, error, words, id=name)


def reshape(*shape: int) -> Any:
    return lambda array: array.reshape(shape)


def astype(dtype: Any) -> Any:
    return lambda array: array.astype(dtype)


ALONE = Case(main=cases.SMALL, out="own", lse="given", max_logits="given")
EVERY = replace(ALONE, main=cases.ALL)
EVERY_2 = replace(EVERY, leading=(2, 3), query_positions=True)
PACK = replace(ALONE, main=replace(cases.SMALL, cache_format="fp8_ds_mla"))
TENSOR = replace(ALONE, main=replace(cases.SMALL, cache_format="fp8_tensor"))
ZEROS = np.zeros
DROP = object()

BAD = [
    # q
    bad("q_none", TypeError, "q: expected a tensor", case=ALONE, q=None),
    bad("q_number", TypeError, "q:", "float", case=ALONE, q=1.0),
    bad("q_list", Exception, "q", case=ALONE, q=[1.0, 2.0]),
    bad("q_float64", TypeError, "q: expected", "float64", case=ALONE, q=astype("f8")),
    bad("q_int", TypeError, "q: expected", "int32", case=ALONE, q=astype("i4")),
    bad("q_ndim_2", ValueError, "q: expected shape", "(12, 576)", case=ALONE, q=reshape(12, 576)),
    bad("q_ndim_5", ValueError, "q: ", case=ALONE, q=reshape(3, 1, 1, 4, 576)),
    bad(
        "q_no_heads",
        ValueError,
        "q: expected 1 to 256 heads",
        "(3, 0, 576)",
        case=ALONE,
        q=lambda q: q[:, :0],
    ),
    bad(
        "q_257_heads",
        ValueError,
        "q: expected 1 to 256 heads",
        "257",
        case=ALONE,
        q=ZEROS((3, 257, 576), BF16),
    ),
    bad(
        "q_columns",
        ValueError,
        "q: expected a contiguous last dimension",
        "stride 2",
        case=ALONE,
        q=ZEROS((3, 4, 1152), BF16)[..., ::2],
    ),
    bad(
        "q_width",
        ValueError,
        "kv_cache: expected rows of d_qk = 512",
        "576",
        case=ALONE,
        q=lambda q: q[..., :512],
    ),
    bad(
        "q_pair_of_three", ValueError, "q: expected a tensor or a pair", "3", q=lambda q: (*q, q[1])
    ),
    bad("q_pair_none", TypeError, "q: expected", q=lambda q: (q[0], None)),
    bad(
        "q_pair_dtypes",
        TypeError,
        "q[1]: expected",
        "float32",
        "bfloat16",
        q=lambda q: (q[0], q[1].astype(F32)),
    ),
    bad(
        "q_pair_shapes",
        ValueError,
        "q[1]: expected",
        "(2, 3, 4, 512)",
        "(2, 3, 3, 64)",
        q=lambda q: (q[0], q[1][:, :, :3]),
    ),
    bad(
        "q_pair_width",
        ValueError,
        "kv_cache: expected rows of d_qk = 575",
        "576",
        q=lambda q: (q[0], q[1][..., :63]),
        head_dim_v=512,
    ),
    # kv_cache and its format
    bad("cache_none", TypeError, "kv_cache: expected a tensor", case=ALONE, kv_cache=None),
    bad(
        "cache_dtype",
        TypeError,
        "kv_cache: expected q's dtype bfloat16",
        "float16",
        case=ALONE,
        kv_cache=ZEROS((4, 4, 576), "f2"),
    ),
    bad(
        "cache_ndim_1",
        ValueError,
        "kv_cache: expected shape",
        "(576,)",
        case=ALONE,
        kv_cache=ZEROS(576, BF16),
    ),
    bad(
        "cache_ndim_4",
        ValueError,
        "kv_cache: expected shape",
        "(4, 4, 2, 576)",
        case=ALONE,
        kv_cache=ZEROS((4, 4, 2, 576), BF16),
    ),
    bad(
        "cache_block_size_0",
        ValueError,
        "kv_cache: expected a block_size",
        "(4, 0, 576)",
        case=ALONE,
        kv_cache=ZEROS((4, 0, 576), BF16),
    ),
    bad(
        "cache_columns",
        ValueError,
        "kv_cache: expected a contiguous",
        "stride 2",
        case=ALONE,
        kv_cache=ZEROS((4, 4, 1152), BF16)[..., ::2],
    ),
    bad(
        "cache_bytes_without_format",
        ValueError,
        "cache_format: ",
        "fp8_ds_mla",
        case=PACK,
        cache_format=DROP,
    ),
    bad(
        "cache_bytes_as_dense",
        TypeError,
        "kv_cache: expected",
        "uint8",
        case=PACK,
        cache_format="dense",
    ),
    bad(
        "format_unknown",
        ValueError,
        "cache_format: expected one of",
        "'fp8'",
        case=PACK,
        cache_format="fp8",
    ),
    bad(
        "format_number", TypeError, "cache_format: expected a str", "int", case=PACK, cache_format=8
    ),
    bad(
        "format_row",
        ValueError,
        "kv_cache: expected rows of 528 bytes",
        "(4, 4, 656)",
        case=PACK,
        cache_format="fp8_ds_mla_norope",
    ),
    bad(
        "format_of_numbers",
        TypeError,
        "kv_cache: expected bytes",
        "bfloat16",
        case=ALONE,
        cache_format="fp8_ds_mla",
    ),
    bad(
        "format_width",
        ValueError,
        "kv_cache: expected rows of d_qk = 576",
        "512",
        case=PACK,
        cache_format="fp8_ds_mla_norope",
        kv_cache=ZEROS((4, 4, 528), "u1"),
    ),
    bad(
        "scale_of_dense",
        ValueError,
        "cache_scale: expected none",
        "dense",
        case=ALONE,
        cache_scale=1.0,
    ),
    bad(
        "scale_of_inline",
        ValueError,
        "cache_scale: expected none",
        "fp8_ds_mla",
        case=PACK,
        cache_scale=1.0,
    ),
    bad(
        "scale_missing",
        ValueError,
        "cache_scale: required",
        "fp8_tensor",
        case=TENSOR,
        cache_scale=DROP,
    ),
    bad(
        "scale_nan",
        ValueError,
        "cache_scale: expected a finite",
        "nan",
        case=TENSOR,
        cache_scale=np.nan,
    ),
    bad(
        "scale_inf",
        ValueError,
        "cache_scale: expected a finite",
        "inf",
        case=TENSOR,
        cache_scale=np.inf,
    ),
    bad(
        "scale_1e39",
        ValueError,
        "cache_scale: expected a finite",
        "1e+39",
        case=TENSOR,
        cache_scale=1e39,
    ),
    bad(
        "scale_tensor",
        TypeError,
        "cache_scale: expected a number",
        "ndarray",
        case=TENSOR,
        cache_scale=np.ones(1, F32),
    ),
    # scalars
    bad("softmax_scale_missing", TypeError, "softmax_scale", case=ALONE, softmax_scale=DROP),
    bad("softmax_scale_none", TypeError, "softmax_scale: ", case=ALONE, softmax_scale=None),
    bad(
        "softmax_scale_0",
        ValueError,
        "softmax_scale: expected > 0",
        "0",
        case=ALONE,
        softmax_scale=0,
    ),
    bad(
        "softmax_scale_negative",
        ValueError,
        "softmax_scale: expected > 0",
        "-0.5",
        case=ALONE,
        softmax_scale=-0.5,
    ),
    bad(
        "softmax_scale_nan", ValueError, "softmax_scale: ", "nan", case=ALONE, softmax_scale=np.nan
    ),
    bad(
        "softmax_scale_inf", ValueError, "softmax_scale: ", "inf", case=ALONE, softmax_scale=np.inf
    ),
    bad(
        "softmax_scale_1e-60",
        ValueError,
        "softmax_scale: ",
        "1e-60",
        case=ALONE,
        softmax_scale=1e-60,
    ),
    bad(
        "softmax_scale_tensor",
        TypeError,
        "softmax_scale: expected a number",
        "ndarray",
        case=ALONE,
        softmax_scale=np.array(0.1),
    ),
    bad(
        "softmax_scale_str",
        TypeError,
        "softmax_scale: expected a number",
        "str",
        case=ALONE,
        softmax_scale="0.1",
    ),
    bad("logit_cap_negative", ValueError, "logit_cap: expected", "-1", case=ALONE, logit_cap=-1.0),
    bad("logit_cap_nan", ValueError, "logit_cap: expected", "nan", case=ALONE, logit_cap=np.nan),
    bad("logit_cap_inf", ValueError, "logit_cap: expected", "inf", case=ALONE, logit_cap=np.inf),
    bad(
        "logit_cap_tensor",
        TypeError,
        "logit_cap: expected a number",
        "ndarray",
        case=ALONE,
        logit_cap=np.ones(()),
    ),
    bad(
        "head_dim_v_missing",
        ValueError,
        "head_dim_v: required",
        "60",
        case=replace(ALONE, d_qk=60, d_v=32),
        head_dim_v=DROP,
    ),
    bad(
        "head_dim_v_0",
        ValueError,
        "head_dim_v: expected 1 to d_qk = 576",
        "0",
        case=ALONE,
        head_dim_v=0,
    ),
    bad(
        "head_dim_v_577",
        ValueError,
        "head_dim_v: expected 1 to d_qk = 576",
        "577",
        case=ALONE,
        head_dim_v=577,
    ),
    bad(
        "head_dim_v_2_32",
        ValueError,
        "head_dim_v: expected 1 to d_qk = 576",
        "4294967808",
        case=ALONE,
        head_dim_v=2**32 + 512,
    ),
    bad("head_dim_v_2_70", ValueError, "head_dim_v: expected", case=ALONE, head_dim_v=2**70),
    bad(
        "head_dim_v_float",
        TypeError,
        "head_dim_v: expected an int",
        "float",
        case=ALONE,
        head_dim_v=512.0,
    ),
    bad(
        "validate_unknown",
        ValueError,
        "validate: expected",
        "'never'",
        case=ALONE,
        validate="never",
    ),
    bad("validate_bool", TypeError, "validate: expected a str", "bool", case=ALONE, validate=True),
    bad(
        "batch_invariant_int",
        TypeError,
        "batch_invariant: expected True or False",
        "int",
        case=ALONE,
        batch_invariant=1,
    ),
    bad("stream_on_the_cpu", ValueError, "stream: ", case=ALONE, stream=0),
    bad("unknown_keyword", TypeError, "sm_scale", case=ALONE, sm_scale=0.1),
    # indices and topk_lens
    bad(
        "indices_float",
        TypeError,
        "indices: expected int32 or int64",
        "float32",
        case=ALONE,
        indices=astype("f4"),
    ),
    bad(
        "indices_int16",
        TypeError,
        "indices: expected int32 or int64",
        "int16",
        case=ALONE,
        indices=astype("i2"),
    ),
    bad(
        "indices_uint32",
        TypeError,
        "indices: expected int32 or int64",
        "uint32",
        case=ALONE,
        indices=astype("u4"),
    ),
    bad(
        "indices_rows",
        ValueError,
        "indices: expected shape (3, topk)",
        "(2, 12)",
        case=ALONE,
        indices=lambda indices: indices[:2],
    ),
    bad(
        "indices_ndim",
        ValueError,
        "indices: expected shape (3, topk)",
        "(36,)",
        case=ALONE,
        indices=reshape(36),
    ),
    bad(
        "indices_batch",
        ValueError,
        "indices: expected shape (2, 3, topk)",
        "(6, 40)",
        indices=reshape(6, 40),
    ),
    bad(
        "indices_none_alone",
        ValueError,
        "indices: ",
        "block_table",
        "seq_lens",
        case=ALONE,
        indices=None,
    ),
    bad("indices_none_no_lengths", ValueError, "indices: ", "seq_lens", case=EVERY, seq_lens=DROP),
    bad(
        "indices_none_topk_lens",
        ValueError,
        "topk_lens: ",
        "indices",
        case=EVERY,
        topk_lens=np.ones(3, np.int32),
    ),
    bad(
        "indices_none_s_q",
        ValueError,
        "query_positions: required",
        "3",
        case=EVERY_2,
        query_positions=DROP,
    ),
    bad(
        "topk_lens_float",
        TypeError,
        "topk_lens: expected int32 or int64",
        "float64",
        topk_lens=astype("f8"),
    ),
    bad(
        "topk_lens_shape",
        ValueError,
        "topk_lens: expected shape (2, 3)",
        "(5,)",
        topk_lens=lambda lens: lens.ravel()[:5],
    ),
    bad("topk_lens_scalar", ValueError, "topk_lens: expected shape", topk_lens=np.array(5)),
    # the block table and what goes with it
    bad(
        "table_ndim",
        ValueError,
        "block_table: expected shape (requests, max_blocks)",
        "(8,)",
        block_table=lambda table: table.ravel(),
    ),
    bad(
        "table_float",
        TypeError,
        "block_table: expected int32 or int64",
        "float32",
        block_table=astype("f4"),
    ),
    bad(
        "table_too_few",
        ValueError,
        "block_table: expected a row for each of 3",
        "(2, 4)",
        case=replace(ALONE, main=cases.PAGED),
        block_table=lambda table: table[:2],
        seq_lens=lambda lens: lens[:2],
    ),
    bad(
        "seq_lens_shape",
        ValueError,
        "seq_lens: expected shape (2,)",
        "(3,)",
        seq_lens=np.zeros(3, np.int32),
    ),
    bad(
        "seq_lens_dtype",
        TypeError,
        "seq_lens: expected int32 or int64",
        "float32",
        seq_lens=astype("f4"),
    ),
    bad(
        "seq_lens_without_table",
        ValueError,
        "seq_lens: needs block_table",
        case=ALONE,
        seq_lens=np.zeros(3, np.int32),
    ),
    bad(
        "requests_without_table",
        ValueError,
        "request_ids: needs block_table",
        case=ALONE,
        request_ids=np.zeros(3, np.int32),
    ),
    bad(
        "positions_without_table",
        ValueError,
        "query_positions: needs block_table",
        case=ALONE,
        query_positions=np.zeros(3, np.int32),
    ),
    bad("shard_without_table", ValueError, "shard: needs block_table", case=ALONE, shard=(0, 2, 1)),
    bad(
        "request_ids_shape",
        ValueError,
        "request_ids: expected shape (2, 3)",
        "(2,)",
        request_ids=np.zeros(2, np.int32),
    ),
    bad(
        "request_ids_dtype",
        TypeError,
        "request_ids: expected int32 or int64",
        "bool",
        request_ids=astype(bool),
    ),
    bad(
        "query_positions_shape",
        ValueError,
        "query_positions: expected shape (2, 3)",
        "(3, 2)",
        query_positions=reshape(3, 2),
    ),
    bad("shard_rank", ValueError, "shard: expected", "(2, 2, 1)", shard=(2, 2, 1)),
    bad("shard_rank_negative", ValueError, "shard: expected", "(-1, 2, 1)", shard=(-1, 2, 1)),
    bad("shard_size", ValueError, "shard: expected", "(0, 0, 1)", shard=(0, 0, 1)),
    bad("shard_interleave", ValueError, "shard: expected", "(0, 2, 0)", shard=(0, 2, 0)),
    bad(
        "shard_pair", ValueError, "shard: expected (rank, size, interleave)", "(0, 2)", shard=(0, 2)
    ),
    bad("shard_int", TypeError, "shard: expected (rank, size, interleave)", "int", shard=1),
    bad("shard_of_floats", TypeError, "shard: expected an int", "float", shard=(0.0, 2, 1)),
    bad("max_seq_len_with_indices", ValueError, "max_seq_len: ", max_seq_len=10),
    bad(
        "max_seq_len_negative",
        ValueError,
        "max_seq_len: expected",
        "-1",
        case=EVERY,
        max_seq_len=-1,
    ),
    bad(
        "max_seq_len_tensor",
        TypeError,
        "max_seq_len: expected an int",
        "ndarray",
        case=EVERY,
        max_seq_len=np.array(10),
    ),
    # sink
    bad("sink_dtype", TypeError, "attn_sink: expected float32", "float64", attn_sink=astype("f8")),
    bad(
        "sink_bfloat16",
        TypeError,
        "attn_sink: expected float32",
        "bfloat16",
        attn_sink=astype(BF16),
    ),
    bad(
        "sink_shape",
        ValueError,
        "attn_sink: expected shape (4,)",
        "(3,)",
        attn_sink=lambda sink: sink[:3],
    ),
    bad("sink_number", TypeError, "attn_sink", attn_sink=0.5),
    # the extra cache
    bad(
        "extra_indices_alone",
        ValueError,
        "extra_indices: needs extra_kv_cache",
        case=ALONE,
        extra_indices=np.zeros((3, 1), np.int32),
    ),
    bad(
        "extra_topk_lens_alone",
        ValueError,
        "extra_topk_lens: needs extra_kv_cache",
        case=ALONE,
        extra_topk_lens=np.zeros(3, np.int32),
    ),
    bad(
        "extra_table_alone",
        ValueError,
        "extra_block_table: needs extra_kv_cache",
        case=ALONE,
        extra_block_table=np.zeros((3, 1), np.int32),
    ),
    bad(
        "extra_seq_lens_alone",
        ValueError,
        "extra_seq_lens: needs extra_kv_cache",
        case=ALONE,
        extra_seq_lens=np.zeros(3, np.int32),
    ),
    bad(
        "extra_format_alone",
        ValueError,
        "extra_cache_format: needs extra_kv_cache",
        case=ALONE,
        extra_cache_format="dense",
    ),
    bad(
        "extra_scale_alone",
        ValueError,
        "extra_cache_scale: needs extra_kv_cache",
        case=ALONE,
        extra_cache_scale=1.0,
    ),
    bad(
        "extra_width",
        ValueError,
        "extra_kv_cache: expected rows of d_qk = 576",
        "512",
        extra_kv_cache=lambda cache: cache[..., :512],
    ),
    bad(
        "extra_dtype",
        TypeError,
        "extra_kv_cache: expected q's dtype bfloat16",
        "float32",
        extra_kv_cache=astype(F32),
    ),
    bad(
        "extra_indices_shape",
        ValueError,
        "extra_indices: expected shape (2, 3, topk)",
        "(3, 2, 40)",
        extra_indices=reshape(3, 2, 40),
    ),
    bad(
        "extra_indices_none",
        ValueError,
        "extra_indices: ",
        "extra_block_table",
        extra_indices=DROP,
        extra_block_table=DROP,
        extra_seq_lens=DROP,
        extra_topk_lens=DROP,
    ),
    bad(
        "extra_seq_lens_no_table",
        ValueError,
        "extra_seq_lens: needs extra_block_table",
        extra_block_table=DROP,
    ),
    bad(
        "extra_requests",
        ValueError,
        "extra_block_table: expected 2 requests",
        "(3, 1)",
        extra_block_table=np.zeros((3, 1), np.int32),
        extra_seq_lens=np.zeros(3, np.int32),
    ),
    # outputs
    bad(
        "out_shape",
        ValueError,
        "out: expected shape (2, 3, 4, 512)",
        "(6, 4, 512)",
        out=reshape(6, 4, 512),
    ),
    bad(
        "out_dtype",
        TypeError,
        "out: expected q's dtype bfloat16 or float32",
        "float16",
        out=astype("f2"),
    ),
    bad(
        "out_width",
        ValueError,
        "out: expected shape (2, 3, 4, 512)",
        "(2, 3, 4, 511)",
        out=lambda out: out[..., :511],
    ),
    bad(
        "out_columns",
        ValueError,
        "out: expected a contiguous last dimension",
        "stride 2",
        out=ZEROS((2, 3, 4, 1024), BF16)[..., ::2],
    ),
    bad(
        "out_read_only",
        ValueError,
        "out: expected a writable tensor",
        "read-only",
        out=lambda out: read_only(out),
    ),
    bad(
        "lse_shape", ValueError, "lse: expected shape (2, 3, 4)", "(2, 4, 3)", lse=reshape(2, 4, 3)
    ),
    bad("lse_dtype", TypeError, "lse: expected float32", "float64", lse=astype("f8")),
    bad("lse_read_only", ValueError, "lse: expected a writable", lse=lambda lse: read_only(lse)),
    bad(
        "max_logits_shape",
        ValueError,
        "max_logits: expected shape (2, 3, 4)",
        "(2, 3, 4, 1)",
        max_logits=reshape(2, 3, 4, 1),
    ),
    bad(
        "max_logits_dtype",
        TypeError,
        "max_logits: expected float32",
        "bfloat16",
        max_logits=astype(BF16),
    ),
    bad(
        "max_logits_read_only",
        ValueError,
        "max_logits: expected a writable",
        max_logits=lambda array: read_only(array),
    ),
]


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(("case", "changes", "error", "words"), BAD)
def test_2_15_bad_arguments(
    case: Case, changes: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    """The exception's type; the argument's name, what was expected and what came in its message;
    and nothing written."""
    arguments = cases.make(case)
    for name, change in changes.items():
        if change is DROP:
            arguments.pop(name)
        else:
            arguments[name] = change(arguments[name]) if callable(change) else change
    images = snapshot(arguments, skip=())
    with pytest.raises(error) as raised:
        sparse_mla.attend(**arguments)
    assert isinstance(raised.value, TypeError | ValueError)
    text = str(raised.value)
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"
    if words[0].endswith(":") or ": " in words[0]:
        assert text.startswith(words[0]), text
    assert snapshot(arguments, skip=()) == images


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_2_15_numbers_of_other_kinds(framework: str) -> None:
    """Scalars may be any number; a tensor is none, whatever its framework."""
    arguments = cases.make(ALONE)
    out, _ = sparse_mla.attend(**arguments)
    out = out.copy()
    scale = arguments["softmax_scale"]
    for same in (np.float64(scale), float(scale)):
        arguments["softmax_scale"] = same
        again, _ = sparse_mla.attend(**arguments)
        np.testing.assert_array_equal(out, again)
    arguments["softmax_scale"] = 1
    sparse_mla.attend(**arguments)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        tensor = torch.tensor(0.1)
    else:
        tensor = np.array(0.1)
    with pytest.raises(TypeError, match="softmax_scale: expected a number"):
        sparse_mla.attend(**{**arguments, "softmax_scale": tensor})


def test_2_15_required_arguments() -> None:
    arguments = cases.make(ALONE)
    for name in ("q", "kv_cache", "indices", "softmax_scale"):
        with pytest.raises(TypeError, match=name):
            sparse_mla.attend(**{key: value for key, value in arguments.items() if key != name})
    with pytest.raises(TypeError, match="positional"):
        sparse_mla.attend(*(arguments[name] for name in ("q", "kv_cache", "indices")), 0.1)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        sparse_mla.attend(arguments["q"], **arguments)


def test_2_15_unknown_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not exist, or that this machine cannot run, is said so."""
    arguments = cases.make(ALONE)
    monkeypatch.setenv("SPARSE_MLA_KERNEL", "cpu_abacus")
    with pytest.raises(
        ValueError, match=r"SPARSE_MLA_KERNEL: expected one of .*cpu_plain.*'cpu_abacus'"
    ):
        sparse_mla.attend(**arguments)
    for kernel in sparse_mla.build_info()["cpu_kernels"]:
        if not kernel["runs"]:
            monkeypatch.setenv("SPARSE_MLA_KERNEL", kernel["name"])
            with pytest.raises(sparse_mla.UnsupportedError, match=kernel["name"]):
                sparse_mla.attend(**arguments)


# --------------------------------------------------------------------------- 16: accuracy


@EVERY_DTYPE
@EVERY_FORMAT
@pytest.mark.parametrize("magnitude", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("spread", [0.2, 8.0], ids=["flat", "peaked"])
def test_2_16_accuracy(
    cache_format: str, dtype: str, magnitude: float, spread: float, backend: Backend
) -> None:
    """Absolute and relative errors of out and lse by the bound, then the cosine (reports 1, 13, 57,
    95: a cosine alone says little)."""
    main = source(cache_format, topk=500, num_blocks=64, magnitude=magnitude)
    case = Case(d_qk=width(cache_format), heads=7, dtype=dtype, main=main, spread=spread)
    arguments = cases.make(case, seed=6)
    backend.check(arguments)
    out, _ = backend.attend(**arguments)
    if dtype == "bfloat16":
        assert distance(out, expected(arguments).out) < 5e-6


@EVERY_DTYPE
def test_2_16_values_that_cancel(dtype: str, backend: Backend) -> None:
    """Values of both signs whose sum is small beside them, under weights that are all alike."""
    case = Case(
        dtype=dtype, heads=3, main=Source(topk=2000, num_blocks=130, padding=0), spread=1e-3
    )
    arguments = cases.make(case)
    arguments["indices"][:] = RNG(0).permutation(130 * 16)[:2000]
    rows = RNG(1).standard_normal((130 * 16, 576))
    arguments["kv_cache"][...] = rows.reshape(arguments["kv_cache"].shape)
    backend.check(arguments)


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("cache_format", "heads", "copies"),
    [("dense", 3, 20_000), ("dense", 40, 2048), ("fp8_ds_mla", 3, 20_000)],
)
def test_2_16_copies_of_one_entry(
    cache_format: str, heads: int, copies: int, dtype: str, backend: Backend
) -> None:
    """Equal numbers under equal weights: what is lost in each addition, and in each rounding of a
    weight, has the same sign."""
    main = source(cache_format, topk=copies, num_blocks=2, padding=0)
    case = Case(leading=(1,), dtype=dtype, heads=heads, out="float32", main=main)
    arguments = cases.make(case)
    arguments["indices"][:] = 3
    arguments["indices"][:, : copies // 3] = 11
    backend.check(arguments)


def test_2_16_the_comparison_sees_what_it_should() -> None:
    """Half of a row's entries forgotten, a wrong power of two, a base-2 lse, an output that is not
    divided: all far outside of the bound."""
    arguments = cases.make(Case(main=Source(topk=200, num_blocks=20)))
    want = expected(arguments)

    def outside(out: np.ndarray, lse: np.ndarray) -> tuple[bool, bool]:
        return (
            bool((excess(out, want.out, want.bound_out) > 1).any()),
            bool((excess(lse, want.lse, want.bound_lse) > 1).any()),
        )

    assert outside(want.out, want.lse) == (False, False)
    half = expected({**arguments, "indices": arguments["indices"][:, :100]})
    assert outside(half.out, half.lse) == (True, True)
    assert outside(want.out * 1.01, want.lse) == (True, False)
    assert outside(want.out, want.lse / np.log(2)) == (False, True)
    assert outside(want.out * np.nan, want.lse * np.nan) == (True, True)
