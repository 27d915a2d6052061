"""The one call that a layer makes in a step. It needs PyTorch's tensors and nothing of vLLM.

Its arguments are what vLLM hands to an implementation's ``forward_mqa``: the metadata is any object
with ``block_table`` (requests, blocks), ``req_id_per_token`` (at least T), ``seq_lens`` (requests,)
and ``cp_kv_cache_interleave_size``.
"""

from __future__ import annotations

from typing import Any

import sparse_mla

__all__ = ["LATENT", "forward_mqa"]

LATENT = 512  # numbers of a cache row that are its value
PACKED_LATENT = 528  # bytes of a packed row before its rope: 512 e4m3 and 4 scales


def forward_mqa(
    q: Any,
    kv_cache: Any,
    topk_indices: Any,
    metadata: Any,
    *,
    scale: float,
    kv_cache_dtype: str = "auto",
    dcp: tuple[int, int] = (0, 1),
    logit_cap: float = 0.0,
    batch_invariant: bool = False,
) -> tuple[Any, Any]:
    """The attention of T query rows, of decoding and prefilling requests alike.

    Parameters
    ----------
    q : (T, heads, 576 or 512), or a pair of (T, heads, 512) and (T, heads, 64 or 0), bfloat16
        As many heads as there are: under context parallelism those of all ranks of the group.
    kv_cache : (blocks, block_size, row)
        Rows of q's dtype, or of 656 bytes where `kv_cache_dtype` is "fp8_ds_mla"; any block stride.
    topk_indices : (at least T, topk), int32
        Positions within the request, -1 anywhere; global ones under context parallelism.
    metadata : see above
    scale : float
    dcp : (rank, size)
        Of decode context parallelism: which positions this rank's cache and block table hold.

    Returns
    -------
    out : (T, heads, 512), q's dtype
    lse : (T, heads), float32
        Natural logarithm; -inf (and out = 0) for a row none of whose entries this rank holds.
    """
    if isinstance(q, tuple) and not q[1].shape[-1]:
        q = q[0]
    latent = q[0] if isinstance(q, tuple) else q
    rows = latent.shape[0]
    cache_format = "dense"
    if kv_cache_dtype == "fp8_ds_mla":
        cache_format = "fp8_ds_mla"
        if latent is q and latent.shape[-1] == LATENT:
            # A model without rope has the same rows, with zeros in the place of the rope.
            kv_cache, cache_format = kv_cache[..., :PACKED_LATENT], "fp8_ds_mla_norope"
    rank, size = dcp
    return sparse_mla.attend(
        q,
        kv_cache,
        topk_indices[:rows],
        softmax_scale=scale,
        cache_format=cache_format,
        head_dim_v=LATENT,
        block_table=metadata.block_table,
        request_ids=metadata.req_id_per_token[:rows],
        seq_lens=metadata.seq_lens,
        shard=(rank, size, metadata.cp_kv_cache_interleave_size) if size > 1 else None,
        logit_cap=logit_cap,
        validate="record",
        batch_invariant=batch_invariant,
    )
