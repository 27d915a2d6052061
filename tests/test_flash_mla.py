"""FlashMLA's functions: signatures, shapes, masks and results, against a reference of our own."""

from __future__ import annotations

import inspect
import math

import pytest

import sparse_mla

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
flash_mla = pytest.importorskip("sparse_mla.flash_mla")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INVALID = [-(2**31), -123_456, -1, 2**31 - 1]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def reference(q, keys, valid, scale, d_v, sink=None):
    """In float64 over gathered rows: q (rows, heads, d), keys (rows, n, d), valid (rows, n)."""
    scores = torch.einsum("rhd,rnd->rhn", q.double(), keys.double()) * scale
    scores = scores.masked_fill(~valid[:, None, :], -math.inf)
    lse = scores.logsumexp(-1)
    empty = lse == -math.inf
    weights = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()
    out = torch.einsum("rhn,rnd->rhd", weights, keys[..., :d_v].double())
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.double())[..., None]
        out = out.masked_fill(empty[..., None], 0.0)
    return out, scores.amax(-1), lse.masked_fill(empty, math.inf)


def gather(rows, indices, lens):
    """The rows that indices (rows, n) name, and which of them count."""
    valid = (indices >= 0) & (indices < len(rows))
    if lens is not None:
        valid &= torch.arange(indices.shape[-1], device=indices.device) < lens[:, None]
    keys = rows[indices.masked_fill(~valid, 0).long()]
    return keys.masked_fill(~valid[..., None], 0.0), valid


def close(result, wanted, rtol, atol) -> None:
    torch.testing.assert_close(result.double(), wanted, rtol=rtol, atol=atol)


def some_indices(generator, rows, topk, slots):
    indices = torch.randint(0, slots, (rows, topk), generator=generator, dtype=torch.int32)
    bad = torch.rand(rows, topk, generator=generator)
    for i, value in enumerate([*INVALID, slots]):
        indices[(bad > i / 20) & (bad < (i + 1) / 20)] = value
    return indices


def a_sink(generator, heads):
    sink = torch.randn(heads, generator=generator)
    sink[0], sink[1] = math.inf, -math.inf
    return sink


# ------------------------------------------------------------------------------ decoding


def packed(generator, device, blocks, block_size):
    """A packed cache with padded blocks, and its rows in float32."""
    rows = torch.randn(blocks * block_size, 576, generator=generator).clamp(-1, 1)
    cache = sparse_mla.pack(rows.bfloat16(), cache_format="fp8_ds_mla", block_size=block_size)
    wide = torch.zeros(blocks, block_size + 1, 656, dtype=torch.uint8)
    wide[:, :block_size] = cache
    padded = wide.to(device)[:, :block_size, None]
    assert not padded.is_contiguous()
    rows = sparse_mla.unpack(cache, cache_format="fp8_ds_mla")
    return padded, rows.to(device)


@pytest.mark.parametrize("extra", [False, True], ids=["one cache", "extra cache"])
@pytest.mark.parametrize("lens", [False, True], ids=["all", "topk_length"])
@pytest.mark.parametrize(("batch", "s_q", "heads"), [(3, 1, 64), (2, 3, 16), (1, 2, 128)])
def test_sparse_decoding(device, batch, s_q, heads, lens, extra):
    generator = torch.Generator().manual_seed(batch + heads)
    rows, topk, extra_topk = batch * s_q, 65, 7
    cache, numbers = packed(generator, device, blocks=5, block_size=61)
    extra_cache, extra_numbers = packed(generator, device, blocks=40, block_size=2)
    q = torch.randn(batch, s_q, heads, 576, generator=generator).clamp(-1, 1).bfloat16().to(device)
    indices = some_indices(generator, rows, topk, len(numbers)).to(device)
    extra_indices = some_indices(generator, rows, extra_topk, len(extra_numbers)).to(device)
    indices[0] = -1
    extra_indices[0] = -1
    length = torch.randint(0, topk + 1, (batch,), generator=generator, dtype=torch.int32)
    extra_length = torch.full((batch,), extra_topk - 1, dtype=torch.int32)
    length, extra_length = length.to(device), extra_length.to(device)
    sink = a_sink(generator, heads).to(device)

    def per_row(length):
        return length.repeat_interleave(s_q) if lens else None

    keys, valid = gather(numbers, indices, per_row(length))
    if extra:
        more, counts = gather(extra_numbers, extra_indices, per_row(extra_length))
        keys, valid = torch.cat([keys, more], 1), torch.cat([valid, counts], 1)
    flat = q.reshape(rows, heads, 576)
    wanted, _, wanted_lse = reference(flat, keys, valid, 576**-0.5, 512, sink)

    metadata, num_splits = flash_mla.get_mla_metadata()
    keywords = {}
    if extra:
        keywords = {
            "extra_k_cache": extra_cache.view(torch.float8_e4m3fn),
            "extra_indices_in_kvcache": extra_indices.reshape(batch, s_q, extra_topk),
            "extra_topk_length": extra_length if lens else None,
        }
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        cache.view(torch.float8_e4m3fn),
        None,
        None,
        512,
        metadata,
        num_splits,
        is_fp8_kvcache=True,
        indices=indices.reshape(batch, s_q, topk),
        attn_sink=sink,
        topk_length=length if lens else None,
        **keywords,
    )
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert out.shape == (batch, s_q, heads, 512)
    assert lse.shape == (batch, heads, s_q)
    close(out.reshape(rows, heads, 512), wanted, 2.01 / 128, 1e-3)
    close(lse.transpose(1, 2).reshape(rows, heads), wanted_lse, 8.01 / 65536, 1e-6)
    assert (lse[0, :, 0] == math.inf).all()
    assert (out[0, 0] == 0).all()


def test_metadata_serves_any_shapes(device):
    generator = torch.Generator().manual_seed(1)
    metadata, _ = flash_mla.get_mla_metadata(torch.zeros(3), 128, 1, 128, True, topk=2048)
    cache, _ = packed(generator, device, 2, 64)
    for batch, heads, dtype in [(1, 64, torch.uint8), (4, 8, torch.int8)]:
        q = torch.zeros(batch, 1, heads, 576, dtype=torch.bfloat16, device=device)
        indices = torch.zeros(batch, 1, 3, dtype=torch.int32, device=device)
        out, _ = flash_mla.flash_mla_with_kvcache(
            q,
            cache.view(dtype),
            None,
            None,
            512,
            metadata,
            is_fp8_kvcache=True,
            indices=indices,
        )
        assert out.shape == (batch, 1, heads, 512)
    assert metadata.have_initialized


def decode(**changes):
    """A call of flash_mla_with_kvcache with changed arguments."""
    arguments = {
        "q": torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16),
        "k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": torch.zeros(1, 1, 3, dtype=torch.int32),
    }
    return flash_mla.flash_mla_with_kvcache(**(arguments | changes))


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (
            TypeError,
            "tile_scheduler_metadata: expected .* got NoneType",
            {"tile_scheduler_metadata": None},
        ),
        (ValueError, "num_splits: expected None", {"num_splits": 3}),
        (ValueError, "causal: expected False", {"causal": True}),
        (ValueError, "is_fp8_kvcache: expected True", {"is_fp8_kvcache": False}),
        (NotImplementedError, "dense decoding is not part", {"indices": None}),
        (
            NotImplementedError,
            r"q: expected \(batch, s_q, heads, 576\)",
            {"q": torch.zeros(1, 1, 64, 512, dtype=torch.bfloat16)},
        ),
        (TypeError, "k_cache: expected float8", {"k_cache": torch.zeros(2, 64, 1, 576)}),
        (
            ValueError,
            "k_cache: expected one key-value head",
            {"k_cache": torch.zeros(2, 64, 2, 656, dtype=torch.uint8)},
        ),
        (ValueError, "extra_k_cache: required", {"extra_topk_length": torch.zeros(1)}),
        (ValueError, "topk_lens", {"topk_length": torch.zeros(5, dtype=torch.int32)}),
    ],
)
def test_errors_of_decoding(error, match, changes):
    with pytest.raises(error, match=match):
        decode(**changes)


# ------------------------------------------------------------------------------ prefill


@pytest.mark.parametrize("features", [False, True], ids=["plain", "sink and topk_length"])
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(("s_q", "s_kv", "topk", "heads"), [(1, 33, 32, 64), (9, 95, 70, 16)])
def test_sparse_prefill(device, s_q, s_kv, topk, heads, d_qk, features):
    generator = torch.Generator().manual_seed(s_kv)
    q = (torch.randn(s_q, heads, d_qk, generator=generator) / 10 + 0.03).bfloat16()
    kv = (torch.randn(s_kv + 1, 1, d_qk + 128, generator=generator) / 10 - 0.02).bfloat16()
    indices = some_indices(generator, s_q, topk, s_kv)
    indices[-1] = INVALID[0]
    lens = torch.randint(0, topk + 1, (s_q,), generator=generator, dtype=torch.int32)
    sink = a_sink(generator, heads)
    q, kv, indices, lens, sink = (each.to(device) for each in (q, kv, indices, lens, sink))
    kv = kv[:s_kv, :, :d_qk]
    lens, sink = (lens, sink) if features else (None, None)

    keys, valid = gather(kv.squeeze(1).float(), indices, lens)
    wanted, wanted_max, wanted_lse = reference(q, keys, valid, 0.5, 512, sink)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices[:, None], 0.5, attn_sink=sink, topk_length=lens
    )
    assert (out.dtype, max_logits.dtype, lse.dtype) == (torch.bfloat16, *[torch.float32] * 2)
    assert (out.shape, lse.shape) == ((s_q, heads, 512), (s_q, heads))
    close(out, wanted, 3.01 / 128, 8e-4)
    close(max_logits, wanted_max, 2.01 / 65536, 1e-6)
    close(lse, wanted_lse, 2.01 / 65536, 1e-6)
    assert (lse[-1] == math.inf).all()
    assert (max_logits[-1] == -math.inf).all()
    assert (out[-1] == 0).all()


def test_errors_of_prefill():
    q = torch.zeros(2, 4, 576, dtype=torch.bfloat16)
    kv = torch.zeros(9, 1, 576, dtype=torch.bfloat16)
    indices = torch.zeros(2, 1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kv: expected one key-value head .* got shape \(9, 2"):
        flash_mla.flash_mla_sparse_fwd(q, kv.expand(9, 2, 576), indices, 1.0)
    with pytest.raises(ValueError, match=r"indices: expected one key-value head .* \(2, 3\)"):
        flash_mla.flash_mla_sparse_fwd(q, kv, indices[:, 0], 1.0)
    with pytest.raises(BufferError, match=r"requires grad"):
        flash_mla.flash_mla_sparse_fwd(q.requires_grad_(), kv, indices, 1.0)


# ------------------------------------------------------------------------------ names


def test_signatures_are_the_public_librarys():
    decoding = inspect.signature(flash_mla.flash_mla_with_kvcache)
    assert list(decoding.parameters) == [
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ]
    defaults = [each.default for each in decoding.parameters.values()]
    assert defaults == [inspect.Parameter.empty] * 6 + [None, None, False, False] + [None] * 6
    prefill = inspect.signature(flash_mla.flash_mla_sparse_fwd)
    assert list(prefill.parameters) == [
        "q",
        "kv",
        "indices",
        "sm_scale",
        "d_v",
        "attn_sink",
        "topk_length",
    ]
    assert prefill.parameters["d_v"].default == 512
    metadata, nothing = flash_mla.get_mla_metadata(1, 2, three=3)
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta)
    assert nothing is None


def test_the_lse_of_empty_rows_is_all_that_differs_from_attend():
    q = torch.randn(3, 2, 8)
    cache = torch.randn(4, 2, 8)
    indices = torch.tensor([[0, 3, -1], [7, 7, 1], [-1, -1, -1]], dtype=torch.int32)
    keywords = {"softmax_scale": 0.5, "head_dim_v": 4}
    out, lse = sparse_mla.attend(q, cache, indices, **keywords)
    same_out, infinite = sparse_mla._core.attend_for_flash_mla(q, cache, indices, **keywords)
    assert torch.equal(out, same_out)
    assert torch.equal(lse.masked_fill(lse == -math.inf, math.inf), infinite)
    assert (lse[2] == -math.inf).all()
