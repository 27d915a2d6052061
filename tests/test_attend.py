"""`attend` on the table of cases: every case, every kernel, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import sparse_mla
from compare import assert_close, expected, to_framework
from conftest import Backend
from sparse_mla import reference


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_case(case: cases.Case, backend: Backend) -> None:
    if backend.framework == "torch" and "reversed" in case.name:
        pytest.skip("PyTorch has no negative strides")
    backend.check(cases.make(case, seed=1))


@pytest.mark.parametrize(
    "case", [c for c in cases.CASES if c.main.faults or c.bad_request], ids=str
)
@pytest.mark.parametrize("validate", ["deferred", "raise", "record"])
def test_case_with_faults(case: cases.Case, validate: str, backend: Backend) -> None:
    for seed in (2, 3):
        backend.check({**cases.make(case, seed), "validate": validate})


def test_positions_of_arguments() -> None:
    """q, kv_cache and indices may be positional, everything else is named."""
    arguments = cases.make(cases.Case(main=cases.SMALL))
    q, cache, indices = (arguments.pop(name) for name in ("q", "kv_cache", "indices"))
    out, lse = sparse_mla.attend(q, cache, indices, **arguments)
    again = sparse_mla.attend(indices=indices, kv_cache=cache, q=q, **arguments)
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(lse, again[1])


def test_none_is_absent() -> None:
    """None for every optional argument is the same as leaving it out."""
    arguments = cases.make(cases.Case(main=cases.SMALL))
    optional = [
        "cache_format",
        "head_dim_v",
        "block_table",
        "request_ids",
        "seq_lens",
        "query_positions",
        "shard",
        "max_seq_len",
        "topk_lens",
        "attn_sink",
        "cache_scale",
        "extra_kv_cache",
        "extra_indices",
        "extra_topk_lens",
        "extra_cache_format",
        "extra_cache_scale",
        "extra_block_table",
        "extra_seq_lens",
        "out",
        "lse",
        "max_logits",
        "stream",
    ]
    out, lse = sparse_mla.attend(**arguments)
    again = sparse_mla.attend(**arguments, **dict.fromkeys(optional))
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(lse, again[1])


@pytest.mark.parametrize("pair", [False, True])
def test_results_are_of_the_framework_of_q(pair: bool) -> None:
    torch = pytest.importorskip("torch")
    case = cases.Case(main=cases.SMALL, q_rope=64 * pair, leading=(2, 3))
    tensors = to_framework(cases.make(case), "torch")
    out, lse = sparse_mla.attend(**tensors)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (tuple(out.shape), tuple(lse.shape)) == ((2, 3, 4, 512), (2, 3, 4))


def test_frameworks_may_be_mixed() -> None:
    """Every array of a call may come from another framework; the result is of q's."""
    pytest.importorskip("torch")
    case = cases.Case(main=cases.PAGED, leading=(2, 3), query_positions=True, sink="normal")
    arguments = cases.make(case)
    tensors = to_framework(arguments, "torch")
    mixed = {
        name: tensors[name] if i % 2 else value for i, (name, value) in enumerate(arguments.items())
    }
    mixed["q"] = arguments["q"]
    out, lse = sparse_mla.attend(**mixed)
    assert isinstance(out, np.ndarray)
    again = sparse_mla.attend(**arguments)
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(lse, again[1])


def test_slots_and_positions_are_the_same() -> None:
    """Positions with a block table give the bits of the slots that they stand for."""
    arguments = cases.make(cases.Case(main=cases.PAGED, leading=(4,)))
    slots = reference.resolve(
        arguments["kv_cache"],
        arguments["indices"],
        block_table=arguments["block_table"],
        seq_lens=arguments["seq_lens"],
    )[0]
    paged = sparse_mla.attend(**arguments)
    del arguments["block_table"], arguments["seq_lens"]
    arguments["indices"] = np.where(slots < 0, -1, slots)
    direct = sparse_mla.attend(**arguments)
    np.testing.assert_array_equal(paged[0], direct[0])
    np.testing.assert_array_equal(paged[1], direct[1])


def test_every_position_is_all_indices() -> None:
    """indices=None attends to what all positions as indices would."""
    case = cases.Case(main=cases.ALL, leading=(3, 2), query_positions=True)
    arguments = cases.make(case)
    size = case.main.max_blocks * case.main.block_size
    named = dict(arguments, indices=np.broadcast_to(np.arange(size, dtype=np.int32), (3, 2, size)))
    want = expected(named)
    np.testing.assert_allclose(expected(arguments).out, want.out, rtol=1e-12)
    for each in (arguments, named):
        out, lse = sparse_mla.attend(**each)
        assert_close(out, lse, want)
