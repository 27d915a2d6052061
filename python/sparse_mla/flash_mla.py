"""The sparse functions of FlashMLA under their own names and signatures, on any device of ours.

::

    from sparse_mla.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Code that calls the public library (as of April 2026) changes its import and nothing else: the same
arguments, defaults, shapes, masks and results. What is wider here: any GPU from compute capability
8.0 on and the CPU, any number of heads, any top-k, any page size, and no metadata that belongs to
one set of shapes. What is not here: the dense decoding kernel and the dense functions for training,
which are no sparse attention, and the 512-wide packed cache of later models.

Entries that are invalid (-1, any other negative number, anything past the cache) are masked
silently, and a row without a valid entry gets out = 0 and lse = +inf, as there. `sparse_mla.attend`
is the same operation without these conventions: it names bad entries, and empty rows have -inf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sparse_mla._core import attend_for_flash_mla

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Stands for the tile scheduler's metadata, of which nothing is needed: launches are planned
    from the shapes of each call."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None) for `flash_mla_with_kvcache`, whatever the arguments."""
    return FlashMLASchedMeta(), None


def _one_head(tensor: torch.Tensor, dimension: int, name: str) -> torch.Tensor:
    """The tensor without its dimension of key-value heads, of which there is one."""
    if tensor.dim() <= dimension or tensor.shape[dimension] != 1:
        raise ValueError(
            f"{name}: expected one key-value head in dimension {dimension}, got shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.squeeze(dimension)


def _cache(cache: torch.Tensor, name: str) -> torch.Tensor:
    """(num_blocks, page_block_size, 656) bytes of a cache that came as bytes of any dtype."""
    if cache.dtype not in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        raise TypeError(
            f"{name}: expected float8_e4m3fn, int8 or uint8, got {str(cache.dtype)[6:]}"
        )
    return _one_head(cache.view(torch.uint8), 2, name)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decoding over a packed cache.

    Parameters
    ----------
    q : (batch, s_q, heads, 576), bfloat16
    k_cache : (num_blocks, page_block_size, 1, 656), float8_e4m3fn, int8 or uint8
        `fp8_ds_mla` rows: 512 e4m3 numbers, their 4 float32 scales, 64 bfloat16 numbers. Any block
        stride.
    block_table, cache_seqlens
        Ignored, as there: `indices` hold slots already.
    head_dim_v : 512
    tile_scheduler_metadata : the first result of `get_mla_metadata`
    num_splits : None
    softmax_scale : float
        None: 576 ** -0.5.
    causal : False
    is_fp8_kvcache : True
    indices : (batch, s_q, topk), int32
        block * page_block_size + offset.
    attn_sink : (heads,), float32
    extra_k_cache, extra_indices_in_kvcache
        A second cache and the slots in it, joined into the same softmax.
    topk_length, extra_topk_length : (batch,), int32
        Entries past it are ignored.

    Returns
    -------
    out : (batch, s_q, heads, 512), bfloat16
    lse : (batch, heads, s_q), float32
        Natural logarithm, without the sink; +inf for a row without valid entries.

    Raises NotImplementedError for what only the other library has (dense decoding, the 512-wide
    packed cache); otherwise what `sparse_mla.attend` raises.
    """
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata: expected the first result of get_mla_metadata(), got "
            f"{type(tile_scheduler_metadata).__name__}"
        )
    if num_splits is not None:
        raise ValueError(f"num_splits: expected None, got {num_splits!r}")
    if indices is None:
        raise NotImplementedError(
            "indices: expected a tensor, got None: dense decoding is not part of sparse_mla"
        )
    if causal:
        raise ValueError("causal: expected False with indices, got True")
    if not is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache: expected True with indices, got False")
    if q.shape[-1] != 576:
        raise NotImplementedError(
            f"q: expected (batch, s_q, heads, 576), got {tuple(q.shape)}: of the packed caches the "
            "one with 656 bytes a token is served"
        )
    extra: dict[str, Any] = {}
    if extra_k_cache is not None:
        extra = {
            "extra_kv_cache": _cache(extra_k_cache, "extra_k_cache"),
            "extra_cache_format": "fp8_ds_mla",
            "extra_indices": extra_indices_in_kvcache,
            "extra_topk_lens": extra_topk_length,
        }
    elif extra_indices_in_kvcache is not None or extra_topk_length is not None:
        raise ValueError(
            "extra_k_cache: required with extra_indices_in_kvcache or extra_topk_length, got none"
        )
    out, lse = attend_for_flash_mla(
        q,
        _cache(k_cache, "k_cache"),
        indices,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        cache_format="fp8_ds_mla",
        head_dim_v=head_dim_v,
        topk_lens=topk_length,
        attn_sink=attn_sink,
        validate="mask",
        **extra,
    )
    tile_scheduler_metadata.have_initialized = True
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill over rows that are not packed.

    Parameters
    ----------
    q : (s_q, heads, d_qk), bfloat16 (here also float16 and float32)
    kv : (s_kv, 1, d_qk), q's dtype
    indices : (s_q, 1, topk), int32
        Rows of kv; invalid are negative numbers and those from s_kv on.
    sm_scale : float
    d_v : int
        The first numbers of a row that are its value.
    attn_sink : (heads,), float32
    topk_length : (s_q,), int32
        Entries past it are ignored.

    Returns
    -------
    out : (s_q, heads, d_v), q's dtype
    max_logits : (s_q, heads), float32
        The largest scaled score; -inf for a row without valid entries.
    lse : (s_q, heads), float32
        Natural logarithm, without the sink; +inf for a row without valid entries.
    """
    max_logits = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    out, lse = attend_for_flash_mla(
        q,
        _one_head(kv, 1, "kv"),
        _one_head(indices, 1, "indices"),
        softmax_scale=sm_scale,
        head_dim_v=d_v,
        topk_lens=topk_length,
        attn_sink=attn_sink,
        max_logits=max_logits,
        validate="mask",
    )
    return out, max_logits, lse
