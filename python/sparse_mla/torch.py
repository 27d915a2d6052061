"""``attend`` under ``torch.compile``: importing this module registers it as operators.

::

    import sparse_mla.torch

    @torch.compile(fullgraph=True)
    def layer(q, kv_cache, indices):
        return sparse_mla.attend(q, kv_cache, indices, softmax_scale=1 / 16)

A compiler cannot look into a C function, so that ``sparse_mla.attend`` in a function that is being
traced stands for one of two operators with flat arguments, whose shapes the compiler knows:

- ``torch.ops.sparse_mla.attend`` returns new ``out`` and ``lse``;
- ``torch.ops.sparse_mla.attend_out`` writes ``out``, ``lse`` and ``max_logits`` that are given, and
  returns nothing.

Both launch on the current stream; ``stream=`` cannot be traced. There is no gradient. Calls outside
a compiled function are what they were: they go to C and not through these operators.
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_mla import _core

__all__: list[str] = []

# The arguments of both operators, as torch.library spells them. q's rope part stands apart, since
# an operator takes no pairs.
_ARGUMENTS = """
    Tensor q, Tensor? q_rope, Tensor kv_cache, Tensor? indices, *, float softmax_scale,
    str? cache_format=None, SymInt? head_dim_v=None, Tensor? block_table=None,
    Tensor? request_ids=None, Tensor? seq_lens=None, Tensor? query_positions=None,
    SymInt[]? shard=None, SymInt? max_seq_len=None, Tensor? topk_lens=None,
    Tensor? attn_sink=None, float logit_cap=0.0, float? cache_scale=None,
    Tensor? extra_kv_cache=None, Tensor? extra_indices=None, Tensor? extra_topk_lens=None,
    str? extra_cache_format=None, float? extra_cache_scale=None, Tensor? extra_block_table=None,
    Tensor? extra_seq_lens=None, str validate='deferred', bool batch_invariant=False
"""
_OUTPUTS = "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits=None"

_library = torch.library.Library("sparse_mla", "DEF")
_library.define(f"attend({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(f"attend_out({_ARGUMENTS}, {_OUTPUTS}) -> ()")


def _head_dim_v(q: Any, q_rope: Any, head_dim_v: Any) -> Any:
    """The d_v of a call: what ``attend`` takes where none is given."""
    if head_dim_v is not None:
        return head_dim_v
    d_qk = q.shape[-1] + (q_rope.shape[-1] if q_rope is not None else 0)
    if d_qk not in (576, 512):
        raise ValueError(
            f"head_dim_v: required where d_qk is neither 576 nor 512, got none with d_qk = {d_qk}"
        )
    return 512


def _run(q: Any, q_rope: Any, kv_cache: Any, indices: Any, **keywords: Any) -> Any:
    return _core.attend(q if q_rope is None else (q, q_rope), kv_cache, indices, **keywords)


def _attend_out(*arguments: Any, **keywords: Any) -> None:
    _run(*arguments, **keywords)


for _key in ("CPU", "CUDA"):
    _library.impl("attend", _run, _key)
    _library.impl("attend_out", _attend_out, _key)


@torch.library.register_fake("sparse_mla::attend", lib=_library)
def _(q: Any, q_rope: Any, kv_cache: Any, indices: Any, **keywords: Any) -> Any:
    rows = q.shape[:-1]
    d_v = _head_dim_v(q, q_rope, keywords.get("head_dim_v"))
    return q.new_empty((*rows, d_v)), q.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("sparse_mla::attend_out", lib=_library)
def _(*arguments: Any, **keywords: Any) -> None:
    return None


def _below_autograd(operator: Any) -> Any:
    """An operator without a gradient, which says so before it runs, as C does."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            for each in (*arguments, *keywords.values()):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    raise BufferError(
                        "sparse_mla.attend: a tensor requires grad, and this function has no "
                        "gradient; pass its .detach(), or call it under torch.no_grad()"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments, **keywords)

    return call


_library.impl("attend", _below_autograd(torch.ops.sparse_mla.attend), "Autograd")
_library.impl("attend_out", _below_autograd(torch.ops.sparse_mla.attend_out), "Autograd")


@torch.compiler.substitute_in_graph(_core.attend, skip_signature_check=True)
def _traced(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    out: Any = None,
    lse: Any = None,
    max_logits: Any = None,
    stream: Any = None,
    **keywords: Any,
) -> Any:
    """What a compiler reads in the place of ``sparse_mla.attend``."""
    if stream is not None:
        raise ValueError("stream: expected None in a compiled function, which has one stream")
    q, q_rope = q if isinstance(q, (tuple, list)) else (q, None)
    if out is None and lse is None and max_logits is None:
        return torch.ops.sparse_mla.attend(q, q_rope, kv_cache, indices, **keywords)
    rows = q.shape[:-1]
    if out is None:
        d_v = _head_dim_v(q, q_rope, keywords.get("head_dim_v"))
        out = q.new_empty((*rows, d_v))
    if lse is None:
        lse = q.new_empty(rows, dtype=torch.float32)
    torch.ops.sparse_mla.attend_out(
        q, q_rope, kv_cache, indices, **keywords, out=out, lse=lse, max_logits=max_logits
    )
    return out, lse
