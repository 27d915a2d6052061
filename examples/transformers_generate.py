"""Greedy generation of a transformers model, by its own attention and by sparse_mla's.

The model is a small glm_moe_dsa or deepseek_v32 with random weights, but with the real number of
heads and the real head dimensions, so that its cache has the real size per token and layer. Two
prompts, one of them padded on the left, are continued twice by the model as it is and twice with
`sparse_mla.transformers` enabled; the second time counts. Printed are what the cache holds, the
times, on a GPU the most memory that was needed beside the weights, and how many tokens agree::

    python examples/transformers_generate.py
    python examples/transformers_generate.py --model deepseek_v32 --device cuda --dtype bfloat16

In float32 the tokens agree. In bfloat16 both round, differently, and with random weights, whose
next-token scores lie close together, they part sooner or later.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers

import sparse_mla.transformers


def build(name: str, heads: int, layers: int, topk: int) -> torch.nn.Module:
    """A model of `layers` layers with random weights, in float32 on the CPU."""
    common: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": topk,
        "initializer_range": 0.07,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    torch.manual_seed(0)
    if name == "glm_moe_dsa":
        config = transformers.GlmMoeDsaConfig(
            qk_nope_head_dim=192,
            v_head_dim=256,
            indexer_types=["shared" if layer % 2 else "full" for layer in range(layers)],
            **common,
        )
        model = transformers.GlmMoeDsaForCausalLM(config)
    else:
        config = transformers.DeepseekV32Config(qk_nope_head_dim=128, v_head_dim=128, **common)
        model = transformers.DeepseekV32ForCausalLM(config)
    model.generation_config.eos_token_id = None
    return model.eval()


def generate(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int
) -> tuple[torch.Tensor, int, float, int]:
    """The new tokens (requests, new_tokens), the bytes that attention cached, the seconds, and the
    bytes of GPU memory that were needed at most."""
    for _ in range(2):
        peak, result = 0, None  # the first result is not counted in the second peak
        if ids.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            peak = -torch.cuda.memory_allocated()
        start = time.perf_counter()
        result = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        if ids.is_cuda:
            torch.cuda.synchronize()
            peak += torch.cuda.max_memory_allocated()
        seconds = time.perf_counter() - start
    cache = result["cache" if "cache" in result else "past_key_values"]
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return result.sequences[:, ids.shape[1] :], size, seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description="Generation with and without sparse_mla.")
    parser.add_argument("--model", choices=["glm_moe_dsa", "deepseek_v32"], default="glm_moe_dsa")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of weights"
    )
    parser.add_argument("--cache-format", choices=["dense", "fp8_ds_mla"], default="dense")
    parser.add_argument("--heads", type=int, help="64 and 128 as in the real models")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--topk", type=int, default=64, help="tokens that the indexer selects")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longer prompt")
    parser.add_argument("--new-tokens", type=int, default=8)
    options = parser.parse_args()

    heads = options.heads or {"glm_moe_dsa": 64, "deepseek_v32": 128}[options.model]
    model = build(options.model, heads, options.layers, options.topk)
    model = model.to(options.device, getattr(torch, options.dtype))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 1024, (2, options.prompt), generator=generator).to(options.device)
    mask = torch.ones_like(ids)
    mask[1, : options.prompt // 3] = 0

    arguments = (ids, mask, options.new_tokens)
    own, own_bytes, own_seconds, own_peak = generate(model, *arguments)
    with sparse_mla.transformers.enabled(model, cache_format=options.cache_format):
        ours, our_bytes, our_seconds, our_peak = generate(model, *arguments)

    tokens = 2 * (options.prompt + options.new_tokens - 1) * options.layers
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {options.model}: "
        f"{options.layers} layers, {heads} heads, top-k {options.topk}, {options.dtype} on "
        f"{options.device}"
    )
    print(f"{'':28}{'eager':>14}{'sparse_mla':>14}  ({options.cache_format} cache)")
    print(f"{'cache, bytes':28}{own_bytes:>14,}{our_bytes:>14,}")
    print(f"{'  per token and layer':28}{own_bytes // tokens:>14,}{our_bytes // tokens:>14,}")
    print(f"{'time, ms per new token':28}", end="")
    print(*(f"{s / options.new_tokens * 1e3:>14.1f}" for s in (own_seconds, our_seconds)), sep="")
    if ids.is_cuda:
        print(f"{'peak memory, bytes':28}{own_peak:>14,}{our_peak:>14,}")
    print(f"new tokens equal: {int((own == ours).sum())} of {own.numel()}")


if __name__ == "__main__":
    main()
