"""Writes python/sparse_mla/data/<model>.npz, the cases of `python -m sparse_mla demo`.

    python tools/record_case.py [directory]

A small random model of each family (tests/models.py) prefills two requests, one of them padded, and
decodes two steps; its middle layer is recorded. That layer's kv_a and kv_b projections are drawn by
sparse_mla.demo.draw before the model runs, so that the file holds a seed in their place. Before a
file is written, attention in float64 over what it holds is compared with the model's output.
The other weights come from PyTorch's generator: another release may record other numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402

import models  # noqa: E402
from sparse_mla import demo  # noqa: E402

LAYER = 1  # GLM's reuses the top-k of the layer before
HEADS = 8
TOPK = 64
STD = 0.12
LENGTHS = (140, 72)  # tokens before the decode steps
DECODE_STEPS = 2
EARLY_POSITION = 20  # a query with fewer visible keys than the top-k has entries
BLOCK_SIZE = 32
BLOCKS = ((6, 1, 8, 3, 10), (4, 9, 0, -1, -1))  # of each request, out of 11
SEED = 20


def record_case(name: str) -> dict[str, np.ndarray]:
    """Runs the model and returns the arrays of its case; the docstring of demo.py lists them."""
    model = models.build(
        name, layers=3, heads=HEADS, index_topk=TOPK, initializer_range=STD, seed=SEED
    )
    attention = model.layers[LAYER].self_attn
    kv_a, kv_b = demo.projections(
        SEED,
        STD,
        attention.hidden_size,
        HEADS,
        attention.qk_nope_head_dim + attention.v_head_dim,
    )
    attention.kv_a_proj_with_mqa.weight[: models.LATENT] = torch.from_numpy(kv_a)
    attention.kv_b_proj.weight[:] = torch.from_numpy(kv_b).flatten(0, 1)

    mask = torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for request, length in enumerate(LENGTHS):
        mask[request, : max(LENGTHS) - length] = 0
    calls, mask = models.run(model, mask, DECODE_STEPS)
    steps = [call[LAYER] for call in calls]
    position = models.positions(mask)

    # (call, request, column among the call's tokens)
    chosen = [(0, 0, EARLY_POSITION), (0, 0, -1), (0, 1, -1)]
    chosen += [(1 + step, request, 0) for step in range(DECODE_STEPS) for request in (0, 1)]
    chosen = chosen[:-1]
    rows = []
    for call, request, column in chosen:
        step = steps[call]
        rows.append(
            {
                "q_nope": step.q_nope[request, column],
                "q_rope": step.q_rope[request, column],
                "request_ids": torch.tensor(request, dtype=torch.int32),
                "query_positions": models.query_positions(step, position)[request, column].int(),
                "indices": models.visible_topk(step, position)[request, column].int(),
                "output": step.output[request, column],
            }
        )
    case = {name: torch.stack([row[name] for row in rows]).numpy() for name in rows[0]}

    real = mask.bool()
    for field in ("hidden", "rope"):
        tokens = torch.cat([getattr(step, field) for step in steps], dim=1)
        case[field] = tokens[real].numpy()
    case["seq_lens"] = real.sum(-1).int().numpy()
    case["block_size"] = np.int32(BLOCK_SIZE)
    case["block_table"] = np.array(BLOCKS, np.int32)
    case["softmax_scale"] = np.float64(attention.scaling)
    case["epsilon"] = np.float64(attention.kv_a_layernorm.variance_epsilon)
    case["seed"] = np.int64(SEED)
    case["std"] = np.float64(STD)
    case["model"] = np.array(name)
    case["transformers"] = np.array(transformers.__version__)
    return case


def verify(case: dict[str, np.ndarray]) -> tuple[float, float]:
    """Attention in float64, row by row and without a paged cache. Returns the error relative to the
    largest output and the mean over rows and heads of the largest weight."""
    nope = case["q_nope"].shape[-1]
    first = np.concatenate([[0], np.cumsum(case["seq_lens"])])
    key = np.concatenate([case["latent"], case["rope"]], axis=-1).astype(np.float64)
    kv_b = case["kv_b"].astype(np.float64)
    outputs, largest = [], []
    for row, request in enumerate(case["request_ids"]):
        indices = case["indices"][row]
        taken = key[first[request] + indices[indices >= 0]]
        absorbed = np.einsum("hn,hnl->hl", case["q_nope"][row], kv_b[:, :nope])
        query = np.concatenate([absorbed, case["q_rope"][row]], axis=-1)
        score = query @ taken.T * case["softmax_scale"]
        weight = np.exp(score - score.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        latent = weight @ taken[:, : models.LATENT]
        outputs.append(np.einsum("hl,hvl->hv", latent, kv_b[:, nope:]))
        largest.append(weight.max(axis=-1))
    error = demo.relative_error(np.stack(outputs), case["output"])
    return error, float(np.mean(largest))


def main(argv: list[str]) -> int:
    default = ROOT / "python" / "sparse_mla" / "data"
    directory = Path(argv[0]) if argv else default
    for name in demo.MODELS:
        with models.one_thread():
            case = record_case(name)
        error, largest = verify(demo.redraw(dict(case)))
        if not error <= 1e-5:
            print(f"{name}: float64 attention is off by {error:.1e}", file=sys.stderr)
            return 1
        path = directory / f"{name}.npz"
        np.savez_compressed(path, **case)
        print(
            f"{path}: {path.stat().st_size / 1024:.0f} KiB, float64 error {error:.1e}, "
            f"mean of the largest weights {largest:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
