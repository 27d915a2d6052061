"""`attend` as the attention of GLM-5 and DeepSeek-V3.2 models of the transformers package.

::

    import sparse_mla.transformers

    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16)
    sparse_mla.transformers.enable(model)
    model.generate(...)
    sparse_mla.transformers.disable(model)

The models' own attention expands every cached token into keys and values of all heads, at every
step, and hides what the indexer did not select. `enable` gives each attention layer of one model
another forward, which stays with the latent: the key half of kv_b_proj is absorbed into the
queries, `attend` reads the selected tokens from the cache, the value half follows. Prefill and
decoding are the same call. Everything else stays the model's: projections, rotation, the indexer
and its keys, GLM's layers that reuse the selection of an earlier one.

The cache stays the one of transformers, of any class, in another layout. A layer's `keys` are
(batch, 1, tokens, row): the normalised latent and the rotated key of a token side by side, in the
model's dtype or as bytes of a packed format; its `values` are (batch, 1, tokens, 0). A cache that
was filled with one layout cannot be continued with the other.

A model is a thing of one thread while it is enabled or disabled. There is no gradient.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import transformers

import sparse_mla
import sparse_mla.torch  # so that a compiler can trace the call of attend

__all__ = ["disable", "enable", "enabled"]

# model_type: the attention class in transformers.models.<model_type>.modeling_<model_type>.
SERVED = {"deepseek_v32": "DeepseekV32Attention", "glm_moe_dsa": "GlmMoeDsaAttention"}

# What the forward below reads of an attention layer, and how it and its indexer are called.
ATTRIBUTES = (
    "config",
    "layer_idx",
    "attention_dropout",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "scaling",
    "indexer",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)
PARAMETERS = ("hidden_states", "position_embeddings", "attention_mask", "position_ids")
INDEXER_PARAMETERS = (*PARAMETERS, "q_resid")
CACHE_PARAMETERS = ("cache", "past_key_values")

MASKS = ("eager", "sdpa")  # the implementations that models make a mask of all tokens for
FORMATS = ("dense", "fp8_ds_mla")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Layer:
    """What an attention layer with another forward has to remember."""

    rotate: Callable[..., Any]  # the model's rotation of queries and keys
    indexer_cache: str  # the name of the indexer's argument for the cache
    returns_topk: bool  # the next layer may reuse the selection
    cache_format: str
    attribute: str  # where the forward was put
    before: Any  # what was there; None: nothing, the class had it


def enable(model: torch.nn.Module, *, cache_format: str = "dense") -> None:
    """Makes the attention layers of `model` use `sparse_mla.attend`, until `disable`.

    Parameters
    ----------
    model : torch.nn.Module
        A glm_moe_dsa or deepseek_v32 model, or a module that contains one; with or without its
        language-model head, on the CPU or on GPUs. Only this instance changes.
    cache_format : str
        "dense": rows in the model's dtype, bfloat16, float16 or float32. "fp8_ds_mla": 656 bytes a
        token and layer, for models with a latent of 512 and a rotated key of 64 numbers; the
        latent is rounded to e4m3 with a scale for each 128 numbers.

    Raises, before anything is changed:

    - TypeError for a model without attention layers of these classes, and for a `kv_b_proj` that is
      no plain torch.nn.Linear with floating-point weights (quantised, adapted, sharded, offloaded);
    - ValueError for a model that is enabled already, for an attention implementation other than
      "eager" and "sdpa", for `output_attentions` in the configuration, for a forward that someone
      else has replaced, and for a cache format that does not fit;
    - sparse_mla.UnsupportedError for a release of transformers whose classes do not fit, and for a
      GPU that this build does not serve.

    During a call of the model ValueError is raised for attention dropout in training, for
    `output_attentions`, for a cache of another layout and for tensors that require grad, TypeError
    for a cache that is no transformers.Cache.
    """
    layers = _layers(model)
    if any(hasattr(layer, "_sparse_mla") for layer in layers.values()):
        raise ValueError("model: expected a model that is not enabled, got one that is")
    fitted = {name: _fit(name, layer, cache_format) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer._sparse_mla = fitted[name]
        setattr(layer, fitted[name].attribute, MethodType(_forward, layer))


def disable(model: torch.nn.Module) -> None:
    """Gives the attention layers of `model` their own forward back.

    ValueError where `model` is not enabled.
    """
    layers = [layer for layer in _layers(model).values() if hasattr(layer, "_sparse_mla")]
    if not layers:
        raise ValueError("model: expected a model that is enabled, got one that is not")
    for layer in layers:
        fitted = layer._sparse_mla
        delattr(layer, fitted.attribute)
        if fitted.before is not None:
            setattr(layer, fitted.attribute, fitted.before)
        del layer._sparse_mla


@contextlib.contextmanager
def enabled(model: torch.nn.Module, *, cache_format: str = "dense") -> Iterator[None]:
    """Within the context the model is enabled; the arguments are those of `enable`."""
    enable(model, cache_format=cache_format)
    try:
        yield
    finally:
        disable(model)


# ------------------------------------------------------------------------- what fits and what not


def _layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The attention layers of the models that are served, by name."""
    served = {
        (f"transformers.models.{name}.modeling_{name}", kind) for name, kind in SERVED.items()
    }
    layers = {
        name: module
        for name, module in model.named_modules()
        if (type(module).__module__, type(module).__name__) in served
    }
    if not layers:
        raise TypeError(
            f"model: expected a model with layers of transformers' {' or '.join(SERVED.values())}, "
            f"got {type(model).__name__}"
        )
    return layers


def _fit(name: str, layer: torch.nn.Module, cache_format: str) -> _Layer:
    """What the layer needs for the forward below; raises where it does not fit."""
    signature = inspect.signature(type(layer).forward).parameters
    rotate = getattr(sys.modules[type(layer).__module__], "apply_rotary_pos_emb_interleave", None)
    missing = [each for each in ATTRIBUTES if not hasattr(layer, each)]
    missing += [f"forward({each})" for each in PARAMETERS if each not in signature]
    if not any(each in signature for each in CACHE_PARAMETERS):
        missing.append("forward(cache)")
    if rotate is None:
        missing.append("apply_rotary_pos_emb_interleave")
    if not hasattr(transformers.Cache, "update_indexer"):
        missing.append("Cache.update_indexer")
    indexer_cache = CACHE_PARAMETERS[0]
    if getattr(layer, "indexer", None) is not None:
        parameters = inspect.signature(type(layer.indexer).forward).parameters
        missing += [f"indexer.forward({p})" for p in INDEXER_PARAMETERS if p not in parameters]
        known = [each for each in CACHE_PARAMETERS if each in parameters]
        if known:
            indexer_cache = known[0]
        else:
            missing.append("indexer.forward(cache)")
    if missing:
        raise sparse_mla.UnsupportedError(
            f"{name}: {type(layer).__name__} of transformers {transformers.__version__} does not "
            f"fit: it has no {', '.join(missing)}; releases from 5.11 on have them"
        )

    _check_implementation(layer)
    _check_weights(name, layer)
    if getattr(layer.config, "output_attentions", False):
        raise ValueError(
            "config.output_attentions: expected False, got True: attention weights are never formed"
        )

    d_qk = layer.kv_lora_rank + layer.qk_rope_head_dim
    if cache_format not in FORMATS or (
        cache_format != "dense" and (layer.kv_lora_rank, layer.qk_rope_head_dim) != (512, 64)
    ):
        raise ValueError(
            f"cache_format: expected 'dense', or 'fp8_ds_mla' for rows of 512 + 64 numbers, got "
            f"{cache_format!r} for rows of {layer.kv_lora_rank} + {layer.qk_rope_head_dim}"
        )
    weight = layer.kv_b_proj.weight
    device = str(weight.device)
    sparse_mla.load(device)
    sparse_mla.plan(
        batch=1,
        heads=len(weight) // (layer.qk_nope_head_dim + layer.v_head_dim),
        topk=layer.config.index_topk,
        d_qk=d_qk,
        d_v=layer.kv_lora_rank,
        dtype=str(weight.dtype)[6:],
        cache_format=cache_format,
        device=device,
    )

    # The package accelerate puts a hook around the forward that it keeps in _old_forward.
    attribute = "_old_forward" if hasattr(layer, "_hf_hook") else "forward"
    before = vars(layer).get(attribute)
    if before is not None and attribute == "forward":
        raise ValueError(
            f"{name}.forward: expected {type(layer).__name__}'s own, got one that was replaced: "
            f"{before!r}"
        )
    return _Layer(
        rotate=rotate,
        indexer_cache=indexer_cache,
        returns_topk="prev_topk_indices" in signature,
        cache_format=cache_format,
        attribute=attribute,
        before=before,
    )


def _check_implementation(layer: torch.nn.Module) -> None:
    """Other implementations get other masks, or none."""
    implementation = layer.config._attn_implementation
    if implementation not in MASKS:
        raise ValueError(
            f"attn_implementation: expected {' or '.join(map(repr, MASKS))}, whose mask says what "
            f"is hidden, got {implementation!r}"
        )


def _check_weights(name: str, layer: torch.nn.Module) -> None:
    """The two halves of kv_b_proj are read as what they are, so nothing may stand in between."""
    projection = layer.kv_b_proj
    weight = getattr(projection, "weight", None)
    if (
        type(projection) is torch.nn.Linear
        and type(weight) in (torch.nn.Parameter, torch.Tensor)
        and type(weight.data) is torch.Tensor
        and weight.dtype in DTYPES
        and weight.device.type in ("cpu", "cuda")
        and projection.bias is None
    ):
        return
    got = type(projection).__name__
    if weight is not None:
        kind = type(weight.data).__name__
        got += f" with a {kind} of {str(weight.dtype)[6:]} on {weight.device}"
    if getattr(projection, "bias", None) is not None:
        got += " and a bias"
    raise TypeError(
        f"{name}.kv_b_proj: expected a plain torch.nn.Linear with bfloat16, float16 or float32 "
        f"weights on the CPU or a CUDA device and no bias, got {got}; load the model with this "
        "layer not quantised, adapted, sharded or offloaded"
    )


# -------------------------------------------------------------------------------------- the forward


def _forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    prev_topk_indices: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The forward of an attention layer: (batch, tokens, hidden) in and out.

    Where the layer's own forward returns attention weights, None is returned.
    """
    layer: _Layer = self._sparse_mla
    _check_call(self, attention_mask, keywords)
    cache = keywords.get("cache", keywords.get("past_key_values"))
    batch, tokens, _ = hidden_states.shape

    compressed_q = self.q_a_layernorm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(compressed_q).view(batch, tokens, -1, self.qk_head_dim)
    q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    compressed = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1)
    latent, rope = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    q_rope, rope = layer.rotate(q_rope.transpose(1, 2), rope, *position_embeddings)

    # (heads, nope + v, latent), then the two halves.
    weight = self.kv_b_proj.weight.view(
        -1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank
    )
    to_latent, to_value = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
    q_latent = torch.bmm(q_nope.flatten(0, 1).transpose(0, 1), to_latent)
    q_latent = q_latent.transpose(0, 1).unflatten(0, (batch, tokens))

    rows = torch.cat((self.kv_a_layernorm(latent), rope), dim=-1)  # (batch, 1, tokens, d_qk)
    if rows.requires_grad or q_latent.requires_grad:
        raise ValueError(
            "model: expected a call under torch.no_grad(), got tensors that require grad, "
            "and sparse_mla.attend has no gradient"
        )
    if layer.cache_format != "dense":
        rows = sparse_mla.pack(
            rows.flatten(0, 2), cache_format=layer.cache_format, block_size=1
        ).view(batch, 1, tokens, -1)
    if cache is not None:
        _check_cache(self, cache, rows)
        rows, _ = cache.update(rows, rows[..., :0], self.layer_idx)

    if self.indexer is not None:
        topk = self.indexer(
            hidden_states=hidden_states,
            q_resid=compressed_q,
            position_embeddings=position_embeddings,
            attention_mask=_additive(attention_mask),
            position_ids=position_ids,
            **{layer.indexer_cache: cache},
        )
    elif prev_topk_indices is not None:
        topk = prev_topk_indices
    else:
        raise ValueError(
            "prev_topk_indices: expected the selection of an earlier layer, which this one reuses, "
            "got None"
        )

    # A request is one block of all its columns: padding, tokens, and what a static cache has left.
    requests = torch.arange(batch, dtype=torch.int32, device=rows.device).unsqueeze(1)
    out, _ = sparse_mla.attend(
        (q_latent, q_rope.transpose(1, 2)),
        rows.squeeze(1),
        _visible(topk, attention_mask, position_ids),
        softmax_scale=self.scaling,
        cache_format=layer.cache_format,
        head_dim_v=self.kv_lora_rank,
        block_table=requests,
    )
    values = torch.bmm(out.flatten(0, 1).transpose(0, 1), to_value.transpose(1, 2))
    result = self.o_proj(values.transpose(0, 1).reshape(batch, tokens, -1))
    return (result, None, topk) if layer.returns_topk else (result, None)


def _visible(
    topk: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """The selected columns (batch, tokens, topk), -1 for those that the mask hides.

    A row that sees fewer columns than the indexer selects gets hidden ones, too. The mask is
    (batch or 1, 1, tokens, columns), bool or 0 where a column is visible; models that leave it out
    have no padding, so that columns are positions.
    """
    columns = topk.long()
    if mask is None:
        shown = columns <= position_ids.unsqueeze(-1)
    else:
        mask = mask[:, 0].expand(len(topk), -1, -1).gather(-1, columns)
        shown = mask if mask.dtype == torch.bool else mask == 0
    return torch.where(shown, topk, -1)


def _additive(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as the indexer adds it to its scores: (batch or 1, tokens, columns), 0 or -inf.

    Releases before 5.17 would add a bool one as it is.
    """
    if mask is None:
        return None
    mask = mask[:, 0]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)


def _check_call(self: torch.nn.Module, mask: torch.Tensor | None, keywords: dict[str, Any]) -> None:
    """What of a call only shows when it comes."""
    _check_implementation(self)
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1):
        raise ValueError(
            "attention_mask: expected (batch, 1, tokens, columns) in an attention layer, got shape "
            f"{tuple(mask.shape)}"
        )
    if self.training and self.attention_dropout:
        raise ValueError(
            f"attention_dropout: expected 0 in training, got {self.attention_dropout}; call "
            "model.eval(), or disable the model"
        )
    if keywords.get("output_attentions", getattr(self.config, "output_attentions", False)):
        raise ValueError(
            "output_attentions: expected False, got True: attention weights are never formed"
        )


def _check_cache(self: torch.nn.Module, cache: Any, rows: torch.Tensor) -> None:
    """Whether the layer's part of the cache has rows like these, if it has any."""
    if not isinstance(cache, transformers.Cache):
        raise TypeError(f"cache: expected a transformers.Cache, got {type(cache).__name__}")
    keys = cache.layers[self.layer_idx].keys if self.layer_idx < len(cache.layers) else None
    if keys is None or keys.dim() == 1:  # not used yet
        return
    if keys.shape[-1] != rows.shape[-1] or keys.dtype != rows.dtype:
        raise ValueError(
            f"cache: expected rows of {rows.shape[-1]} {str(rows.dtype)[6:]} numbers in layer "
            f"{self.layer_idx}, got {keys.shape[-1]} {str(keys.dtype)[6:]}; a cache that was "
            "filled, or allocated, before the model was enabled cannot be continued"
        )
