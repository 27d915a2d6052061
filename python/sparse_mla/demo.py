"""`python -m sparse_mla demo`: attention on data of two models, against their own output.

data/<model>.npz holds one attention layer of a small random model that runs the real code of its
family with the real head dimensions: a few hundred cached tokens of two requests and some query
rows, the last of the prefill and decode steps among them. tools/record_case.py writes it:

    model, transformers              names: the model's type, the release whose code it ran
    softmax_scale, epsilon           float64: of the attention; of the latent's RMS norm
    seed, std                        what `draw` makes the two projections below from
    hidden         (tokens, hidden)  the layer's input, requests one after the other
    rope           (tokens, 64)      the key's rotated part, as the model caches it
    seq_lens       (requests,)       tokens of each request
    block_size, block_table          where an engine might have put them: (requests, blocks)
    q_nope, q_rope (rows, heads, …)  queries, before the absorption; the second part is rotated
    request_ids, query_positions     (rows,)
    indices        (rows, topk)      the model's top-k as positions, hidden ones set to -1
    output         (rows, heads, v)  the model's own attention output, before o_proj

The two large projections, kv_a (hidden -> latent) and kv_b (latent -> keys and values of all
heads), were drawn by `draw` when the model was made, so that a seed stands for them.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import resources

import sparse_mla

try:
    import ml_dtypes
    import numpy as np

    from sparse_mla import reference
except ImportError as error:
    MISSING = str(error)
else:
    MISSING = ""

MODELS = ("glm_moe_dsa", "deepseek_v32")
LATENT, ROPE = 512, 64

# A cache format, the dtype of q and of a dense cache, and the largest error against the model that
# the result may have, relative to the largest output. It is what the cache's numbers lose: float32
# nothing that counts, bfloat16 keeps 8 bits, e4m3 keeps 4, and peaked scores magnify both.
CACHES = (
    ("dense", "float32", 1e-4),
    ("dense", "bfloat16", 2e-2),
    ("fp8_ds_mla", "bfloat16", 2e-1),
    ("fp8_tensor", "bfloat16", 2e-1),
)


def draw(seed: int, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Uniform float32 numbers with the standard deviation `std`, the same bits on every machine.

    Element i is the upper 24 bits of SplitMix64's output i (Steele, Lea and Flood, 2014), read as a
    signed number and multiplied once by a float32 factor.
    """
    count = int(np.prod(shape))
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    signed = (state >> np.uint64(40)).astype(np.int32) - (1 << 23)
    factor = np.float32(std * 3**0.5 / (1 << 23))
    return (signed.astype(np.float32) * factor).reshape(shape)


def projections(
    seed: int, std: float, hidden: int, heads: int, head_width: int
) -> tuple[np.ndarray, np.ndarray]:
    """kv_a (512, hidden) and kv_b (heads, head_width, 512); head_width counts key and value."""
    kv_a = draw(seed, (LATENT, hidden), std)
    kv_b = draw(seed + 1, (heads, head_width, LATENT), std)
    return kv_a, kv_b


def load(model: str) -> dict[str, np.ndarray]:
    """The recorded case of `model`, complete: see `redraw`."""
    with resources.files("sparse_mla").joinpath("data", f"{model}.npz").open("rb") as file:
        return redraw(dict(np.load(file)))


def redraw(case: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds what the file leaves out: `kv_b` and the normalised `latent` (tokens, 512)."""
    _, heads, nope = case["q_nope"].shape
    width = nope + case["output"].shape[-1]
    hidden = case["hidden"].astype(np.float64)
    kv_a, case["kv_b"] = projections(
        int(case["seed"]), float(case["std"]), hidden.shape[1], heads, width
    )
    latent = hidden @ kv_a.T.astype(np.float64)
    latent /= np.sqrt(np.mean(latent**2, axis=-1, keepdims=True) + case["epsilon"])
    case["latent"] = latent.astype(np.float32)
    return case


def token_slots(case: dict[str, np.ndarray]) -> np.ndarray:
    """The slot of every token, in the order of `hidden`."""
    block_size = int(case["block_size"])
    slots = []
    for length, blocks in zip(case["seq_lens"], case["block_table"], strict=True):
        position = np.arange(length)
        slots.append(blocks[position // block_size] * block_size + position % block_size)
    return np.concatenate(slots).astype(np.int64)


def write_cache(
    case: dict[str, np.ndarray], cache_format: str, dtype: np.dtype
) -> tuple[np.ndarray, float | None]:
    """The paged cache (num_blocks, block_size, row), NaN in every unused slot, and its scale."""
    scale = None
    if cache_format == "fp8_tensor":
        scale = float(max(np.abs(case["latent"]).max(), np.abs(case["rope"]).max()) / 448)
    row = sparse_mla.cache_formats()[cache_format]["row_bytes"]
    row = row or (LATENT + ROPE) * dtype.itemsize
    blocks = int(case["block_table"].max()) + 1
    cache = np.full((blocks, int(case["block_size"]), row), 0xFF, np.uint8)
    if cache_format == "dense":
        cache = cache.view(dtype)
    sparse_mla.append(
        cache,
        token_slots(case),
        case["latent"].astype(dtype),
        case["rope"].astype(dtype),
        cache_format=cache_format,
        cache_scale=scale,
    )
    return cache, scale


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    """Largest |value - truth| over the largest |truth|; NaN where either has one."""
    return float(np.abs(value - truth).max() / np.abs(truth).max())


def entries(case: dict[str, np.ndarray]) -> tuple[int, int]:
    """How many slots the rows read, and how many different tokens these are."""
    taken = case["indices"] >= 0
    request = np.broadcast_to(case["request_ids"][:, None], taken.shape)
    tokens = np.stack([request[taken], case["indices"][taken]])
    return tokens.shape[1], np.unique(tokens, axis=1).shape[1]


def attend_case(
    case: dict[str, np.ndarray], cache_format: str, dtype: str, repeat: int
) -> dict[str, float]:
    """One line of the table: the two errors, the time of a call in seconds, and what it read."""
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    nope = case["q_nope"].shape[-1]
    w_uk, w_uv = case["kv_b"][:, :nope], case["kv_b"][:, nope:]
    q_latent = np.einsum("thn,hnl->thl", case["q_nope"], w_uk)
    q = np.concatenate([q_latent, case["q_rope"]], axis=-1).astype(dtype)
    cache, scale = write_cache(case, cache_format, dtype)
    names = ("block_table", "request_ids", "seq_lens", "query_positions")
    arguments = {name: case[name] for name in names}
    arguments["softmax_scale"] = float(case["softmax_scale"])
    arguments["cache_format"] = cache_format
    if scale is not None:
        arguments["cache_scale"] = scale

    out = np.empty((*q.shape[:2], LATENT), np.float32)
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        sparse_mla.attend(q, cache, case["indices"], out=out, **arguments)
        seconds.append(time.perf_counter() - begin)

    exact = reference.attention(q, cache, case["indices"], **arguments)
    values = np.einsum("thl,hvl->thv", out.astype(np.float64), w_uv)
    return {
        "model error": relative_error(values, case["output"]),
        "float64 error": relative_error(out, exact.out),
        "share of bound": float((np.abs(out - exact.out) / exact.bound_out).max()),
        "seconds": sorted(seconds)[len(seconds) // 2],
        "bytes": np.count_nonzero(case["indices"] >= 0) * cache.shape[-1] * cache.itemsize,
    }


HEADER = (
    f"  {'cache':<14} {'to model':>10} {'at most':>8} {'to float64':>12} {'of bound':>9} "
    f"{'time':>10} {'read':>9}"
)


def main(argv: list[str]) -> int:
    """Runs the demo and prints its table. Returns 1 where an error is past its bound, 2 without
    NumPy or ml_dtypes, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla demo",
        description="Attend over data recorded from two models and compare with their own output.",
    )
    parser.add_argument(
        "--repeat", type=int, default=20, help="calls to time, the median is shown (default 20)"
    )
    options = parser.parse_args(argv)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, not {options.repeat}")
    if MISSING:
        print(
            f"The demo needs NumPy and ml_dtypes ({MISSING}): pip install 'sparse-mla[numpy]'",
            file=sys.stderr,
        )
        return 2

    failed = 0
    for model in MODELS:
        case = load(model)
        rows, heads, nope = case["q_nope"].shape
        value, topk = case["output"].shape[-1], case["indices"].shape[1]
        lengths = " and ".join(str(length) for length in case["seq_lens"])
        slots, tokens = entries(case)
        print(
            f"{model}: {rows} query rows of {heads} heads (nope {nope}, rope {ROPE}, "
            f"value {value}, scale {float(case['softmax_scale']):.5f}),\n"
            f"top-k {topk} over {lengths} tokens: {slots} slots, {tokens} different tokens"
        )
        print(HEADER)
        for cache_format, dtype, bound in CACHES:
            line = attend_case(case, cache_format, dtype, options.repeat)
            # Written so that a NaN fails.
            good = line["model error"] <= bound and line["share of bound"] <= 1
            failed += not good
            name = f"dense {dtype}" if cache_format == "dense" else cache_format
            print(
                f"  {name:<14} {line['model error']:>10.1e} {bound:>8.0e} "
                f"{line['float64 error']:>12.1e} {line['share of bound']:>9.2%} "
                f"{line['seconds'] * 1e6:>7.0f} us {line['bytes'] / 1024:>5.0f} KiB"
                + ("" if good else "  FAILED")
            )
        print()

    if failed:
        print(f"{failed} of {len(MODELS) * len(CACHES)} results are past their bound.")
        return 1
    print(
        "Errors are relative to the largest output. From paged caches with NaN in every unused\n"
        "slot, sparse_mla.attend and the value projection gave the attention output that the\n"
        "models had computed themselves, as exactly as each cache keeps its numbers, and the\n"
        "result of float64 arithmetic over the same bytes within the bound of the contract."
    )
    return 0
