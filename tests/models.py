"""Small models with the real attention code of GLM-5 and DeepSeek-V3.2, and what a serving engine
would take from them.

The models come from the transformers package with random weights, the real head dimensions, few
heads and a small hidden size. `record` notes by hooks, at every layer and for every call of the
model, what one attention step needs: the normalised latent and the roped key of the new tokens,
the queries, the indexer's top-k, and the layer's own output. `absorb` and `expand` are the two
halves of kv_b_proj, moved from the keys to the queries and from the values to the output, and
`Paged` keeps the tokens of several requests in the shuffled blocks of a paged cache.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers

LATENT, ROPE = 512, 64
NAMES = ("glm_moe_dsa", "deepseek_v32")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: the models are so small that a second one only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build(
    name: str,
    *,
    layers: int = 3,
    heads: int = 4,
    hidden: int = 64,
    index_topk: int = 24,
    initializer_range: float = 0.14,
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> torch.nn.Module:
    """The decoder (no language-model head) of a small random model in float32.

    `initializer_range` is several times that of the real models, so that scores are peaked although
    the projections are narrow. GLM's layers alternate between running the indexer and reusing the
    top-k of the layer before; DeepSeek's scale contains the YaRN factor, as in the real model.
    """
    common = {
        "vocab_size": 128,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": index_topk,
        "initializer_range": initializer_range,
        "max_position_embeddings": 4096,
        "attn_implementation": attn_implementation,
    }
    if name == "glm_moe_dsa":
        config = transformers.GlmMoeDsaConfig(
            qk_nope_head_dim=192,
            v_head_dim=256,
            indexer_types=["shared" if layer % 2 else "full" for layer in range(layers)],
            **common,
        )
        kind = transformers.GlmMoeDsaModel
    else:
        config = transformers.DeepseekV32Config(
            qk_nope_head_dim=128,
            v_head_dim=128,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
            **{**common, "max_position_embeddings": 163840},
        )
        kind = transformers.DeepseekV32Model
    torch.manual_seed(seed)
    return kind(config).eval().requires_grad_(False)


@dataclass
class Step:
    """What one layer did in one call of the model, as float32 tensors.

    The columns that `topk` and `visible` speak of are all tokens so far, padding included. The
    top-k is as the indexer gave it, so it may name columns that the model's mask hides.
    """

    hidden: torch.Tensor  # (batch, tokens, hidden), what kv_a_proj_with_mqa reads
    latent: torch.Tensor  # (batch, tokens, 512), normalised
    rope: torch.Tensor  # (batch, tokens, 64), rotated
    q_nope: torch.Tensor  # (batch, tokens, heads, nope)
    q_rope: torch.Tensor  # (batch, tokens, heads, 64), rotated
    topk: torch.Tensor  # (batch, tokens, topk), columns
    visible: torch.Tensor  # (batch, tokens, columns), bool: the model's mask
    output: torch.Tensor  # (batch, tokens, heads, v), before o_proj
    projected: torch.Tensor  # (batch, tokens, hidden), after it


@contextlib.contextmanager
def record(model: torch.nn.Module) -> Iterator[list[list[Step]]]:
    """Within the context every call of `model` appends a list with one Step per layer."""
    calls: list[list[Step]] = []
    seen: dict[str, torch.Tensor] = {}
    handles = []

    def keep(name, output):
        return lambda module, args, result: seen.__setitem__(name, result if output else args[0])

    def begin(module, args):
        calls.append([])

    def end_layer(module, args, kwargs, result):
        query = seen["query"].unflatten(-1, (-1, module.qk_head_dim)).transpose(1, 2)
        q_nope, q_rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        rope = seen["latent_and_rope"][..., module.kv_lora_rank :].unsqueeze(1)
        # The model's own rotation: pairs are interleaved in, and halves apart out, in both models.
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb_interleave
        q_rope, rope = rotate(q_rope, rope, *kwargs["position_embeddings"])
        mask = kwargs["attention_mask"][:, 0]
        calls[-1].append(
            Step(
                hidden=seen["hidden"],
                latent=seen["latent"],
                rope=rope.squeeze(1),
                q_nope=q_nope.transpose(1, 2),
                q_rope=q_rope.transpose(1, 2),
                topk=seen["topk"].long(),  # of an earlier layer where this one has no indexer
                visible=mask if mask.dtype == torch.bool else mask == 0,
                output=seen["output"].unflatten(-1, (module.num_heads, module.v_head_dim)),
                projected=result[0],
            )
        )

    handles.append(model.register_forward_pre_hook(begin))
    for layer in model.layers:
        attention = layer.self_attn
        for module, name, output in (
            (attention.q_b_proj, "query", True),
            (attention.kv_a_proj_with_mqa, "hidden", False),
            (attention.kv_a_proj_with_mqa, "latent_and_rope", True),
            (attention.kv_a_layernorm, "latent", True),
            (attention.indexer, "topk", True),
            (attention.o_proj, "output", False),
        ):
            if module is not None:
                handles.append(module.register_forward_hook(keep(name, output)))
        handles.append(attention.register_forward_hook(end_layer, with_kwargs=True))
    try:
        with torch.no_grad():
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def run(
    model: torch.nn.Module, mask: torch.Tensor, decode_steps: int, seed: int = 1
) -> tuple[list[list[Step]], torch.Tensor]:
    """Prefills random tokens under `mask` (batch, columns), then decodes a token each a step.

    Returns the recorded calls (the prefill, then the decode steps) and the mask over all columns.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = transformers.DynamicCache(config=model.config)
    tokens = mask.shape[1]
    with record(model) as calls:
        for _ in range(1 + decode_steps):
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
            ids = torch.randint(model.config.vocab_size, (len(mask), tokens), generator=generator)
            model(ids, mask, position_ids, cache, use_cache=True)
            tokens = 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return calls, mask[:, :-1]


def positions(mask: torch.Tensor) -> torch.Tensor:
    """The position in its request of every column of `mask` (batch, columns); -1 for padding."""
    return torch.where(mask.bool(), mask.cumsum(-1) - 1, -1)


def query_positions(step: Step, position: torch.Tensor) -> torch.Tensor:
    """The positions (batch, tokens) of the step's queries; `position` may go on past the step."""
    tokens, columns = step.visible.shape[1:]
    return position[:, columns - tokens : columns]


def named_topk(step: Step, position: torch.Tensor) -> torch.Tensor:
    """The step's top-k as positions (batch, tokens, topk), future ones included; -1 for padding."""
    return position[:, None].expand(-1, step.topk.shape[1], -1).gather(-1, step.topk)


def visible_topk(step: Step, position: torch.Tensor) -> torch.Tensor:
    """The step's top-k as positions, -1 for all that the model's mask hides."""
    return torch.where(step.visible.gather(-1, step.topk), named_topk(step, position), -1)


def absorb(q_nope: torch.Tensor, attention: torch.nn.Module) -> torch.Tensor:
    """Queries (..., heads, nope) against the latent itself: (..., heads, 512), through W_UK."""
    weight = attention.kv_b_proj.weight.unflatten(0, (attention.num_heads, -1))
    return torch.einsum("...hn,hnl->...hl", q_nope, weight[:, : attention.qk_nope_head_dim])


def expand(latent: torch.Tensor, attention: torch.nn.Module) -> torch.Tensor:
    """Attended latents (..., heads, 512) as values (..., heads, v), through W_UV."""
    weight = attention.kv_b_proj.weight.unflatten(0, (attention.num_heads, -1))
    return torch.einsum("...hl,hvl->...hv", latent, weight[:, attention.qk_nope_head_dim :])


def block_tables(
    lengths: torch.Tensor, block_size: int, spare: int = 3, seed: int = 2
) -> tuple[torch.Tensor, int]:
    """Shuffled blocks for requests of `lengths` tokens: (requests, blocks), -1 where a request has
    no more, and the number of blocks, `spare` of which belong to nobody."""
    counts = (lengths + block_size - 1) // block_size
    num_blocks = int(counts.sum()) + spare
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(lengths), int(counts.max())), -1, dtype=torch.long)
    for request, blocks in enumerate(order[: num_blocks - spare].split(counts.tolist())):
        table[request, : len(blocks)] = blocks
    return table, num_blocks


def slots_of(position: torch.Tensor, table: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slots of positions (requests, …); -1 stays -1."""
    known = position.clamp(min=0)
    block = table.gather(1, (known // block_size).flatten(1)).view_as(known)
    return torch.where(position >= 0, block * block_size + known % block_size, -1)
