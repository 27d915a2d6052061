"""`attend` on a GPU: shapes of every kernel, sizes past 2 and 4 GiB, garbage in every index array,
and results that are those of the CPU and of the call before."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cases
import sparse_mla
from cases import Case, Source
from compare import (
    INDEXING,
    assert_fault,
    assert_within,
    expected,
    expected_fault,
    fault_of,
    to_framework,
    to_numpy,
)
from conftest import Backend
from sparse_mla import reference

pytestmark = pytest.mark.gpu

GIB = 2**30
BF16, F16 = cases.DTYPES["bfloat16"], cases.DTYPES["float16"]
HEADS = (1, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256)
TOPK = (0, 1, 63, 64, 65, 2047, 2048, 2051, 16384)
KINDS = [
    (name, width, dtype)
    for name, width in (
        ("dense", 576),
        ("dense", 512),
        *((name, row.d_qk) for name, row in reference.FORMATS.items()),
    )
    for dtype in ("bfloat16", "float16", "float32")
]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
SOME_KINDS = pytest.mark.parametrize(
    "kind",
    [("dense", 576, "bfloat16"), ("dense", 512, "float16"), ("fp8_ds_mla", 576, "bfloat16")],
    ids=lambda kind: "-".join(map(str, kind)),
)


def case_of(kind: tuple[str, int, str], **fields: Any) -> Case:
    """A case of a cache format, width and dtype; fields of its Source are taken out of `fields`."""
    name, d_qk, dtype = kind
    own = {key: fields.pop(key) for key in list(fields) if key in Source.__dataclass_fields__}
    return Case(d_qk=d_qk, dtype=dtype, main=Source(cache_format=name, **own), **fields)


# --------------------------------------------------------------------------- every specialisation


@EVERY_KIND
def test_heads(kind: tuple[str, int, str], cuda: Backend) -> None:
    for heads in HEADS:
        case = case_of(kind, heads=heads, leading=(2,), topk=130, topk_lens="row", sink="normal")
        cuda.check(cases.make(replace(case, spread=3.0), seed=heads))


@EVERY_KIND
def test_topk(kind: tuple[str, int, str], cuda: Backend) -> None:
    for topk in TOPK:
        for heads in (16, 40) if topk <= 65 else (20,):
            case = case_of(kind, heads=heads, leading=(2,), topk=topk, num_blocks=64, block_size=64)
            cuda.check(cases.make(case, seed=topk))


@EVERY_KIND
def test_heads_and_topk_in_every_number_of_parts(kind: tuple[str, int, str], cuda: Backend) -> None:
    """Rows few and many, with paging and both orders of splits: the plan differs in each."""
    for rows, heads, topk in (
        (1, 6, 2051),
        (1, 64, 2048),
        (1, 128, 640),
        (40, 24, 700),
        (9, 96, 65),
    ):
        for batch_invariant in (False, True):
            paging = {"paged": True, "seq_lens": True, "max_blocks": 20, "block_size": 64}
            case = case_of(kind, heads=heads, leading=(rows,), topk=topk, num_blocks=50, **paging)
            case = replace(case, batch_invariant=batch_invariant, max_logits="given")
            cuda.check(cases.make(case, seed=rows))


@pytest.mark.parametrize("name", ["dense", "fp8_ds_mla"])
def test_more_pieces_than_multiprocessors(name: str, cuda: Backend) -> None:
    """A round of whole rows, and some that are cut; head tiles in part are cut like others."""
    import torch

    count = torch.cuda.get_device_properties(0).multi_processor_count
    for rows, heads in ((count + 2, 64), (count // 2 + 1, 70), (count + 2, 24), (count + 2, 10)):
        case = case_of((name, 576, "bfloat16"), heads=heads, leading=(rows,), topk=600)
        case = replace(case, max_logits="given", out="strided", lse="strided", sink="normal")
        cuda.check(cases.make(case, seed=rows))
        if cuda.kernel == "sm90":
            plan = sparse_mla.plan(
                batch=rows, heads=heads, topk=600, cache_format=name, device="cuda:0"
            )
            of_piece = plan["splits"] * plan["head_tile"] * (512 + 2) * 4
            assert plan["workspace_bytes"] % of_piece == 0
            assert 0 < plan["workspace_bytes"] < of_piece * count


@pytest.mark.parametrize(
    "names",
    [("dense", "dense"), ("dense", "norope"), ("norope", "dense"), ("norope", "norope")],
    ids="-".join,
)
def test_two_caches(names: tuple[str, str], cuda: Backend) -> None:
    """A window and a compressed cache, each with its own format and paging."""
    formats = {"dense": "dense", "norope": "fp8_ds_mla_norope"}
    main, extra = (
        Source(cache_format=formats[name], paged=True, seq_lens=True, topk=topk, block_size=size)
        for name, topk, size in zip(names, (128, 700), (16, 5), strict=True)
    )
    for heads, rows in ((8, 1), (16, 3), (64, 2)):
        case = Case(leading=(rows,), heads=heads, d_qk=512, main=main, sink="normal")
        for second in (extra, replace(extra, topk=None), replace(extra, padding=1.0)):
            cuda.check(cases.make(replace(case, extra=second), seed=rows))


# --------------------------------------------------------------------------- sizes


def stored_rows(kind: tuple[str, int, str], count: int) -> np.ndarray:
    """Bytes of random rows: (count, row_bytes)."""
    name, d_qk, dtype = kind
    numbers = np.random.default_rng(count).standard_normal((count, d_qk), np.float32)
    stored = reference.encode(numbers, name, 4.5 / 448, dtype=cases.DTYPES[dtype])
    return stored.view(np.uint8)


def of_dtype(raw: np.ndarray, kind: tuple[str, int, str]) -> np.ndarray:
    return raw.view(cases.DTYPES[kind[2]]) if kind[0] == "dense" else raw


def poisoned(kind: tuple[str, int, str], slots: int, used: np.ndarray, device: str) -> Any:
    """A cache (slots, row) on the GPU: NaN everywhere but in the slots used; and their rows."""
    import torch

    stored = stored_rows(kind, len(used))
    cache = torch.full((slots, stored.shape[1]), 0xFF, dtype=torch.uint8, device=device)
    cache[torch.from_numpy(used).to(device)] = torch.from_numpy(stored).to(device)
    if kind[0] == "dense":
        cache = cache.view(getattr(torch, kind[2]))
    return cache, of_dtype(stored, kind)


def scalars(kind: tuple[str, int, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"softmax_scale": kind[1] ** -0.5, "cache_format": kind[0]}
    if kind[0] == "fp8_tensor":
        arguments["cache_scale"] = 4.5 / 448
    if kind[1] not in (512, 576):
        arguments["head_dim_v"] = kind[1]
    return arguments


def compare_rows(got: tuple[Any, Any], rows: np.ndarray, q: np.ndarray, **arguments: Any) -> None:
    """The rows named of `out` and `lse`, whose leading shape is flattened, against the oracle."""
    import torch

    want = expected({"q": q, **arguments})
    at = torch.from_numpy(rows)
    out, lse = (
        to_numpy(x.flatten(0, -1 - tail)[at.to(x.device)])
        for x, tail in zip(got, (2, 1), strict=True)
    )
    assert_within("lse", lse, want.lse, want.bound_lse)
    assert_within("out", out, want.out, want.bound_out, out.dtype.name)


ADDRESSING = [(1, "int32", False), (64, "int64", False), (1, "int32", True), (64, "int32", True)]


@pytest.mark.parametrize(("block_size", "index_dtype", "paged"), ADDRESSING)
@pytest.mark.parametrize("kind", [k for k in KINDS if k[2] != "float32"], ids=str)
def test_caches_past_4_gib(
    kind: tuple[str, int, str], block_size: int, index_dtype: str, paged: bool, cuda: Backend, room
) -> None:
    """Slots around 2, 4 and 8 GiB, block ids around 65,536 and past 2^23, the last slot, and the
    slot at which rows of 1152 bytes pass 2^32."""
    room(10)
    row = stored_rows(kind, 1).shape[1]
    blocks = int(9.4 * GIB) // (row * block_size)
    slots = blocks * block_size
    near = [0, *(n * GIB // row for n in (2, 4, 8)), 65_535 * block_size, 3_728_270, slots - 2]
    used = np.unique([slot + i for slot in near for i in (0, 1, 2) if slot + i < slots])
    cache, stored = poisoned(kind, slots, used, cuda.device)
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(used), (64, 33))
    picks[rng.random(picks.shape) < 0.1] = -1
    indices = np.where(picks < 0, -1, used[picks])
    paging = {}
    if paged:
        held = np.unique(used // block_size)
        order = np.stack([rng.permutation(len(held)) for _ in range(64)])
        paging["block_table"] = held[order].astype(np.int32)
        logical = np.argsort(order, axis=1)[
            np.arange(64)[:, None], np.searchsorted(held, indices // block_size) % len(held)
        ]
        indices = np.where(picks < 0, -1, logical * block_size + indices % block_size)
    q = rng.standard_normal((64, 16, kind[1]), np.float32).astype(cases.DTYPES[kind[2]])
    given = cuda.tensors({"q": q, "indices": indices.astype(index_dtype), **paging})
    view = cache.view(blocks, block_size, -1)
    got = sparse_mla.attend(kv_cache=view, **given, **scalars(kind))
    compact = {"kv_cache": stored[:, None], "indices": picks}
    compare_rows(got, np.arange(64), q, **compact, **scalars(kind))
    sparse_mla.synchronize()


def test_blocks_far_apart(cuda: Backend, room) -> None:
    """Blocks gigabytes apart, with another stride in each of two caches."""
    import torch

    room(8)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 3, 4, 576)).astype(BF16)
    pool = torch.full((7 * GIB // 2,), float("nan"), dtype=torch.bfloat16, device=cuda.device)
    strides, starts = (3 * GIB // 2 + 2 * 576, 5 * GIB // 4 + 8 * 576), (0, 80 * 576)
    caches = [
        pool.as_strided((3, 4, 576), (stride, 576, 1), start)
        for stride, start in zip(strides, starts, strict=True)
    ]
    for cache, numbers in zip(caches, rows, strict=True):
        cache.copy_(cuda.tensors(numbers))
    q = rng.standard_normal((70, 16, 576)).astype(BF16)
    picks = rng.integers(-1, 12, (2, 70, 30)).astype(np.int32)
    got = sparse_mla.attend(
        cuda.tensors(q),
        caches[0],
        cuda.tensors(picks[0]),
        extra_kv_cache=caches[1],
        extra_indices=cuda.tensors(picks[1]),
        softmax_scale=1 / 24,
    )
    arguments = {"kv_cache": rows[0], "indices": picks[0], "softmax_scale": 1 / 24}
    arguments |= {"extra_kv_cache": rows[1], "extra_indices": picks[1]}
    compare_rows(got, np.arange(70), q, **arguments)


@pytest.mark.parametrize("paged", [False, True])
def test_more_than_2_31_slots(paged: bool, cuda: Backend, room) -> None:
    """Slots that do not fit 32 bits, by int64 indices or by blocks of int32."""
    room(33)
    kind, size = ("dense", 8, "float16"), 64
    slots = 2**31 + 64 * size
    used = np.unique(
        [slot + i for slot in (0, 2**28, 2**30, 2**31 - 1, 2**31, slots - 2) for i in (0, 1)]
    )
    cache, stored = poisoned(kind, slots, used, cuda.device)
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(used), (64, 9))
    indices, paging = used[picks], {}
    if paged:
        held = np.unique(used // size)
        paging["block_table"] = np.tile(held.astype(np.int32), (64, 1))
        indices = np.searchsorted(held, indices // size) * size + indices % size
    q = rng.standard_normal((64, 3, 8)).astype(F16)
    given = cuda.tensors({"q": q, "indices": indices, **paging})
    got = sparse_mla.attend(kv_cache=cache.view(-1, size, 8), **given, **scalars(kind))
    sparse_mla.synchronize()
    compact = {"kv_cache": stored[:, None], "indices": picks}
    compare_rows(got, np.arange(64), q, **compact, **scalars(kind))


def sampled(rows: int) -> np.ndarray:
    """At least 64 rows: the first, the last, those around 65,536, and random ones."""
    random = np.random.default_rng(0).integers(0, rows, 60)
    around = [*range(4), *range(65_532, 65_541), *range(rows - 4, rows)]
    return np.unique([*(row for row in around if 0 <= row < rows), *random])


def many_rows(
    kind: tuple[str, int, str],
    leading: tuple[int, ...],
    heads: int,
    topk: int,
    cuda: Backend,
    **keywords: Any,
) -> None:
    """Rows whose queries are made on the GPU, with requests, lengths and padded rows."""
    import torch

    rng = np.random.default_rng(0)
    rows, rows_of_table = int(np.prod(leading)), 100
    raw = of_dtype(stored_rows(kind, 800), kind)
    indices = rng.integers(-1, 260, (*leading, topk)).astype(np.int32)
    small = {
        "indices": indices,
        "block_table": rng.integers(-1, 100, (rows_of_table, 32)).astype(np.int32),
        "request_ids": rng.integers(-1, rows_of_table, leading).astype(np.int32),
        "topk_lens": rng.integers(0, topk + 1, leading).astype(np.int32),
        "seq_lens": rng.integers(0, 257, rows_of_table).astype(np.int32),
    }
    generator = torch.Generator(cuda.device).manual_seed(1)
    shape = (*leading, heads, kind[1])
    q = torch.randn(shape, generator=generator, device=cuda.device, dtype=getattr(torch, kind[2]))
    cache = raw.reshape(100, 8, -1)
    got = sparse_mla.attend(
        q, cuda.tensors(cache), **cuda.tensors(small), **scalars(kind), **keywords
    )
    at = sampled(rows)
    assert len(at) >= 64
    for name in ("indices", "request_ids", "topk_lens"):
        small[name] = small[name].reshape(rows, *small[name].shape[len(leading) :])[at]
    chosen = to_numpy(q.view(rows, heads, -1)[torch.from_numpy(at).to(q.device)])
    compare_rows(got, at, chosen, kv_cache=cache, **small, **scalars(kind))
    sparse_mla.synchronize()


@SOME_KINDS
@pytest.mark.parametrize("leading", [(70_000,), (35_000, 2), (2, 35_000)], ids=str)
def test_70_000_rows(
    leading: tuple[int, ...], kind: tuple[str, int, str], cuda: Backend, room
) -> None:
    room(6)
    many_rows(kind, leading, 16, 48, cuda)


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_outputs_past_2_31_elements(out_dtype: str | None, cuda: Backend, room) -> None:
    import torch

    room(20)
    shape = (70_000, 64, 512)
    assert np.prod(shape) > 2**31
    given = {}
    if out_dtype:
        given["out"] = torch.empty(shape, dtype=torch.float32, device=cuda.device)
    many_rows(("dense", 576, "bfloat16"), (70_000,), 64, 12, cuda, **given)


def test_workspace_past_2_31_elements(cuda: Backend, room) -> None:
    """Partial results of 70,000 rows, which batch_invariant cuts as it cuts one."""
    shape = {"batch": 70_000, "heads": 32, "topk": 600, "batch_invariant": True}
    plan = sparse_mla.plan(**shape, device="cuda:0")
    if plan["workspace_bytes"] < 4 * 2**31:
        pytest.skip(f"{plan['kernel']} takes {plan['workspace_bytes']} bytes only")
    room(plan["workspace_bytes"] // GIB + 10)
    many_rows(("dense", 576, "bfloat16"), (70_000,), 32, 600, cuda, batch_invariant=True)


def test_many_requests_and_a_wide_table(cuda: Backend, room) -> None:
    """A block table of 2^31 elements and more, of which a few rows are named."""
    import torch

    room(10)
    requests, blocks = 70_000, 31_000
    assert requests * blocks > 2**31
    table = torch.full((requests, blocks), -1, dtype=torch.int32, device=cuda.device)
    arguments = cases.make(Case(leading=(4,), heads=16, main=Source(topk=1, padding=0)))
    rows = np.random.default_rng(0).standard_normal((8, 16, 576)).astype(BF16)
    arguments["kv_cache"] = rows
    named = np.array([0, requests - 1, 65_536, 33_333], np.int32)
    places = np.array([0, blocks - 1, 17, 30_000])
    table[torch.from_numpy(named).long(), torch.from_numpy(places)] = torch.tensor(
        [1, 7, 4, 2], dtype=torch.int32, device=cuda.device
    )
    offset = np.array([3, 15, 0, 8])
    arguments["indices"] = (places * 16 + offset).astype(np.int32)[:, None]
    tensors = cuda.tensors({**arguments, "request_ids": named})
    got = sparse_mla.attend(**tensors, block_table=table)
    arguments["indices"] = np.array([1, 7, 4, 2])[:, None] * 16 + offset[:, None]
    compare_rows(got, np.arange(4), arguments.pop("q"), **arguments)


# --------------------------------------------------------------------------- garbage


def random_patterns(array: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """The array with random bits in that share of its places."""
    info = np.iinfo(array.dtype)
    noise = rng.integers(info.min, info.max, array.shape, array.dtype, endpoint=True)
    return np.where(rng.random(array.shape) < share, noise, array)


def garbage(case: Case, share: float, seed: int) -> dict[str, Any]:
    """The arguments of a case with random bits in every index array, table and length; every slot
    that is not selected even so holds NaN."""
    rng = np.random.default_rng(seed)
    arguments = cases.make(case, seed)
    for name in (*INDEXING, "indices"):
        array = arguments.get(name)
        if isinstance(array, np.ndarray) and array.dtype.kind == "i":
            arguments[name] = random_patterns(array, share, rng)
    arrays = {name: arguments[name] for name in INDEXING if name in arguments}
    slots = reference.resolve(
        arguments["kv_cache"], arguments["indices"], leading=case.leading, **arrays
    )
    arguments["kv_cache"] = cases._make_cache(case, case.main, slots[0], rng)
    if case.extra:
        arguments["extra_kv_cache"] = cases._make_cache(case, case.extra, slots[1], rng)
    return arguments


EVERYTHING = {"paged": True, "seq_lens": True, "topk_lens": "row", "padding": 0.1}
GARBAGE = {
    "slots": Case(leading=(5,), heads=16, main=Source(topk=700, topk_lens="row")),
    "slots_fp8": Case(
        leading=(3, 2), heads=20, main=Source(cache_format="fp8_ds_mla", topk=65, topk_lens="batch")
    ),
    "paged": Case(
        leading=(7,), heads=16, main=Source(topk=130, **EVERYTHING), request_ids=True, requests=4
    ),
    "paged_fp8": Case(
        leading=(3, 3),
        heads=64,
        main=Source(cache_format="fp8_ds_mla", topk=64, **EVERYTHING),
        request_ids=True,
        query_positions=True,
    ),
    "shard": Case(
        leading=(5,), heads=8, main=Source(topk=200, **EVERYTHING), shard=(1, 3, 4), requests=7
    ),
    "every_position": Case(
        leading=(4, 2), heads=16, main=cases.ALL, query_positions=True, request_ids=True
    ),
    "two_caches": Case(
        leading=(6,),
        heads=16,
        d_qk=512,
        main=Source(cache_format="fp8_ds_mla_norope", topk=130, **EVERYTHING),
        extra=Source(topk=300, block_size=5, **EVERYTHING),
        request_ids=True,
        sink="normal",
    ),
}


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", GARBAGE)
def test_random_patterns(name: str, index_dtype: str, share: float, cuda: Backend) -> None:
    """Whatever the index arrays hold, no entry but a valid one is read, and each mode tells."""
    case = GARBAGE[name]
    case = replace(case, main=replace(case.main, index_dtype=index_dtype))
    if case.extra:
        case = replace(case, extra=replace(case.extra, index_dtype=index_dtype))
    for seed, validate in enumerate(("mask", "deferred", "record", "raise")):
        arguments = garbage(replace(case, validate=validate), share, seed)
        cuda.check(arguments)


@pytest.mark.parametrize("validate", ["deferred", "record", "raise", "mask"])
def test_every_entry_a_fault(validate: str, cuda: Backend) -> None:
    """Thousands of blocks want to tell of a fault at once: one does, none waits or reads a row."""
    rows, topk = 3000, 512
    case = Case(heads=16, main=Source(topk=topk), validate=validate, leading=(rows,))
    arguments = cases.make(replace(case, out="own", lse="given"))
    rng = np.random.default_rng(0)
    arguments["indices"] = rng.integers(128, 2**31, (rows, topk), np.int32)
    tensors = cuda.tensors(arguments)
    tensors["kv_cache"].fill_(float("nan"))
    for _ in range(3):
        tensors["out"].fill_(1)
        told = {
            "raise": fault_of(lambda: sparse_mla.attend(**tensors)),
            "deferred": fault_of(sparse_mla.synchronize),
            "record": sparse_mla.faults(),
        }
        fault = told.pop(validate, None)
        assert told == dict.fromkeys(told)
        assert (tensors["out"] == (validate == "raise")).all()
        assert validate == "raise" or (tensors["lse"] == -float("inf")).all()
        if validate == "mask":
            continue
        assert fault.tensor == "indices"
        assert fault.value == arguments["indices"][fault.position]
        assert fault.bound == 128
        if validate == "raise":
            assert_fault(fault, expected_fault(arguments))
            assert fault.count == rows * topk


# --------------------------------------------------------------------------- equal results


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_equal_to_the_cpu(case: Case, cuda: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two results that are each within the bound are within twice the bound of each other."""
    if "reversed" in case.name:
        pytest.skip("PyTorch has no negative strides")
    arguments = cases.make(case, seed=4)
    want = expected(arguments)
    on_gpu = cuda.attend(**arguments)
    monkeypatch.delenv("SPARSE_MLA_KERNEL", raising=False)
    on_cpu = sparse_mla.attend(**arguments)
    for name, got, other, bound in zip(
        ("out", "lse"), on_gpu, on_cpu, (want.bound_out, want.bound_lse), strict=True
    ):
        assert_within(name, got, other.astype(np.float64), 2 * bound, got.dtype.name)


def poison_the_pool(cuda: Backend) -> None:
    """Fills memory that the next workspace and results will come from with NaN."""
    import torch

    held = [
        torch.full((size,), float("nan"), device=cuda.device)
        for size in (2**8, 2**14, 2**20, 2**24)
    ]
    del held


@EVERY_KIND
def test_same_input_same_bits(kind: tuple[str, int, str], cuda: Backend) -> None:
    for rows, heads, topk in ((1, 16, 2048), (1, 128, 700), (70, 6, 60), (3, 64, 2051)):
        case = case_of(kind, leading=(rows,), heads=heads, topk=topk, num_blocks=64)
        tensors = cuda.tensors(cases.make(case))
        first = sparse_mla.attend(**tensors)
        for _ in range(5):
            poison_the_pool(cuda)
            again = sparse_mla.attend(**tensors)
            assert_same_bits(again, first)


def assert_same_bits(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    for one, other in zip(got, want, strict=True):
        assert to_numpy(one).tobytes() == to_numpy(other).tobytes()


@EVERY_KIND
@pytest.mark.parametrize("topk", [60, 600, 2048])
def test_batch_invariant(kind: tuple[str, int, str], topk: int, cuda: Backend) -> None:
    """A row has the same bits alone, among 70 and among 1,000, wherever it stands."""
    for heads in (5, 20):
        case = case_of(
            kind, leading=(1000,), heads=heads, topk=topk, topk_lens="row", num_blocks=40
        )
        tensors = cuda.tensors(cases.make(replace(case, batch_invariant=True)))
        everything = sparse_mla.attend(**tensors)
        per_row = ("q", "indices", "topk_lens")
        for rows in (slice(0, 70), slice(3, 4), slice(69, 70), slice(930, 1000), slice(999, 1000)):
            part = {name: x[rows] if name in per_row else x for name, x in tensors.items()}
            got = sparse_mla.attend(**part)
            assert_same_bits(got, tuple(x[rows] for x in everything))


# --------------------------------------------------------------------------- parts, merged


@EVERY_KIND
def test_parts_of_the_entries_merge_to_the_whole(kind: tuple[str, int, str], cuda: Backend) -> None:
    case = case_of(kind, leading=(9,), heads=16, topk=640, num_blocks=40, padding=0.2)
    arguments = cases.make(replace(case, sink="normal"))
    arguments["indices"][3] = -1
    arguments["indices"][5, :600] = -1
    want = expected(arguments)
    whole = cuda.attend(**arguments)
    sink = arguments.pop("attn_sink")
    for count in (2, 5, 32):
        parts = [
            sparse_mla.attend(**cuda.tensors({**arguments, "indices": part}))
            for part in np.array_split(arguments["indices"], count, axis=1)
        ]
        out, lse = sparse_mla.merge(
            [part[0] for part in parts], [part[1] for part in parts], attn_sink=cuda.tensors(sink)
        )
        out, lse = to_numpy(out), to_numpy(lse)
        for other in (want.out, whole[0].astype(np.float64)):
            assert_within("out", out, other, 2 * want.bound_out, out.dtype.name)
        for other in (want.lse, whole[1].astype(np.float64)):
            assert_within("lse", lse, other, 2 * want.bound_lse)


@SOME_KINDS
@pytest.mark.parametrize("everything", [False, True])
def test_shards_merge_to_the_whole(
    kind: tuple[str, int, str], everything: bool, cuda: Backend
) -> None:
    """Positions dealt out to three ranks, each with its own cache and block table."""
    size, interleave, block_size, requests, length = 3, 4, 8, 5, 232
    rng = np.random.default_rng(0)
    rows = of_dtype(stored_rows(kind, requests * length), kind).reshape(requests, length, -1)
    seq_lens = rng.integers(0, length + 1, requests).astype(np.int32)
    q = rng.standard_normal((requests, 16, kind[1]), np.float32).astype(cases.DTYPES[kind[2]])
    indices = None
    if not everything:
        indices = rng.integers(-1, length, (requests, 150)).astype(np.int32)
    common = {"q": q, "indices": indices, "seq_lens": seq_lens, **scalars(kind)}

    def held(rank: int, of: int) -> dict[str, np.ndarray]:
        """The cache and table of one rank, whose positions are those that it owns."""
        mine = np.arange(length)[np.arange(length) // interleave % of == rank]
        blocks = -(-len(mine) // block_size)
        cache = np.full((requests * blocks * block_size, rows.shape[2]), 0xFF, np.uint8)
        cache = np.zeros(cache.shape, rows.dtype) if kind[0] == "dense" else cache
        table = rng.permutation(requests * blocks).reshape(requests, blocks).astype(np.int32)
        for request in range(requests):
            local = np.arange(len(mine))
            slots = table[request, local // block_size] * block_size + local % block_size
            cache[slots] = rows[request, mine]
        return {"kv_cache": cache.reshape(-1, block_size, rows.shape[2]), "block_table": table}

    whole = {**common, **held(0, 1)}
    want = expected(whole)
    parts = [
        sparse_mla.attend(
            **cuda.tensors({**common, **held(rank, size)}), shard=(rank, size, interleave)
        )
        for rank in range(size)
    ]
    sparse_mla.synchronize()
    out, lse = sparse_mla.merge([part[0] for part in parts], [part[1] for part in parts])
    out, lse = to_numpy(out), to_numpy(lse)
    assert_within("out", out, want.out, 2 * want.bound_out, out.dtype.name)
    assert_within("lse", lse, want.lse, 2 * want.bound_lse)


# --------------------------------------------------------------------------- the plan


PLANNED = [
    (rows, heads, topk, batch_invariant)
    for rows, heads, topk in ((1, 16, 2048), (1, 128, 64), (16, 8, 2048), (300, 64, 130), (1, 1, 0))
    for batch_invariant in (False, True)
]


@pytest.mark.parametrize("name", ["dense", "fp8_ds_mla"])
def test_plan_is_what_runs(name: str, cuda: Backend) -> None:
    """Launches and workspace of `plan` are those of a call, by the profiler and the allocator."""
    import torch

    for rows, heads, topk, batch_invariant in PLANNED:
        case = case_of((name, 576, "bfloat16"), leading=(rows,), heads=heads, topk=topk)
        case = replace(case, batch_invariant=batch_invariant, out="own", lse="given")
        tensors = cuda.tensors(cases.make(case))
        keywords = {"cache_format": name, "batch_invariant": batch_invariant, "device": "cuda:0"}
        plan = sparse_mla.plan(batch=rows, heads=heads, topk=topk, **keywords)
        assert plan["splits"] * plan["split_entries"] >= topk
        assert plan["launches"] == (2 if plan["splits"] > 1 else 1)
        sparse_mla.attend(**tensors)
        torch.cuda.synchronize()
        gc.collect()  # what earlier tests left in cycles is not freed between the two readings
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        sparse_mla.attend(**tensors)
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        assert peak - before == plan["workspace_bytes"]
        assert launches_of(tensors) == plan["launches"]


def launches_of(tensors: dict[str, Any]) -> int:
    """Kernels that a call of attend launches, by PyTorch's profiler."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        torch.zeros(1, device="cuda")
        sparse_mla.attend(**tensors)
        torch.cuda.synchronize()
    kernels = [each.name for each in profile.events() if each.device_type.name == "CUDA"]
    if not kernels:
        pytest.skip("the profiler sees no kernels here")
    return sum(name.startswith(("any_", "sm")) for name in kernels)


def made_for(kernel: str, cache_format: str, d_qk: int, dtype: str) -> bool:
    return {
        "any": True,
        "sm80": dtype != "float32",
        "sm90": dtype == "bfloat16" and cache_format != "fp8_tensor",
    }[kernel]


def test_a_forced_kernel_takes_what_it_is_made_for(cuda: Backend) -> None:
    """At any head count; what a kernel does not take it refuses by name."""
    if cuda.kernel is None:
        for kind in KINDS:
            cuda.check(cases.make(case_of(kind)))
        return
    refused = []
    for kind in KINDS:
        try:
            cuda.check(cases.make(case_of(kind)))
        except sparse_mla.UnsupportedError as error:
            assert str(error).startswith(f"SPARSE_MLA_KERNEL: {cuda.kernel} "), error
            refused.append(kind)
    assert refused == [kind for kind in KINDS if not made_for(cuda.kernel, *kind)]


def test_an_unknown_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_KERNEL", "cpu_plain")
    tensors = to_framework(cases.make(Case(main=cases.SMALL)), "torch", "cuda")
    with pytest.raises(ValueError, match=r"SPARSE_MLA_KERNEL: expected .*any.*, got 'cpu_plain'"):
        sparse_mla.attend(**tensors)


def test_all_devices_are_served() -> None:
    """The same call on every GPU of the machine, whichever is current."""
    import torch

    arguments = cases.make(Case(heads=16))
    want = expected(arguments)
    for index in range(torch.cuda.device_count()):
        out, lse = sparse_mla.attend(**to_framework(arguments, "torch", f"cuda:{index}"))
        assert out.device.index == lse.device.index == index
        assert torch.cuda.current_device() == 0
        assert_within("out", to_numpy(out), want.out, want.bound_out, "bfloat16")
        sparse_mla.synchronize(f"cuda:{index}")
