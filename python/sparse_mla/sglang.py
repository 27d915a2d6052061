"""The sparse attention of DeepSeek-V3.2 and GLM-5 models inside SGLang.

`sparse_mla_fwd` has the shape of the kernels that SGLang's DSA backend calls (query, flat cache,
slot table, lengths → out), and takes its tensors as they lie in its memory: nothing is copied,
padded or unpacked on the way.

The rest of this file is a plug-in for SGLang's own plug-in system (the entry point group
``sglang.srt.plugins``), which puts that function into the place of two of the backend's kernels.
It is off unless the environment says otherwise, and leaving the variable unset undoes it::

    SPARSE_MLA_SGLANG=1 python -m sglang.launch_server --kv-cache-dtype bfloat16 \\
        --dsa-prefill-backend flashmla_sparse --dsa-decode-backend flashmla_sparse ...
    SPARSE_MLA_SGLANG=1 python -m sglang.launch_server --kv-cache-dtype fp8_e4m3 \\
        --dsa-prefill-backend flashmla_kv --dsa-decode-backend flashmla_kv ...

The two names stay those of FlashMLA's functions, since SGLang has no name for a kernel that it does
not know; the log says who runs. A server that cannot work so ends when it starts. The indexer,
which selects the entries, stays SGLang's own and needs what it needs: DeepGEMM.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sparse_mla import _core

__all__ = ["register", "sparse_mla_fwd"]

logger = logging.getLogger(__name__)


def sparse_mla_fwd(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    page_table_1: torch.Tensor,
    *,
    sm_scale: float,
    v_head_dim: int = 512,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    cache_format: str | None = None,
    cache_scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over SGLang's flat cache, for prefill and decoding alike.

    Parameters
    ----------
    q : (tokens, heads, 576) or (tokens, heads, 512), bfloat16 or float16
        Or the pair q_nope (tokens, heads, 512), q_rope (tokens, heads, 64) before it is
        concatenated. Any number of heads, any strides.
    kv_cache : (num_slots, 1, width)
        What a pool's get_key_buffer returns: rows of q's dtype, or packed bytes as float8_e4m3fn
        or uint8. A view in pages, (num_pages, page_size, 1, width), is the same cache.
    page_table_1 : (tokens, topk) or (tokens, 1, topk), int32
        Slots, as a page table of page size 1 has them; -1 is padding. Any width.
    sm_scale : float
        layer.scaling.
    v_head_dim : int
    topk_length : (tokens,), int32
        Entries of page_table_1 past it are ignored; SGLang's dsa_cache_seqlens_int32.
    attn_sink : (heads,), float32
    logit_cap : float
    cache_format : str
        Of packed bytes: "fp8_ds_mla" (656 bytes a token), "fp8_ds_mla_norope" (528, models without
        rope), "fp8_tensor" (576 numbers without scales of their own, under one `cache_scale`).
    out : (tokens, heads, v_head_dim)
        Written and returned where given.

    Returns
    -------
    out (tokens, heads, v_head_dim) of q's dtype, 0 for a token without entries; with `return_lse`
    also lse (tokens, heads), float32, the natural logarithm, -inf for such a token.

    A slot that does not exist is masked and recorded: `sparse_mla.faults` tells of it. Slots that
    no entry names, slot 0 among them, may hold anything. Raises what `sparse_mla.attend` raises.
    """
    if page_table_1.dim() == 3:
        page_table_1 = page_table_1.squeeze(1)
    out, lse = _core.attend(
        q,
        kv_cache,
        page_table_1,
        softmax_scale=sm_scale,
        cache_format=cache_format,
        cache_scale=cache_scale,
        head_dim_v=v_head_dim,
        topk_lens=topk_length,
        attn_sink=attn_sink,
        logit_cap=logit_cap,
        out=out,
        validate="record",
    )
    return (out, lse) if return_lse else out


# ------------------------------------------------------------------------------ the plug-in

MODULE = "sglang.srt.layers.attention.dsa_backend"
BACKEND = "DeepseekSparseAttnBackend"
SERVED = {
    "prefill": ("flashmla_sparse", "flashmla_kv", "flashmla_auto"),
    "decode": ("flashmla_sparse", "flashmla_kv"),
}


def _cache_format(backend: Any, kv_cache: torch.Tensor) -> str:
    """The name of a cache's format. A prefill may come with rows that SGLang has unpacked already,
    whatever its pool holds."""
    if kv_cache.dtype.itemsize > 1:
        return "dense"
    return "fp8_ds_mla" if backend.qk_rope_head_dim else "fp8_ds_mla_norope"


def _log_faults(backend: Any, device: torch.device) -> None:
    """A warning for what earlier steps have recorded, once a step at most: all layers of a step
    share its metadata. Steps that are replayed from a graph are reported by the next that is not.
    """
    metadata = getattr(backend, "forward_metadata", None)
    if metadata is getattr(backend, "_sparse_mla_step", None):
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    backend._sparse_mla_step = metadata
    fault = _core.faults(device)
    if fault is not None:
        logger.warning("sparse_mla: masked: %s", fault)


def _flashmla_sparse(
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """In the place of _forward_flashmla_sparse: (tokens, heads, v_head_dim)."""
    _log_faults(self, q_all.device)
    if topk_length is not None and topk_length.shape[0] != q_all.shape[0]:
        topk_length = None  # lengths of a padded batch; behind a row's entries stands -1 anyway
    return sparse_mla_fwd(
        q_all,
        kv_cache,
        page_table_1,
        sm_scale=sm_scale,
        v_head_dim=v_head_dim,
        topk_length=topk_length,
        attn_sink=attn_sink,
        cache_format=_cache_format(self, kv_cache),
    )


def _flashmla_kv(
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: torch.Tensor,
) -> torch.Tensor:
    """In the place of _forward_flashmla_kv: (tokens, 1, heads, v_head_dim)."""
    _log_faults(self, q_all.device)
    return sparse_mla_fwd(
        q_all,
        kv_cache,
        page_table_1,
        sm_scale=sm_scale,
        v_head_dim=v_head_dim,
        cache_format=_cache_format(self, kv_cache),
    ).unsqueeze(1)


def _flashmla_metadata(self: Any, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
    """In the place of _compute_flashmla_metadata: nothing is scheduled ahead, but SGLang slices
    and copies what it gets."""
    from sglang.srt.layers.attention.dsa_backend import DSAFlashMLAMetadata

    return DSAFlashMLAMetadata(
        flashmla_metadata=cache_seqlens.new_zeros(1),
        num_splits=cache_seqlens.new_zeros(cache_seqlens.shape[0] + 1),
    )


def _accept(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """After a backend is made: ends the start of a server that could not work."""
    for phase, served in SERVED.items():
        name = getattr(self, f"dsa_{phase}_impl")
        if name not in served:
            raise ValueError(
                f"SPARSE_MLA_SGLANG: expected --dsa-{phase}-backend {' or '.join(served)}, whose "
                f"place sparse_mla takes, got {name}"
            )
    if self.kv_lora_rank != 512 or self.qk_rope_head_dim not in (0, 64):
        raise ValueError(
            "SPARSE_MLA_SGLANG: expected kv_lora_rank 512 and qk_rope_head_dim 64 or 0, got "
            f"{self.kv_lora_rank} and {self.qk_rope_head_dim}"
        )
    if self.dsa_index_kpool > 1:
        raise ValueError(
            "SPARSE_MLA_SGLANG: expected a model whose indexer scores every token, got "
            f"index_kpool {self.dsa_index_kpool}, which SGLang has other kernels for"
        )
    device = torch.device(self.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    _core.load(device)
    logger.info("sparse_mla %s runs the attention of %s", _core.__version__, BACKEND)


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "__init__": (_accept, "AFTER"),
    "_forward_flashmla_sparse": (_flashmla_sparse, "REPLACE"),
    "_forward_flashmla_kv": (_flashmla_kv, "REPLACE"),
    "_compute_flashmla_metadata": (_flashmla_metadata, "REPLACE"),
}


def _check_installed(backend: type) -> None:
    """Whether the methods to be replaced are those that this file was written for."""
    for name, (hook, kind) in HOOKS.items():
        if kind != "REPLACE":
            continue
        wanted = list(inspect.signature(hook).parameters)
        method = getattr(backend, name, None)
        got = list(inspect.signature(method).parameters) if method else None
        if got != wanted:
            raise SystemExit(
                f"SPARSE_MLA_SGLANG: the installed SGLang is not one that sparse_mla.sglang can "
                f"plug into: {BACKEND}.{name}: expected the parameters {', '.join(wanted)}, got "
                f"{', '.join(got) if got else 'no such method'}"
            )


def register() -> None:
    """The entry point of the group ``sglang.srt.plugins``: hooks for the DSA backend, where the
    environment variable SPARSE_MLA_SGLANG is 1; otherwise nothing.

    SGLang only logs what a plug-in raises and serves without it. Who set the variable asked for
    more than that: an SGLang that this file was not written for ends the process (SystemExit).
    """
    if os.environ.get("SPARSE_MLA_SGLANG") != "1":
        return
    try:
        from sglang.srt.layers.attention import dsa_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        raise SystemExit(
            f"SPARSE_MLA_SGLANG: no DSA backend or no plug-in hooks: {error}"
        ) from error
    _check_installed(getattr(dsa_backend, BACKEND))
    for name, (hook, kind) in HOOKS.items():
        HookRegistry.register(f"{MODULE}.{BACKEND}.{name}", hook, getattr(HookType, kind))
