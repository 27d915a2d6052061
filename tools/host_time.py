"""Host time of one `attend` call on an NVIDIA GPU, in microseconds.

    python tools/host_time.py

Six tensors (q, kv_cache, indices, topk_lens, out, lse), one launch, small enough for the GPU to
keep up, so that what is timed is the host's work alone: bursts of calls on an idle GPU, the median
burst divided by its calls. Beside it what the framework itself needs for the outputs, and the same
call without rows, which does everything but enter the context and launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import sparse_mla

ROWS, HEADS, TOPK, SLOTS = 1, 16, 1, 64
BURST, BURSTS = 200, 200


def microseconds(call: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    times = []
    for _ in range(BURSTS):
        synchronize()
        begin = time.perf_counter_ns()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter_ns() - begin) / BURST / 1e3)
    synchronize()
    return statistics.median(times)


def calls(tensors: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The calls to be timed, spelled as a caller spells them."""
    attend = sparse_mla.attend
    q, cache, indices, lens = (tensors[name] for name in ("q", "kv_cache", "indices", "topk_lens"))
    out, lse = outputs["out"], outputs["lse"]
    no_q, no_indices, no_lens, no_out, no_lse = (each[:0] for each in (q, indices, lens, out, lse))

    def given() -> None:
        attend(q, cache, indices, softmax_scale=0.1, topk_lens=lens, out=out, lse=lse)

    def fresh() -> None:
        attend(q, cache, indices, softmax_scale=0.1, topk_lens=lens)

    def empty() -> None:
        attend(
            no_q, cache, no_indices, softmax_scale=0.1, topk_lens=no_lens, out=no_out, lse=no_lse
        )

    return {"out and lse given": given, "without them": fresh, "no rows": empty}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((ROWS, HEADS, 576), np.float32),
        "kv_cache": rng.standard_normal((SLOTS // 64, 64, 576), np.float32),
        "indices": rng.integers(0, SLOTS, (ROWS, TOPK)).astype(np.int32),
        "topk_lens": np.full(ROWS, TOPK, np.int32),
    }


def time_pytorch() -> None:
    import torch

    tensors = {name: torch.from_numpy(array).cuda() for name, array in arrays().items()}
    for name in ("q", "kv_cache"):
        tensors[name] = tensors[name].bfloat16()
    outputs = {
        "out": torch.empty(ROWS, HEADS, 512, dtype=torch.bfloat16, device="cuda"),
        "lse": torch.empty(ROWS, HEADS, device="cuda"),
    }
    timed = calls(tensors, outputs)

    def allocate() -> None:
        torch.empty((ROWS, HEADS, 512), dtype=torch.bfloat16, device="cuda")
        torch.empty((ROWS, HEADS), dtype=torch.float32, device="cuda")

    def fill() -> None:
        outputs["lse"].zero_()

    timed |= {"torch.empty twice": allocate, "Tensor.zero_": fill}
    for name, call in timed.items():
        took = microseconds(call, torch.cuda.synchronize)
        print(f"PyTorch {torch.__version__}  {name:20s} {took:6.2f}")


def time_cupy() -> None:
    import cupy

    tensors = {name: cupy.asarray(array) for name, array in arrays().items()}
    outputs = {
        "out": cupy.empty((ROWS, HEADS, 512), np.float32),
        "lse": cupy.empty((ROWS, HEADS), np.float32),
    }
    for name, call in calls(tensors, outputs).items():
        took = microseconds(call, cupy.cuda.Device().synchronize)
        print(f"CuPy {cupy.__version__}  {name:20s} {took:6.2f}")


def main() -> None:
    plan = sparse_mla.plan(batch=ROWS, heads=HEADS, topk=TOPK, device="cuda")
    print(f"kernel {plan['kernel']}, launches {plan['launches']}")
    for time_framework in (time_pytorch, time_cupy):
        try:
            time_framework()
        except ImportError as error:
            print(f"skipped: {error}")


if __name__ == "__main__":
    main()
