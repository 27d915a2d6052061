"""Faults of index arrays and block tables: their words, their attributes, and the four modes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import cases
import sparse_mla
from cases import Case, Source
from compare import INDEXING, assert_fault, expected_fault, snapshot, to_framework
from sparse_mla import reference

INT = np.int32


def call(leading: tuple[int, ...] = (4,), **changes: Any) -> dict[str, Any]:
    """A call without faults: slots of 32 blocks of 16, 20 entries a row, outputs given."""
    main = Source(num_blocks=32, topk=20, padding=0.0)
    case = Case(leading=leading, d_qk=32, d_v=32, main=main, out="own", lse="given")
    arguments = cases.make(case)
    arguments.pop("validate")
    numbers = np.random.default_rng(0).standard_normal(arguments["kv_cache"].shape)
    arguments["kv_cache"] = numbers.astype(arguments["kv_cache"].dtype)
    return {**arguments, **changes}


def paged(leading: tuple[int, ...] = (4,), **changes: Any) -> dict[str, Any]:
    """The same with a block table of 5 requests of 6 blocks; positions 0 to 19 in every row."""
    arguments = call(leading)
    rows = int(np.prod(leading))
    arguments.update(
        indices=np.tile(np.arange(20, dtype=INT), (rows, 1)).reshape(*leading, 20),
        block_table=np.arange(30, dtype=INT).reshape(5, 6),
        request_ids=(np.arange(rows, dtype=INT) % 5).reshape(leading),
        seq_lens=np.full(5, 96, INT),
        topk_lens=np.full(rows, 20, INT).reshape(leading),
    )
    return {**arguments, **changes}


def put(
    arguments: dict[str, Any], name: str, *places: tuple[tuple[int, ...], int]
) -> dict[str, Any]:
    """A copy of the arguments with other values in the places given."""
    array = arguments[name].astype(np.int64)
    for place, value in places:
        array[place] = value
    return {**arguments, name: array}


def caught(arguments: dict[str, Any]) -> sparse_mla.IndexFault:
    with pytest.raises(sparse_mla.IndexFault) as raised:
        sparse_mla.attend(**arguments)
    return raised.value


EXTRA = {
    "extra_kv_cache": np.zeros((3, 4, 32), cases.DTYPES["bfloat16"]),
    "extra_indices": np.zeros((4, 2), INT),
}
TABLE = {"extra_block_table": np.zeros((5, 2), INT), "extra_seq_lens": np.full(5, 8, INT)}
SHARD = {"shard": (1, 4, 2), "seq_lens": np.full(5, 380, INT)}

WORDS = {
    "slot": (
        put(call(), "indices", ((3, 17), 812)),
        "indices[3, 17] = 812 is outside the cache of 512 slots (1 of 80 entries)",
        ("indices", (3, 17), 812, 512, 1),
    ),
    "slot_at_the_capacity": (
        put(call(), "indices", ((0, 0), 512), ((1, 1), 511)),
        "indices[0, 0] = 512 is outside the cache of 512 slots (1 of 80 entries)",
        ("indices", (0, 0), 512, 512, 1),
    ),
    "slot_of_64_bits": (
        put(call(), "indices", ((2, 5), 2**32 + 5), ((3, 0), 2**63 - 1)),
        "indices[2, 5] = 4294967301 is outside the cache of 512 slots (2 of 80 entries)",
        ("indices", (2, 5), 2**32 + 5, 512, 2),
    ),
    "slot_of_a_batch": (
        put(call((2, 3)), "indices", ((1, 2, 4), 600)),
        "indices[1, 2, 4] = 600 is outside the cache of 512 slots (1 of 120 entries)",
        ("indices", (1, 2, 4), 600, 512, 1),
    ),
    "negative": (
        put(call(), "indices", ((1, 2), -2), ((0, 3), -1)),
        "indices[1, 2] = -2 is negative and not the padding -1 (1 of 80 entries)",
        ("indices", (1, 2), -2, 512, 1),
    ),
    "of_both_kinds": (
        put(call(), "indices", ((1, 7), 9999), ((1, 8), -5), ((2, 0), 512)),
        "indices[1, 7] = 9999 is outside the cache of 512 slots (3 of 80 entries)",
        ("indices", (1, 7), 9999, 512, 3),
    ),
    "position": (
        put({k: v for k, v in paged().items() if k != "seq_lens"}, "indices", ((2, 3), 96)),
        "indices[2, 3] = 96 is past the 96 positions of block_table (1 of 80 entries)",
        ("indices", (2, 3), 96, 96, 1),
    ),
    "position_negative": (
        put(paged(), "indices", ((2, 3), -7)),
        "indices[2, 3] = -7 is negative and not the padding -1 (1 of 80 entries)",
        ("indices", (2, 3), -7, 96, 1),
    ),
    "block": (
        put(paged(), "block_table", ((3, 1), 32)),
        "block_table[3, 1] = 32 is outside the cache of 32 blocks (4 of 80 entries)",
        ("block_table", (3, 1), 32, 32, 4),
    ),
    "block_negative": (
        put(paged(), "block_table", ((2, 0), -2), ((1, 0), -1)),
        "block_table[2, 0] = -2 is outside the cache of 32 blocks (16 of 80 entries)",
        ("block_table", (2, 0), -2, 32, 16),
    ),
    "block_of_64_bits": (
        put(paged(), "block_table", ((0, 1), 2**32)),
        "block_table[0, 1] = 4294967296 is outside the cache of 32 blocks (4 of 80 entries)",
        ("block_table", (0, 1), 2**32, 32, 4),
    ),
    "request": (
        put(paged(), "request_ids", ((2,), 5), ((3,), -1)),
        "request_ids[2] = 5 is outside the 5 requests of block_table (1 of 4 rows)",
        ("request_ids", (2,), 5, 5, 1),
    ),
    "request_negative": (
        put(paged(), "request_ids", ((0,), -2), ((2,), 77)),
        "request_ids[0] = -2 is outside the 5 requests of block_table (2 of 4 rows)",
        ("request_ids", (0,), -2, 5, 2),
    ),
    "request_of_a_batch": (
        put(paged((2, 3)), "request_ids", ((1, 2), 2**32 + 1)),
        "request_ids[1, 2] = 4294967297 is outside the 5 requests of block_table (1 of 6 rows)",
        ("request_ids", (1, 2), 2**32 + 1, 5, 1),
    ),
    "request_flat": (
        put(paged((2, 3), request_ids=np.zeros(6, INT)), "request_ids", ((5,), 9)),
        "request_ids[5] = 9 is outside the 5 requests of block_table (1 of 6 rows)",
        ("request_ids", (5,), 9, 5, 1),
    ),
    "topk_len": (
        put(paged(), "topk_lens", ((1,), 21)),
        "topk_lens[1] = 21 is outside [0, 20] (1 of 4 rows)",
        ("topk_lens", (1,), 21, 21, 1),
    ),
    "topk_len_negative": (
        put(paged(), "topk_lens", ((1,), -1), ((2,), -5)),
        "topk_lens[1] = -1 is outside [0, 20] (2 of 4 rows)",
        ("topk_lens", (1,), -1, 21, 2),
    ),
    "topk_len_of_a_batch": (
        put(paged((2, 3), topk_lens=np.full(2, 20, INT)), "topk_lens", ((1,), 99)),
        "topk_lens[1] = 99 is outside [0, 20] (3 of 6 rows)",
        ("topk_lens", (1,), 99, 21, 3),
    ),
    "topk_len_of_slots": (
        call(topk_lens=np.array([20, 20, 40, 20], INT)),
        "topk_lens[2] = 40 is outside [0, 20] (1 of 4 rows)",
        ("topk_lens", (2,), 40, 21, 1),
    ),
    "seq_len": (
        put(paged(), "seq_lens", ((2,), 97)),
        "seq_lens[2] = 97 is outside [0, 96] (1 of 4 rows)",
        ("seq_lens", (2,), 97, 97, 1),
    ),
    "seq_len_negative": (
        put(paged(), "seq_lens", ((0,), -(2**40))),
        "seq_lens[0] = -1099511627776 is outside [0, 96] (1 of 4 rows)",
        ("seq_lens", (0,), -(2**40), 97, 1),
    ),
    "seq_len_of_a_shard": (
        put(paged(**SHARD), "seq_lens", ((3,), 387)),
        "seq_lens[3] = 387 is outside [0, 386] (1 of 4 rows)",
        ("seq_lens", (3,), 387, 387, 1),
    ),
    "seq_len_of_every_position": (
        put(
            {k: v for k, v in paged(max_seq_len=50).items() if k != "topk_lens"}
            | {"indices": None},
            "seq_lens",
            ((slice(None),), 50),
            ((1,), 51),
        ),
        "seq_lens[1] = 51 is outside [0, 50] (1 of 4 rows)",
        ("seq_lens", (1,), 51, 51, 1),
    ),
    "extra_slot": (
        put(call(**EXTRA), "extra_indices", ((1, 1), 12)),
        "extra_indices[1, 1] = 12 is outside the extra cache of 12 slots (1 of 8 entries)",
        ("extra_indices", (1, 1), 12, 12, 1),
    ),
    "extra_topk_len": (
        call(**EXTRA, extra_topk_lens=np.array([2, 3, 2, 2], INT)),
        "extra_topk_lens[1] = 3 is outside [0, 2] (1 of 4 rows)",
        ("extra_topk_lens", (1,), 3, 3, 1),
    ),
    "extra_block": (
        put(paged(**EXTRA, **TABLE), "extra_block_table", ((2, 0), 3)),
        "extra_block_table[2, 0] = 3 is outside the extra cache of 3 blocks (2 of 8 entries)",
        ("extra_block_table", (2, 0), 3, 3, 2),
    ),
    "extra_seq_len": (
        put(paged(**EXTRA, **TABLE), "extra_seq_lens", ((2,), 9)),
        "extra_seq_lens[2] = 9 is outside [0, 8] (1 of 4 rows)",
        ("extra_seq_lens", (2,), 9, 9, 1),
    ),
    "extra_position": (
        put(
            {k: v for k, v in paged(**EXTRA, **TABLE).items() if k != "extra_seq_lens"},
            "extra_indices",
            ((0, 1), 8),
        ),
        "extra_indices[0, 1] = 8 is past the 8 positions of extra_block_table (1 of 8 entries)",
        ("extra_indices", (0, 1), 8, 8, 1),
    ),
}


@pytest.mark.parametrize("validate", ["deferred", "raise"])
@pytest.mark.parametrize("name", WORDS)
def test_words_and_attributes(name: str, validate: str) -> None:
    arguments, text, attributes = WORDS[name]
    images = snapshot(arguments, skip=())
    fault = caught({**arguments, "validate": validate})
    assert str(fault) == text
    assert (fault.tensor, fault.position, fault.value, fault.bound, fault.count) == attributes
    assert fault.exact is True
    assert fault.device == "cpu"
    assert isinstance(fault, IndexError)
    assert snapshot(arguments, skip=()) == images, "written although a fault was raised"
    assert sparse_mla.faults() is None
    assert_fault(fault, expected_fault(arguments))


def test_default_mode_raises_on_the_cpu() -> None:
    assert caught(WORDS["slot"][0]).count == 1


@pytest.mark.parametrize("name", WORDS)
def test_record(name: str) -> None:
    """The call runs and masks; faults() tells once, with the same words."""
    arguments, text, _ = WORDS[name]
    out, lse = sparse_mla.attend(**{**arguments, "validate": "record"})
    masked = sparse_mla.attend(**{**arguments, "validate": "mask", "out": None, "lse": None})
    np.testing.assert_array_equal(out, masked[0])
    np.testing.assert_array_equal(lse, masked[1])
    fault = sparse_mla.faults()
    assert isinstance(fault, sparse_mla.IndexFault)
    assert str(fault) == text
    assert sparse_mla.faults() is None


@pytest.mark.parametrize("name", WORDS)
def test_mask(name: str) -> None:
    """Silent: nothing raised and nothing recorded."""
    sparse_mla.attend(**{**WORDS[name][0], "validate": "mask"})
    assert sparse_mla.faults() is None
    sparse_mla.synchronize()


def test_record_of_several_calls() -> None:
    """The first fault stays, the count grows; the next call raises nothing."""
    first, second = WORDS["of_both_kinds"][0], WORDS["request"][0]
    for arguments in (first, second, call(), first):
        sparse_mla.attend(**{**arguments, "validate": "record"})
    sparse_mla.attend(**call())
    sparse_mla.synchronize()
    fault = sparse_mla.faults("cpu")
    assert (fault.tensor, fault.position, fault.count) == ("indices", (1, 7), 7)
    assert sparse_mla.faults("cpu") is None


def test_a_raised_fault_does_not_touch_the_record() -> None:
    sparse_mla.attend(**{**WORDS["request"][0], "validate": "record"})
    caught(WORDS["slot"][0])
    assert sparse_mla.faults().tensor == "request_ids"


def test_faults_of_a_device() -> None:
    sparse_mla.attend(**{**WORDS["slot"][0], "validate": "record"})
    with pytest.raises(ValueError, match=r"device: expected 'cpu', 'cuda' or 'cuda:N', got 'tpu'"):
        sparse_mla.faults("tpu")
    assert sparse_mla.faults(device="cpu") is not None


def test_the_call_can_be_repeated() -> None:
    """After a fault the same call with a mended array is as if nothing had been."""
    good = call()
    want = [array.copy() for array in sparse_mla.attend(**good)]
    caught(put(good, "indices", ((0, 0), 5000)))
    out, lse = sparse_mla.attend(**good)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])


MASKED = {
    "padding": put(call(), "indices", ((1, slice(None)), -1)),
    "past_seq_lens": put(paged(), "seq_lens", ((0,), 0), ((1,), 3)),
    "positions_past_the_table_but_past_seq_lens_first": put(paged(), "indices", ((0, 0), 2**40)),
    "after_query": put(
        paged(query_positions=np.array([0, -1, 19, 5], INT)), "indices", ((0, 3), 2**40)
    ),
    "other_shard": paged(shard=(0, 3, 1)),
    "unallocated": put(paged(), "block_table", ((0, 0), -1)),
    "padding_row": put(paged(), "request_ids", ((1,), -1)),
    "behind_topk_lens": put(
        call(topk_lens=np.array([20, 5, 0, 19], INT)),
        "indices",
        ((1, 5), -9),
        ((2, 0), 2**40),
        ((3, 19), 512),
    ),
    "of_a_padding_row": put(
        paged(request_ids=np.array([0, -1, 2, 3], INT)),
        "topk_lens",
        ((1,), 900),
    ),
    "requests_that_no_row_names": put(paged(), "seq_lens", ((4,), -5)),
    "blocks_that_no_entry_names": put(paged(), "block_table", ((4, 0), 99), ((0, 5), -99)),
}


@pytest.mark.parametrize("name", MASKED)
def test_what_is_masked_is_no_fault(name: str) -> None:
    for validate in ("deferred", "raise", "record"):
        sparse_mla.attend(**{**MASKED[name], "validate": validate})
    assert sparse_mla.faults() is None


def test_order_of_faults() -> None:
    """Rows in order; in a row the request, then lengths, then entries, and the main cache first."""
    arguments = paged(**EXTRA, **TABLE, extra_topk_lens=np.array([2, 2, 9, 2], INT))
    arguments = put(arguments, "indices", ((3, 0), -2), ((2, 19), -3), ((2, 5), -4))
    assert str(caught(arguments)).startswith("indices[2, 5] = -4 ")
    arguments = put(arguments, "seq_lens", ((2,), -1))
    assert str(caught(arguments)).startswith("seq_lens[2] = -1 ")
    arguments = put(arguments, "topk_lens", ((2,), 50))
    assert str(caught(arguments)).startswith("topk_lens[2] = 50 ")
    arguments = put(arguments, "request_ids", ((2,), 50))
    assert str(caught(arguments)).startswith("request_ids[2] = 50 ")
    arguments = put(arguments, "extra_indices", ((1, 0), 8), ((1, 1), -100))
    assert str(caught(arguments)).startswith("extra_indices[1, 1] = -100 ")
    arguments = put(arguments, "block_table", ((1, 0), 100))
    assert str(caught(arguments)).startswith("block_table[1, 0] = 100 ")


@pytest.mark.parametrize("rows", [1, 3, 5000])
def test_counts_are_exact(rows: int) -> None:
    """All faults of an array, whatever is around them and however many threads look."""
    rng = np.random.default_rng(rows)
    indices = rng.integers(-1, 512, (rows, 200))
    bad = rng.random(indices.shape) < 0.01
    bad[-1, -1] = True
    indices[bad] = rng.choice([-2, 512, 2**40], int(bad.sum()))
    main = Source(num_blocks=32, topk=1)
    case = Case(leading=(rows,), heads=1, d_qk=4, d_v=4, main=main)
    fault = caught({**cases.make(case), "indices": indices, "validate": "raise"})
    row, entry = np.argwhere(bad)[0]
    assert fault.position == (row, entry)
    assert fault.value == indices[row, entry]
    assert fault.count == bad.sum()
    assert f"({bad.sum()} of {bad.size} entries)" in str(fault)


def test_faulty_lengths_are_clamped() -> None:
    """A length outside its range counts as the nearest in it, and never runs out of an array."""
    whole = call()
    want = sparse_mla.attend(**{**whole, "out": None, "lse": None})
    for far in (21, 2**31 - 1, 2**40, 2**63 - 1):
        lens = np.full(4, far)
        out, lse = sparse_mla.attend(**{**whole, "topk_lens": lens, "validate": "mask"})
        np.testing.assert_array_equal(out, want[0])
        np.testing.assert_array_equal(lse, want[1])
    for far in (-1, -(2**31), -(2**63)):
        lens = np.full(4, far)
        _, lse = sparse_mla.attend(**{**whole, "topk_lens": lens, "validate": "mask"})
        assert (lse == -np.inf).all()
    every = paged(indices=None)
    every.pop("topk_lens")
    want = sparse_mla.attend(**{**every, "out": None, "lse": None})
    for far in (97, 2**40, 2**63 - 1):
        out, _ = sparse_mla.attend(**{**every, "seq_lens": np.full(5, far), "validate": "mask"})
        np.testing.assert_array_equal(out, want[0])


def test_positions_at_the_ends_of_int64() -> None:
    """Arithmetic on the largest numbers does not wrap around into a valid entry."""
    far = np.array([2**63 - 1, -(2**63), 2**62, 2**63 - 2**20])
    for arguments in (
        paged(shard=(0, 2, 1), seq_lens=None),
        paged(query_positions=np.full(4, 2**63 - 1)),
        paged(indices=None, topk_lens=None, query_positions=np.array([2**63 - 1, -(2**63), 5, -1])),
        paged(query_positions=np.full(4, -(2**63))),
    ):
        if arguments["indices"] is not None:
            arguments["indices"] = np.tile(far, (4, 5))
        arguments["validate"] = "mask"
        clean = {name: value for name, value in arguments.items() if value is not None}
        clean["indices"] = arguments["indices"]
        keywords = {name: clean[name] for name in INDEXING if name in clean}
        (slots,) = reference.resolve(clean["kv_cache"], clean["indices"], **keywords)
        _, lse = sparse_mla.attend(**arguments)
        np.testing.assert_array_equal(np.isinf(lse[:, 0]), (slots < 0).all(axis=1))


def test_faults_of_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    arguments = to_framework(WORDS["slot"][0], "torch")
    arguments["out"] = torch.zeros_like(arguments["out"])
    fault = caught(arguments)
    assert str(fault) == WORDS["slot"][1]
    assert not arguments["out"].any()


def test_an_index_fault_is_an_ordinary_exception() -> None:
    """It can be made, caught as IndexError, and sent to another process."""
    fault = caught(WORDS["slot"][0])
    assert sparse_mla.IndexFault.__module__ == "sparse_mla"
    again = pickle.loads(pickle.dumps(fault))
    assert type(again) is sparse_mla.IndexFault
    assert str(again) == str(fault)
    assert (again.tensor, again.position, again.count) == ("indices", (3, 17), 1)
    assert isinstance(sparse_mla.IndexFault("made by hand"), IndexError)
