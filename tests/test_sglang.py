"""The adapter for SGLang, with tensors laid out as SGLang 0.5.23 lays them out, and its plug-in.

A pool has a page more than it has room for: page 0, whose slot 0 takes what padded tokens write.
Requests hold pages of 64 tokens; `req_to_token` (requests, longest context) has the slot of each of
a request's positions. A token's page table is `req_to_token` at the positions that the indexer
selected, as wide as its top-k, with -1 behind the entries of a short request.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import sparse_mla
from compare import assert_close, expected, to_framework
from sparse_mla import reference

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
adapter = importlib.import_module("sparse_mla.sglang")

PAGE = 64
SCALE = 1 / 16
FORMATS = ("dense", "fp8_ds_mla", "fp8_ds_mla_norope")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class Pool:
    """A layer's cache, and the slots of requests that have written to it."""

    def __init__(self, lengths: list[int], cache_format: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.cache_format = cache_format
        self.lengths = lengths
        self.d_qk = 512 if cache_format == "fp8_ds_mla_norope" else 576
        pages = [-(-length // PAGE) for length in lengths]
        free = 1 + rng.permutation(sum(pages) + 3)  # three pages stay unused
        self.req_to_token = np.zeros((len(lengths), max(lengths) + 4), np.int32)
        slots = (len(free) + 1) * PAGE
        width = {"dense": 576, "fp8_ds_mla": 656, "fp8_ds_mla_norope": 528}[cache_format]
        dtype = ml_dtypes.bfloat16 if cache_format == "dense" else np.uint8
        self.kv_buffer = np.full(slots * width * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        self.kv_buffer = self.kv_buffer.view(dtype).reshape(slots, 1, width)  # NaN everywhere
        for request, length in enumerate(lengths):
            mine, free = free[: pages[request]], free[pages[request] :]
            positions = np.arange(length)
            at = mine[positions // PAGE] * PAGE + positions % PAGE
            self.req_to_token[request, :length] = at
            rows = rng.standard_normal((length, self.d_qk), np.float32)
            self.kv_buffer[at, 0] = reference.encode(rows, cache_format, dtype=dtype)

    def key_buffer(self, device: str) -> Any:
        """What get_key_buffer returns: packed bytes come as float8_e4m3fn."""
        kv_buffer = to_framework(self.kv_buffer, "torch", device)
        return kv_buffer if self.cache_format == "dense" else kv_buffer.view(torch.float8_e4m3fn)


def batch(
    pool: Pool, requests: list[int], seq_lens: list[int], topk: int, heads: int, seed: int = 1
) -> dict[str, np.ndarray]:
    """Tokens of requests, each with how much of its request it sees: the arguments of the oracle,
    and the page table and lengths as SGLang makes them."""
    rng = np.random.default_rng(seed)
    page_table = np.full((len(requests), topk), -1, np.int32)
    for token, (request, length) in enumerate(zip(requests, seq_lens, strict=True)):
        chosen = rng.permutation(length)[:topk]
        page_table[token, : len(chosen)] = pool.req_to_token[request, chosen]
    q = rng.standard_normal((len(requests), heads, pool.d_qk), np.float32)
    return {
        "q": q.astype(ml_dtypes.bfloat16),
        "kv_cache": pool.kv_buffer,
        "indices": page_table,
        "topk_lens": np.minimum(seq_lens, topk).astype(np.int32),
        "softmax_scale": SCALE,
        "cache_format": pool.cache_format,
    }


def pair(q: Any) -> tuple[Any, Any]:
    """q_nope as the product over heads leaves it, q_rope as a slice of a wider projection."""
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((*q.shape[:2], 192 + 64), torch.nan, dtype=q.dtype, device=q.device)
    wide[..., 192:] = q[..., 512:]
    return latent, wide[..., 192:]


DECODE = ([0, 1, 2, 3], [1, 700, 64, 130])
# Three requests: all of a prompt, the end of one whose beginning is cached, one token.
EXTEND = ([0] * 70 + [1] * 9 + [2], [*range(1, 71), *range(692, 701), 64])
LENGTHS = [130, 700, 64, 130]


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("lens", [True, False], ids=["lens", "no lens"])
def test_decode(cache_format: str, heads: int, lens: bool, device: str) -> None:
    pool = Pool(LENGTHS, cache_format)
    case = batch(pool, *DECODE, topk=512, heads=heads)
    q, page_table, topk_lens = (
        to_framework(case[name], "torch", device) for name in ("q", "indices", "topk_lens")
    )
    out, lse = adapter.sparse_mla_fwd(
        q,
        pool.key_buffer(device),
        page_table,
        sm_scale=SCALE,
        topk_length=topk_lens if lens else None,
        cache_format=cache_format,
        return_lse=True,
    )
    assert (out.shape, out.dtype) == ((4, heads, 512), torch.bfloat16)
    assert out.is_contiguous()
    assert_close(out, lse, expected(case))
    assert sparse_mla.faults() is None


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("topk", [192, 1024])
def test_extend(cache_format: str, topk: int, device: str) -> None:
    """Prefill, from q in two parts where there are two, with the table as kernels get it, from the
    pool in pages, into memory that is given."""
    pool = Pool(LENGTHS, cache_format)
    case = batch(pool, *EXTEND, topk=topk, heads=4)
    q, page_table, topk_lens = (
        to_framework(case[name], "torch", device) for name in ("q", "indices", "topk_lens")
    )
    key_buffer = pool.key_buffer(device)
    out = torch.full((len(q), 4, 512), torch.nan, dtype=q.dtype, device=device)
    result, lse = adapter.sparse_mla_fwd(
        pair(q) if pool.d_qk == 576 else q,
        key_buffer.view(-1, PAGE, 1, key_buffer.shape[-1]),
        page_table.unsqueeze(1),
        sm_scale=SCALE,
        v_head_dim=512,
        topk_length=topk_lens,
        cache_format=cache_format,
        out=out,
        return_lse=True,
    )
    assert result is out
    assert_close(out, lse, expected(case))


def test_padded_tokens(device: str) -> None:
    """Tokens that fill up the batch of a graph: one entry, slot 0, which holds junk, or none. They
    harm nobody."""
    pool = Pool(LENGTHS, "dense")
    case = batch(pool, *DECODE, topk=256, heads=8)
    padded = {name: np.concatenate([case[name], case[name][:2]]) for name in ("q", "indices")}
    padded["indices"][4:] = 0
    padded["topk_lens"] = np.append(case["topk_lens"], [1, 0]).astype(np.int32)
    arguments = to_framework(padded, "torch", device)
    out, lse = adapter.sparse_mla_fwd(
        arguments["q"],
        pool.key_buffer(device),
        arguments["indices"],
        sm_scale=SCALE,
        topk_length=arguments["topk_lens"],
        return_lse=True,
    )
    assert_close(out[:4], lse[:4], expected(case))
    assert torch.isnan(out[4]).all()
    assert (out[5] == 0).all()
    assert (lse[5] == -torch.inf).all()


def test_slots_that_do_not_exist(device: str) -> None:
    """Stale slots are masked and recorded; nothing is raised."""
    pool = Pool(LENGTHS, "fp8_ds_mla")
    case = batch(pool, *DECODE, topk=256, heads=8)
    case["indices"][1, 7] = len(pool.kv_buffer)
    arguments = to_framework(case, "torch", device)
    out, lse = adapter.sparse_mla_fwd(
        arguments["q"],
        pool.key_buffer(device),
        arguments["indices"],
        sm_scale=SCALE,
        cache_format="fp8_ds_mla",
        return_lse=True,
    )
    if device == "cuda":
        torch.cuda.synchronize()
    assert_close(out, lse, expected(case))
    fault = sparse_mla.faults()
    assert (fault.tensor, fault.position) == ("indices", (1, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", FORMATS)
def test_in_a_graph(cache_format: str) -> None:
    """Captured with one batch, replayed with another."""
    pool = Pool(LENGTHS, cache_format)
    first = batch(pool, *DECODE, topk=512, heads=16)
    second = batch(pool, [3, 2, 1, 0], [5, 33, 600, 0], topk=512, heads=16, seed=2)
    arguments = to_framework(first, "torch", "cuda")
    key_buffer = pool.key_buffer("cuda")

    def call() -> tuple[Any, Any]:
        return adapter.sparse_mla_fwd(
            arguments["q"],
            key_buffer,
            arguments["indices"],
            sm_scale=SCALE,
            topk_length=arguments["topk_lens"],
            cache_format=cache_format,
            return_lse=True,
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for case in (first, second):
        for name in ("q", "indices", "topk_lens"):
            arguments[name].copy_(to_framework(case[name], "torch", "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, lse, expected(case))


def test_errors() -> None:
    pool = Pool([5], "fp8_ds_mla")
    q = torch.zeros((1, 4, 576), dtype=torch.bfloat16)
    slots = torch.zeros((1, 3), dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_format: required"):
        adapter.sparse_mla_fwd(q, pool.key_buffer("cpu"), slots, sm_scale=SCALE)
    with pytest.raises(ValueError, match="topk_lens: expected"):
        adapter.sparse_mla_fwd(
            q,
            pool.key_buffer("cpu"),
            slots,
            sm_scale=SCALE,
            cache_format="fp8_ds_mla",
            topk_length=torch.zeros(2, dtype=torch.int32),
        )


# ------------------------------------------------------------------------------ the plug-in


class Metadata:
    """SGLang's DSAFlashMLAMetadata: what is sliced and copied."""

    def __init__(self, flashmla_metadata: Any, num_splits: Any) -> None:
        self.flashmla_metadata = flashmla_metadata
        self.num_splits = num_splits


class Backend:
    """What the plug-in sees of SGLang's backend; signatures as there."""

    def __init__(self, **attributes: Any) -> None:
        usual = {
            "dsa_prefill_impl": "flashmla_sparse",
            "dsa_decode_impl": "flashmla_kv",
            "dsa_index_kpool": 1,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "device": "cpu",
            "forward_metadata": SimpleNamespace(),
        }
        self.__dict__.update(usual | attributes)

    def _forward_flashmla_sparse(
        self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None, attn_sink=None
    ):
        raise AssertionError("not replaced")

    def _forward_flashmla_kv(
        self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1
    ):
        raise AssertionError("not replaced")

    def _compute_flashmla_metadata(self, cache_seqlens, seq_len_q):
        raise AssertionError("not replaced")


class HookType(Enum):
    AFTER = "after"
    REPLACE = "replace"


class HookRegistry:
    hooks: dict[str, tuple[Any, HookType]]

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> None:
        cls.hooks[target] = (hook, hook_type)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> type:
    """A stand-in for the modules that the plug-in imports; returns the backend's class."""
    backend = type("DeepseekSparseAttnBackend", (Backend,), {})
    HookRegistry.hooks = {}
    attention = {"DeepseekSparseAttnBackend": backend, "DSAFlashMLAMetadata": Metadata}
    modules = {
        "sglang.srt.layers.attention.dsa_backend": attention,
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    }
    for path, contents in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name in modules or name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
            if end > 1:
                parent = sys.modules[".".join(parts[: end - 1])]
                monkeypatch.setattr(parent, parts[end - 1], sys.modules[name], raising=False)
        sys.modules[path].__dict__.update(contents)
    monkeypatch.setenv("SPARSE_MLA_SGLANG", "1")
    return backend


def plug_in(backend: type) -> None:
    """Registers, and applies the hooks as SGLang does."""
    adapter.register()
    for target, (hook, kind) in HookRegistry.hooks.items():
        name = target.rpartition(".")[2]
        original = getattr(backend, name)

        def wrapped(*args: Any, hook=hook, kind=kind, original=original, **kwargs: Any) -> Any:
            if kind is HookType.REPLACE:
                return hook(*args, **kwargs)
            return hook(original(*args, **kwargs), *args, **kwargs)

        setattr(backend, name, wrapped)


@pytest.mark.parametrize("value", [None, "0", ""])
def test_off_unless_asked_for(value: str | None, sglang: type, monkeypatch) -> None:
    monkeypatch.delenv("SPARSE_MLA_SGLANG")
    if value is not None:
        monkeypatch.setenv("SPARSE_MLA_SGLANG", value)
    adapter.register()
    assert HookRegistry.hooks == {}


def test_registers(sglang: type) -> None:
    adapter.register()
    prefix = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend."
    assert {name.removeprefix(prefix) for name in HookRegistry.hooks} == set(adapter.HOOKS)
    assert all(name.startswith(prefix) for name in HookRegistry.hooks)


@pytest.mark.parametrize("cache_format", FORMATS)
def test_calls_of_the_backend(cache_format: str, sglang: type, device: str, caplog) -> None:
    """Decoding from the pool and prefill from rows that SGLang has unpacked, as it calls them."""
    plug_in(sglang)
    pool = Pool(LENGTHS, cache_format)
    with caplog.at_level(logging.INFO):
        backend = sglang(qk_rope_head_dim=pool.d_qk - 512, device=device)
    assert "sparse_mla" in caplog.text
    case = batch(pool, *DECODE, topk=256, heads=8)
    arguments = to_framework(case, "torch", device)
    metadata = SimpleNamespace(dsa_cache_seqlens_int32=arguments["topk_lens"])
    out = backend._forward_flashmla_kv(
        q_all=arguments["q"],
        kv_cache=pool.key_buffer(device),
        sm_scale=SCALE,
        v_head_dim=512,
        layer=SimpleNamespace(),
        metadata=metadata,
        page_table_1=arguments["indices"],
    )
    assert out.shape == (4, 1, 8, 512)
    want = expected(case)
    assert_close(out.squeeze(1), want.lse.astype(np.float32), want)

    slots = np.concatenate([pool.req_to_token[i, :n] for i, n in enumerate(LENGTHS)])
    rows = reference.decode(pool.kv_buffer, cache_format)[slots].astype(ml_dtypes.bfloat16)
    place = {int(slot): i for i, slot in enumerate(slots)} | {-1: -1}
    ragged = case | {
        "kv_cache": rows[:, None],
        "indices": np.vectorize(place.get)(case["indices"]).astype(np.int32),
        "attn_sink": np.linspace(-1, 1, 8, dtype=np.float32),
        "cache_format": "dense",
    }
    arguments = to_framework(ragged, "torch", device)
    for lens in (arguments["topk_lens"], torch.zeros(9, dtype=torch.int32, device=device)):
        out = backend._forward_flashmla_sparse(
            q_all=arguments["q"],
            kv_cache=arguments["kv_cache"],
            page_table_1=arguments["indices"],
            sm_scale=SCALE,
            v_head_dim=512,
            topk_length=lens,
            attn_sink=arguments["attn_sink"],
        )
        want = expected(ragged)
        assert_close(out, want.lse.astype(np.float32), want)


def test_schedule_that_is_sliced_and_copied(sglang: type) -> None:
    plug_in(sglang)
    backend = sglang()
    most = backend._compute_flashmla_metadata(
        cache_seqlens=torch.ones(8, dtype=torch.int32), seq_len_q=1
    )
    few = backend._compute_flashmla_metadata(
        cache_seqlens=torch.ones(3, dtype=torch.int32), seq_len_q=1
    )
    most.flashmla_metadata.copy_(few.flashmla_metadata)
    most.num_splits[: 3 + 1].copy_(few.num_splits)


def test_faults_are_logged_once_a_step(sglang: type, caplog) -> None:
    plug_in(sglang)
    backend = sglang()
    pool = Pool(LENGTHS, "dense")
    arguments = to_framework(batch(pool, *DECODE, topk=64, heads=4), "torch")
    arguments["indices"][2, 3] = 2**31 - 1

    def layer() -> None:
        backend._forward_flashmla_sparse(
            arguments["q"], pool.key_buffer("cpu"), 512, arguments["indices"], SCALE
        )

    for _ in range(3):
        layer()
    assert caplog.text.count("masked") == 0
    for _ in range(2):
        backend.forward_metadata = SimpleNamespace()
        for _ in range(3):
            layer()
    assert caplog.text.count("masked: indices[2, 3] = 2147483647") == 2
    sparse_mla.faults()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"dsa_prefill_impl": "fa3"}, "--dsa-prefill-backend .* got fa3"),
        ({"dsa_decode_impl": "trtllm"}, "--dsa-decode-backend .* got trtllm"),
        ({"kv_lora_rank": 256}, "kv_lora_rank 512 .* got 256 and 64"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim 64 or 0, got 512 and 32"),
        ({"dsa_index_kpool": 4}, "index_kpool 4"),
    ],
)
def test_refused_at_the_start(attributes: dict[str, Any], message: str, sglang: type) -> None:
    plug_in(sglang)
    with pytest.raises(ValueError, match=message):
        sglang(**attributes)


def test_another_sglang(sglang: type, monkeypatch) -> None:
    monkeypatch.setattr(sglang, "_forward_flashmla_kv", lambda self, q, kv: None)
    with pytest.raises(SystemExit, match=r"_forward_flashmla_kv: expected .* got self, q, kv"):
        adapter.register()
    monkeypatch.setattr(sglang, "_forward_flashmla_kv", None)
    with pytest.raises(SystemExit, match=r"_forward_flashmla_kv: .* got no such method"):
        adapter.register()
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    with pytest.raises(SystemExit, match="no DSA backend or no plug-in hooks"):
        adapter.register()
    assert HookRegistry.hooks == {}


@pytest.fixture
def real_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend of the installed SGLang, without a server, into which its own plug-in system has
    put the hooks."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    dsa_backend = pytest.importorskip(
        "sglang.srt.layers.attention.dsa_backend", exc_type=ImportError
    )
    from sglang.srt.plugins.hook_registry import HookRegistry as Registry

    backend = dsa_backend.DeepseekSparseAttnBackend
    for name in adapter.HOOKS:
        monkeypatch.setattr(backend, name, getattr(backend, name))
    monkeypatch.setenv("SPARSE_MLA_SGLANG", "1")
    adapter.register()
    Registry.apply_hooks()
    Registry.reset()
    made = object.__new__(backend)
    made.__dict__.update(
        dsa_index_kpool=1,
        dsa_kv_cache_store_fp8=False,
        dsa_topk_backend=dsa_backend.DSATopKBackend.SGL_KERNEL,
        hisparse_coordinator=None,
        use_fused_topk=True,
        use_mha=False,
    )
    return made


@pytest.mark.parametrize("name", ["flashmla_sparse", "flashmla_kv"])
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("phase", ["decode", "extend"])
def test_the_real_sglang(
    phase: str, cache_format: str, name: str, real_backend: Any, device: str
) -> None:
    """Its backend's own way from a layer's call to the kernel."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    pool = Pool(LENGTHS, cache_format)
    case = batch(pool, *(DECODE if phase == "decode" else EXTEND), topk=192, heads=8)
    arguments = to_framework(case, "torch", device)
    real_backend.__dict__.update(
        dsa_prefill_impl=name,
        dsa_decode_impl=name,
        qk_rope_head_dim=pool.d_qk - 512,
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda layer: pool.key_buffer(device)),
        forward_metadata=SimpleNamespace(dsa_cache_seqlens_int32=arguments["topk_lens"]),
    )
    layer = SimpleNamespace(
        is_cross_attention=False,
        tp_q_head_num=8,
        head_dim=pool.d_qk,
        v_head_dim=512,
        scaling=SCALE,
        layer_id=0,
    )
    mode = ForwardMode.DECODE if phase == "decode" else ForwardMode.EXTEND
    out = getattr(real_backend, f"forward_{phase}")(
        arguments["q"].flatten(1),
        None,
        None,
        layer,
        SimpleNamespace(forward_mode=mode),
        topk_indices=arguments["indices"],
    )
    want = expected(case)
    assert_close(out.view(-1, 8, 512), want.lse.astype(np.float32), want)
    metadata = real_backend._compute_flashmla_metadata(arguments["topk_lens"], 1)
    metadata.slice(slice(0, len(want.lse) + 1)).copy_(metadata)
