"""The writers and readers of caches on a GPU, byte for byte those of the CPU; check's reports; and
code that the driver compiles for a GPU that no binary of the build is made for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import sparse_mla
from cases import Source
from compare import INDEXING, to_framework, to_numpy
from sparse_mla import reference
from test_gpu_attend import GARBAGE, garbage
from test_writers import (
    DTYPES,
    EVERY_DTYPE,
    EVERY_FORMAT,
    PACKED,
    SCALE,
    assert_same_rows,
    memory_of,
    rows_of_every_kind,
    scale,
    width,
)

pytestmark = pytest.mark.gpu


def on_gpu(value: Any) -> Any:
    return to_framework(value, "torch", "cuda")


def row_bytes(name: str) -> int:
    return 576 if name == "dense" else reference.FORMATS[name].row_bytes


@EVERY_DTYPE
@EVERY_FORMAT
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_pack(name: str, dtype: str, block_size: int) -> None:
    """Zeros, infinities, NaN, huge and subnormal groups, ties: the CPU's bytes and the oracle's."""
    keywords = {"cache_format": name, "block_size": block_size, **scale(name)}
    rows = rows_of_every_kind(name, dtype, count=130)
    got = to_numpy(sparse_mla.pack(on_gpu(rows), **keywords))
    assert_same_rows(got, sparse_mla.pack(rows, **keywords), name)
    assert_same_rows(got.reshape(-1, got.shape[2])[:130], reference.encode(rows, name, SCALE), name)
    assert not got.reshape(-1, got.shape[2])[130:].view(np.uint8).any()


@pytest.mark.parametrize("name", PACKED)
def test_pack_on_random_bits(name: str) -> None:
    """Every rounding: random float32 patterns, through scales of any size and sign."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 2**32, (3000, width(name)), np.uint32).view(np.float32)
    for factor in (SCALE, 1e-38, 1e-44, 1e38, -2.5, 0.0) if name == "fp8_tensor" else (None,):
        keywords = {"cache_format": name, "block_size": 8}
        if factor is not None:
            keywords["cache_scale"] = factor
        got = to_numpy(sparse_mla.pack(on_gpu(rows), **keywords))
        assert_same_rows(got, sparse_mla.pack(rows, **keywords), name)


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("layout", [x for x in cases.CACHE_LAYOUTS if x != "reversed"])
def test_unpack(name: str, dtype: str, layout: str) -> None:
    """Random bytes in every layout: exactly the CPU's numbers, NaN where it has one."""
    kind = cases.DTYPES[dtype] if name == "dense" else np.dtype(np.uint8)
    source = Source(num_blocks=9, block_size=7, layout=layout, unused="random")
    cache = cases.empty_cache(source, row_bytes(name), kind, np.random.default_rng(3))
    keywords = {"cache_format": name, **scale(name)}
    got = to_numpy(sparse_mla.unpack(on_gpu(cache), **keywords))
    np.testing.assert_array_equal(got, sparse_mla.unpack(cache, **keywords))


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_append(name: str, dtype: str, pair: bool, index_dtype: type) -> None:
    """Duplicates, of which the last wins, and slots that are nobody's; not a byte more is written,
    whatever the layout of the cache."""
    kind = cases.DTYPES[dtype] if name == "dense" else np.dtype(np.uint8)
    rows = rows_of_every_kind(name, dtype, count=150)
    cut = width(name) - 64
    parts = (rows[:, :cut], rows[:, cut:]) if pair else (rows,)
    rng = np.random.default_rng(6)
    slots = rng.integers(-2, 75, 150)
    slots[rng.random(150) < 0.1] = np.iinfo(index_dtype).max
    slots[rng.random(150) < 0.1] = np.iinfo(index_dtype).min
    slots = slots.astype(index_dtype)
    keywords = {"cache_format": name, **scale(name)}
    for layout in ("contiguous", "interleaved", "gapped", "padded", "offset"):
        source = Source(num_blocks=9, block_size=7, layout=layout, unused="random")
        cache = cases.empty_cache(source, row_bytes(name), kind, np.random.default_rng(5))
        before = cache.copy()
        tensors = on_gpu((cache, slots, *parts))
        sparse_mla.append(*tensors, **keywords)
        sparse_mla.append(cache, slots, *parts, **keywords)
        got = to_numpy(tensors[0])
        assert_same_rows(got, cache, name)
        kept = np.divmod(np.setdiff1d(np.arange(63), slots), 7)
        assert got[kept].tobytes() == before[kept].tobytes()
        tensors[0].zero_()
        cache[...] = 0
        assert memory_behind(tensors[0]) in memory_of(cache).tobytes(), "written between the rows"


def memory_behind(tensor: Any) -> bytes:
    """The bytes of a tensor's allocation, from its first number on."""
    import torch

    memory = torch.empty(0, dtype=torch.uint8, device="cuda").set_(tensor.untyped_storage())
    return to_numpy(memory).tobytes()[tensor.storage_offset() * tensor.element_size() :]


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("latent_dtype", DTYPES)
@pytest.mark.parametrize("rope_dtype", DTYPES)
def test_append_converts(cache_dtype: str, latent_dtype: str, rope_dtype: str) -> None:
    """Latent, rope and cache of three dtypes, rows of any stride, each number rounded once."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (40, 700), np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        latent = bits.astype(cases.DTYPES[latent_dtype])[::2, 5:517]
        rope = (bits * 1e-6).astype(cases.DTYPES[rope_dtype])[::2, 600:664]
    cache = np.zeros((5, 4, 576), cases.DTYPES[cache_dtype])
    tensors = on_gpu((cache, np.arange(20), latent, rope))
    sparse_mla.append(*tensors, cache_format="dense")
    sparse_mla.append(cache, np.arange(20), latent, rope, cache_format="dense")
    assert_same_rows(to_numpy(tensors[0]), cache, "dense")


def test_append_of_many_tokens_and_a_large_cache(room) -> None:
    """70,000 tokens into a cache past 4 GiB, the last slot and block 65,536 among them."""
    import torch

    slots, block_size = 7_000_000, 7
    room(6)
    cache = torch.zeros((slots // block_size, block_size, 656), dtype=torch.uint8, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(70_000, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
    at = torch.randperm(slots, device="cuda")[:70_000]
    at[:4] = torch.tensor([slots - 1, 65_536 * block_size, 65_535 * block_size, 0], device="cuda")
    sparse_mla.append(cache, at, rows[:, :512], rows[:, 512:], cache_format="fp8_ds_mla")
    sample = [*range(40), *range(65_530, 65_540), *range(69_970, 70_000)]
    want = reference.encode(to_numpy(rows[sample]), "fp8_ds_mla")
    place = at[sample]
    last = [int((at == slot).nonzero().max()) for slot in place]
    got = to_numpy(cache.view(slots, 656)[place])
    keep = [i for i, row in enumerate(last) if row == sample[i]]
    assert len(keep) >= 64
    np.testing.assert_array_equal(got[keep], want[keep])


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", GARBAGE)
def test_check(name: str, share: float) -> None:
    """The report of CUDA tensors is that of the same arrays on the CPU."""
    arguments = garbage(GARBAGE[name], share, seed=3)
    names = ("kv_cache", "indices", "cache_format", "extra_cache_format", *INDEXING)
    keywords = {key: arguments[key] for key in names if key in arguments}
    want = sparse_mla.check(**keywords)
    got = sparse_mla.check(**on_gpu(keywords))
    assert got == want
    assert str(got) == str(want)
    np.testing.assert_array_equal(got.counts, want.counts)
    for mine, theirs in zip(got.sources, want.sources, strict=True):
        np.testing.assert_array_equal(mine.counts, theirs.counts)


@pytest.mark.parametrize(
    "case",
    [case for case in cases.CASES if "reversed" not in case.name],
    ids=str,
)
def test_resolve(case: cases.Case) -> None:
    arguments = cases.make(case, seed=5)
    names = ("kv_cache", "indices", *INDEXING)
    keywords = {key: arguments[key] for key in names if key in arguments}
    if keywords["indices"] is None and not keywords.keys() & {"query_positions", "request_ids"}:
        keywords["request_ids"] = np.arange(case.leading[0], dtype=np.int32)
    want = sparse_mla._core.resolve(**keywords)
    for one, other in zip(sparse_mla._core.resolve(**on_gpu(keywords)), want, strict=True):
        np.testing.assert_array_equal(one, other)


# --------------------------------------------------------------------------- compiled by the driver

FORCED = """
import sys; sys.path.insert(0, {tests!r})
import numpy as np, cases, sparse_mla
from compare import check_call, to_framework, to_numpy
from sparse_mla import reference
from test_writers import assert_same_rows, rows_of_every_kind, scale
for name in ("dense", *reference.FORMATS):
    for dtype in ("bfloat16", "float16", "float32"):
        source = cases.Source(cache_format=name, paged=True, seq_lens=True, topk=200, max_blocks=9)
        d_qk = reference.FORMATS[name].d_qk if name != "dense" else 576
        for rows, heads in ((1, 16), (4, 20), (2, 64)):
            case = cases.Case(leading=(rows,), heads=heads, d_qk=d_qk, dtype=dtype, main=source)
            for validate in ("mask", "raise"):
                arguments = dict(cases.make(case), validate=validate)
                check_call(arguments, "torch", "cuda")
        numbers = rows_of_every_kind(name, dtype)
        keywords = dict(cache_format=name, **scale(name))
        packed = sparse_mla.pack(to_framework(numbers, "torch", "cuda"), block_size=8, **keywords)
        want = sparse_mla.pack(numbers, block_size=8, **keywords)
        assert_same_rows(to_numpy(packed), want, name)
        back = to_numpy(sparse_mla.unpack(packed, **keywords))
        np.testing.assert_array_equal(back, sparse_mla.unpack(want, **keywords))
print("done")
"""


def test_forced_ptx() -> None:
    """The driver leaves every binary aside and compiles compute_80's code: what a GPU from before
    Ada runs, which has no instruction for e4m3. The variable makes loading fail without PTX."""
    targets = sparse_mla.build_info()["gpu_targets"].split()
    if "compute_80" not in targets:
        pytest.skip(f"the build has code for {' '.join(targets)}")
    done = subprocess.run(
        [sys.executable, "-c", FORCED.format(tests=str(Path(__file__).parent))],
        env={**os.environ, "CUDA_FORCE_PTX_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
