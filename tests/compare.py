"""Calls `attend` with the arguments of a case and compares everything with the oracle.

`check_call` is the whole examination of one call: the fault that has to be raised, the bounds of
the contract on `out`, `lse` and `max_logits`, the outputs that were given, and that no input was
written. Arguments are NumPy arrays; `to_framework` makes the same tensors of another framework,
with the same strides and alignment, which share the memory where that is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import sparse_mla
from sparse_mla import reference

OUTPUTS = ("out", "lse", "max_logits")
HOW = ("validate", "batch_invariant", "stream")  # how a call is run, not what it computes
INDEXING = (
    "block_table",
    "request_ids",
    "seq_lens",
    "query_positions",
    "shard",
    "max_seq_len",
    "topk_lens",
    "extra_kv_cache",
    "extra_indices",
    "extra_topk_lens",
    "extra_block_table",
    "extra_seq_lens",
)
ALIGNMENT = 16  # bytes: the most that a kernel asks for
INF_FROM = {"float16": 65519.9, "bfloat16": 3.38e38, "float32": 3.4e38}


# --------------------------------------------------------------------------- frameworks


def to_framework(value: Any, framework: str = "numpy", device: str = "cpu") -> Any:
    """The array, or every array of a dict or tuple, as a tensor of the framework named."""
    if isinstance(value, dict):
        return {name: to_framework(item, framework, device) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(to_framework(item, framework, device) for item in value)
    if framework == "numpy" or not isinstance(value, np.ndarray):
        return value
    import torch

    names = {
        "bfloat16": (np.int16, torch.bfloat16),
        "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    }
    carrier, dtype = names.get(value.dtype.name, (value.dtype, None))
    tensor = torch.from_numpy(value.view(carrier))
    if device != "cpu":
        reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        reach = reach if tensor.numel() else 0
        lead = value.ctypes.data % ALIGNMENT // value.itemsize
        memory = torch.empty(lead + reach, dtype=tensor.dtype, device=device)
        memory[lead:].copy_(tensor.as_strided((reach,), (1,)))
        tensor = memory.as_strided(tensor.shape, tensor.stride(), lead)
    return tensor if dtype is None else tensor.view(dtype)


def to_numpy(value: Any) -> np.ndarray:
    """A tensor of any framework as a NumPy array, bfloat16 included."""
    if isinstance(value, np.ndarray):
        return value
    import torch

    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if value.dtype == torch.float8_e4m3fn:
        return value.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return value.numpy()


# --------------------------------------------------------------------------- the oracle's part


def leading(arguments: dict[str, Any]) -> tuple[int, ...]:
    q = arguments["q"]
    return (q[0] if isinstance(q, tuple) else q).shape[:-2]


def expected(arguments: dict[str, Any]) -> reference.Attention:
    """What the oracle says about a call."""
    return reference.attention(
        **{name: value for name, value in arguments.items() if name not in OUTPUTS + HOW}
    )


def expected_fault(arguments: dict[str, Any]) -> reference.Fault | None:
    return reference.fault(
        arguments["kv_cache"],
        arguments["indices"],
        leading=leading(arguments),
        **{name: arguments[name] for name in INDEXING if name in arguments},
    )


# --------------------------------------------------------------------------- comparisons


def excess(got: NDArray, want: NDArray, bound: NDArray, dtype: str = "float32") -> NDArray:
    """How far a result is away, in units of what is allowed; infinite where one of the two is NaN.

    Where a value that is allowed does not fit `dtype`, infinity of its sign is right as well.
    """
    got = got.astype(np.float64)
    with np.errstate(all="ignore"):
        ratio = np.abs(got - want) / bound
        special = ~np.isfinite(want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        over = np.isinf(got) & (np.sign(got) * want + bound >= INF_FROM[dtype])
        ratio = np.where(over, 0, ratio)
    ratio = np.where(special, np.where(same, 0, np.inf), ratio)
    return np.where(np.isnan(ratio), np.inf, ratio)


def assert_within(
    what: str, got: NDArray, want: NDArray, bound: NDArray, dtype: str = "float32"
) -> float:
    """Every element within its bound; returns the largest error as a share of its bound."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if not got.size:
        return 0.0
    ratio = excess(got, want, bound, dtype)
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    place = ", ".join(str(int(i)) for i in worst)
    assert ratio[worst] <= 1, (
        f"{what}[{place}] = {float(got[worst]):.9g}, expected {want[worst]:.9g} ± "
        f"{bound[worst]:.3g}; {int((ratio > 1).sum())} of {ratio.size} are outside"
    )
    return float(ratio[worst])


def assert_close(
    out: Any, lse: Any, want: reference.Attention, max_logits: Any = None
) -> dict[str, float]:
    """out, lse and max_logits by the contract's bounds; the largest share of each that was used."""
    out, lse = to_numpy(out), to_numpy(lse)
    used = {
        "lse": assert_within("lse", lse, want.lse, want.bound_lse),
        "out": assert_within("out", out, want.out, want.bound_out, out.dtype.name),
    }
    if max_logits is not None:
        got = to_numpy(max_logits)
        used["max_logits"] = assert_within(
            "max_logits", got, want.max_logits, want.bound_max_logits
        )
    return used


def distance(got: Any, want: NDArray) -> float:
    """1 - cosine over the whole output."""
    got = to_numpy(got).astype(np.float64).ravel()
    want = want.ravel()
    return 1 - float(got @ want / np.sqrt((got @ got) * (want @ want)))


def snapshot(arguments: dict[str, Any], skip: tuple[str, ...] = OUTPUTS) -> dict[str, bytes]:
    """The bytes of every array, but those named."""
    images = {}
    for name, value in arguments.items():
        if name not in skip:
            for part, array in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(array, np.ndarray) or hasattr(array, "detach"):
                    images[f"{name}[{part}]"] = to_numpy(array).tobytes()
    return images


def assert_fault(raised: sparse_mla.IndexFault, want: reference.Fault) -> None:
    """Names, place, value and count of a fault, in its attributes and in its words."""
    assert raised.tensor == want.tensor
    assert tuple(raised.position) == want.position
    assert raised.value == want.value
    assert raised.bound == want.bound
    assert raised.count == want.count
    assert raised.exact is True
    place = ", ".join(str(i) for i in want.position)
    assert str(raised).startswith(f"{want.tensor}[{place}] = {want.value} is "), str(raised)
    assert f"({want.count} of " in str(raised), str(raised)


def assert_deferred_fault(raised: sparse_mla.IndexFault | None, arguments: dict[str, Any]) -> None:
    """What a kernel has recorded: some fault of the call, with its true place and value."""
    assert raised is not None, "no fault recorded"
    array = arguments[raised.tensor]
    assert len(raised.position) == array.ndim
    assert int(array[raised.position]) == raised.value
    assert raised.exact is False
    assert raised.count >= 1
    assert "(at least " in str(raised), str(raised)


def fault_of(call: Callable[[], Any]) -> sparse_mla.IndexFault | None:
    """The IndexFault that a call raises, or None."""
    try:
        call()
    except sparse_mla.IndexFault as fault:
        return fault
    return None


def check_call(
    arguments: dict[str, Any], framework: str = "numpy", device: str = "cpu"
) -> dict[str, float]:
    """Runs a call as it stands and compares all there is to compare. Outputs may be written.

    Returns how much of each bound was used. Faults under "deferred" and "raise" have to be raised
    before anything is written; then the call is run again with "mask".
    """
    want, fault = expected(arguments), expected_fault(arguments)
    tensors = to_framework(arguments, framework, device)
    before = snapshot(arguments)
    validate = arguments.get("validate", "deferred")
    at_once = validate == "raise" or (validate == "deferred" and device == "cpu")
    sparse_mla.faults()
    if fault is not None and at_once:
        outputs = snapshot(tensors, skip=())
        raised = fault_of(lambda: sparse_mla.attend(**tensors))
        assert raised is not None, f"no IndexFault, expected {fault}"
        assert_fault(raised, fault)
        assert snapshot(tensors, skip=()) == outputs, "written although a fault was raised"
        tensors["validate"] = "mask"
    out, lse = sparse_mla.attend(**tensors)
    deferred = fault_of(sparse_mla.synchronize)
    if fault is not None and validate == "deferred" and not at_once:
        assert_deferred_fault(deferred, arguments)
    else:
        assert deferred is None, f"raised: {deferred}"
    recorded = sparse_mla.faults()
    if fault is None or validate != "record":
        assert recorded is None, f"recorded: {recorded}"
    elif device == "cpu":
        assert recorded is not None, f"no fault recorded, expected {fault}"
        assert_fault(recorded, fault)
    else:
        assert_deferred_fault(recorded, arguments)
    for name, result in (("out", out), ("lse", lse)):
        assert name not in tensors or result is tensors[name], f"{name} is not the one given"
    if "out" not in arguments:
        q = arguments["q"]
        assert to_numpy(out).dtype == (q[0] if isinstance(q, tuple) else q).dtype
    assert to_numpy(lse).dtype == np.float32
    used = assert_close(out, lse, want, tensors.get("max_logits"))
    assert snapshot(arguments) == before, "an input was written"
    return used
