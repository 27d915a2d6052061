"""`check`: the counts of a report, the faults it names, and how it shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparse_mla
from sparse_mla import reference, report

ROOT = Path(__file__).parents[1]


def cache(num_blocks: int, block_size: int = 64, row: int = 576, dtype=np.float16) -> np.ndarray:
    """Of any size in the memory of one number."""
    return np.broadcast_to(np.zeros(row, dtype), (num_blocks, block_size, row))


def test_causes_are_those_of_the_kernels():
    header = (ROOT / "cuda" / "params.h").read_text()
    body = re.search(r"enum smla_cause \{(.*?)\};", header, re.S).group(1)
    names = re.findall(r"SMLA_(\w+)", re.sub(r"/\*.*?\*/", "", body, flags=re.S))
    assert names[report.PADDING] == "PADDING"
    for numbers, prefix in ((report.MASKED, ""), (report.FAULTY, "FAULT_")):
        for number, name in numbers.items():
            assert names[number] == prefix + name.upper()
    assert names[report.CAUSES] == "FAULT_TOPK"


def test_slots():
    indices = np.array([[0, 5, 5, -1, 127], [5, -1, -1, -1, -1], [-1, -1, -1, 9, 9]])
    found = sparse_mla.check(cache(2), indices, topk_lens=np.array([5, 5, 3]))
    assert found
    assert found.ok
    assert (found.rows, found.empty_rows, found.fault_count, found.faults) == (3, 1, 0, ())
    (source,) = found.sources
    assert source.name == "kv_cache"
    assert (source.rows, source.entries, source.valid, source.padding) == (3, 15, 5, 8)
    assert source.masked == {"past_topk_len": 2}
    assert source.faulty == {}
    assert source.duplicates == 1
    assert (source.distinct_slots, source.distinct_blocks) == (3, 2)
    assert (source.unallocated_blocks, source.shared_blocks) == (None, None)
    assert (source.bytes_read, source.distinct_bytes) == (5 * 1152, 3 * 1152)
    assert found.counts.tolist() == source.counts.tolist() == [4, 1, 0]


def test_positions():
    table = np.array([[3, 1, -1, 2], [7, 3, 5, -1]])
    indices = np.array([[0, 64, 130, 192, 255, 70, 250], [0, 64, 128, 191, 192, -1, 64]])
    found = sparse_mla.check(
        cache(8),
        indices,
        block_table=table,
        seq_lens=np.array([251, 192]),
        query_positions=np.array([200, 191]),
    )
    assert found.ok
    (source,) = found.sources
    assert source.masked == {"after_query": 3, "unallocated": 1}
    assert source.valid == 9
    assert source.duplicates == 1
    assert source.shared_blocks == 1
    assert source.unallocated_blocks == 1  # the last block of request 1 is past its length
    assert found.counts.tolist() == [4, 5]


def test_masks_of_rows_and_shards():
    table = np.array([[0, 1]])
    indices = np.array([[0, 16, 32, 48], [0, 1, 2, 3]])
    found = sparse_mla.check(
        cache(2, 16),
        indices,
        block_table=table,
        request_ids=np.array([0, -1]),
        seq_lens=np.array([40]),
        shard=(0, 2, 16),
    )
    (source,) = found.sources
    assert found.ok
    assert source.masked == {"past_seq_len": 1, "other_shard": 1, "padding_row": 4}
    assert found.counts.tolist() == [2, 0]


def test_all_positions():
    table = np.array([[4, 2, 0], [1, -1, 3]])
    found = sparse_mla.check(cache(5, 16), None, block_table=table, seq_lens=np.array([20, 33]))
    (source,) = found.sources
    assert (source.entries, source.valid, source.padding) == (53, 37, 0)
    assert source.masked == {"unallocated": 16}
    assert source.unallocated_blocks == 1
    assert found.counts.tolist() == [20, 17]
    found = sparse_mla.check(
        cache(5, 16), None, block_table=table, seq_lens=np.array([20, 33]), max_seq_len=32
    )
    assert [str(fault) for fault in found.faults] == ["seq_lens[1] = 33 is outside [0, 32]"]


def test_extra_cache():
    found = sparse_mla.check(
        cache(2),
        np.array([[1, -1], [-1, -1], [-1, -1]]),
        extra_kv_cache=cache(4, 2, 656, np.uint8),
        extra_indices=np.array([[-1, 3, 3], [-1, -1, -1], [0, -1, -1]]),
        extra_cache_format="fp8_ds_mla",
    )
    assert found.ok
    assert [source.name for source in found.sources] == ["kv_cache", "extra_kv_cache"]
    assert [source.valid for source in found.sources] == [1, 3]
    assert [source.empty_rows for source in found.sources] == [2, 1]
    assert found.sources[1].bytes_read == 3 * 656
    assert found.empty_rows == 1
    assert found.counts.tolist() == [3, 0, 1]
    assert "extra_kv_cache" in str(found)


FAULTS = {
    "index": (
        {"indices": [[0, -2], [1, 2]]},
        "indices[0, 1] = -2 is negative and not the padding -1",
    ),
    "slot": (
        {"indices": [[0, 1], [1, 128]]},
        "indices[1, 1] = 128 is outside the cache of 128 slots",
    ),
    "wide": (
        {"indices": [[0, 1], [4294967301, 1]]},
        "indices[1, 0] = 4294967301 is outside the cache of 128 slots",
    ),
    "logical": (
        {"indices": [[0, 128], [1, 2]], "block_table": [[0, 1], [1, 0]]},
        "indices[0, 1] = 128 is past the 128 positions of block_table",
    ),
    "logical of a shard": (
        {"indices": [[64, 320], [192, 66]], "block_table": [[0, 1], [1, 0]], "shard": (1, 2, 64)},
        "indices[0, 1] = 320 is past the 320 positions of block_table",
    ),
    "block": (
        {"indices": [[0, 70], [1, 2]], "block_table": [[0, 2], [1, 0]]},
        "block_table[0, 1] = 2 is outside the cache of 2 blocks",
    ),
    "block below": (
        {"indices": [[0, 1], [1, 2]], "block_table": [[0, 1], [-2, 0]]},
        "block_table[1, 0] = -2 is outside the cache of 2 blocks (met 2 times)",
    ),
    "request": (
        {"indices": [[0, 1], [1, 2]], "block_table": [[0, 1]], "request_ids": [0, 1]},
        "request_ids[1] = 1 is outside the 1 requests of block_table",
    ),
    "topk_lens": (
        {"indices": [[0, 1], [1, 2]], "topk_lens": [3, 1]},
        "topk_lens[0] = 3 is outside [0, 2]",
    ),
    "topk_lens of a batch": (
        {"indices": [[[0, 1], [1, 2]]], "topk_lens": [-1]},
        "topk_lens[0] = -1 is outside [0, 2] (met 2 times)",
    ),
    "seq_lens": (
        {"indices": [[0, 1], [1, 2]], "block_table": [[0, 1], [1, 0]], "seq_lens": [128, 129]},
        "seq_lens[1] = 129 is outside [0, 128]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    arrays, text = FAULTS[name]
    arrays = {key: value if key == "shard" else np.array(value) for key, value in arrays.items()}
    indices = arrays.pop("indices")
    found = sparse_mla.check(cache(2), indices, **arrays)
    assert not found
    assert found.fault_count == 1
    assert [str(fault) for fault in found.faults] == [text]

    q = np.zeros((*indices.shape[:-1], 1, 576), np.float16)
    with pytest.raises(sparse_mla.IndexFault) as caught:
        sparse_mla.attend(q, cache(2), indices, softmax_scale=1.0, validate="raise", **arrays)
    (fault,) = found.faults
    for attribute in ("tensor", "position", "value", "bound"):
        assert getattr(fault, attribute) == getattr(caught.value, attribute)
    assert str(caught.value).startswith(re.sub(r" \(met.*", "", text))


def test_a_length_that_no_row_uses_is_no_fault():
    found = sparse_mla.check(
        cache(2),
        np.array([[0, 1]]),
        block_table=np.array([[0, 1], [0, 1]]),
        request_ids=np.array([0]),
        seq_lens=np.array([128, 999]),
    )
    assert found.ok


def test_many_faults_are_counted_and_few_are_shown():
    indices = np.full((300, 8), 999)
    found = sparse_mla.check(cache(2), indices)
    assert found.fault_count == 2400
    assert len(found.faults) == report.KEPT_FAULTS
    assert found.faults[-1].position == (12, 3)
    assert found.sources[0].faulty == {"slot": 2400}
    shown = str(found)
    assert shown.count("\n  ! indices") == report.PRINTED_FAULTS
    assert "and 2,390 more" in shown
    assert "and 2,390 more" in found._repr_html_()


def random_problem(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, dict]:
    """Arrays of any meaning, a few of their values at fault."""

    def spoiled(array, values, odds=0.02):
        return np.where(rng.random(array.shape) < odds, rng.choice(values, array.shape), array)

    requests, s_q, topk = rng.integers(1, 4), rng.integers(1, 4), rng.integers(0, 20)
    block_size, max_blocks, num_blocks = rng.integers(1, 20, 3)
    leading = (requests * s_q,) if rng.random() < 0.5 else (requests, s_q)
    arrays = {}
    if rng.random() < 0.7:
        table = rng.integers(-1, num_blocks, (requests, max_blocks))
        arrays["block_table"] = spoiled(table, [-2, num_blocks], rng.choice([0, 0.05]))
        size = rng.integers(1, 4)
        if rng.random() < 0.4:
            arrays["shard"] = (int(rng.integers(size)), int(size), int(rng.integers(1, 9)))
        bound = max_blocks * block_size
        if rng.random() < 0.6:
            arrays["seq_lens"] = spoiled(rng.integers(0, bound + 1, requests), [-1, 10**9], 0.1)
        if len(leading) == 1:
            ids = rng.integers(-1, requests, leading)
            arrays["request_ids"] = spoiled(ids, [-2, requests], 0.05)
        if rng.random() < 0.5:
            arrays["query_positions"] = rng.integers(0, bound, leading)
    else:
        bound = num_blocks * block_size
    indices = spoiled(rng.integers(-1, bound, (*leading, topk)), [-7, bound], rng.choice([0, 0.05]))
    if rng.random() < 0.5:
        arrays["topk_lens"] = spoiled(rng.integers(0, topk + 1, leading), [-1, topk + 1])
    return cache(num_blocks, block_size, 8, np.float32), indices, arrays


@pytest.mark.parametrize("seed", range(60))
def test_random_problems_against_the_reference(seed):
    kv_cache, indices, arrays = random_problem(np.random.default_rng(seed))
    (slots,) = reference.resolve(kv_cache, indices, **arrays)
    found = sparse_mla.check(kv_cache, indices, **arrays)
    (source,) = found.sources
    assert source.entries == indices.size
    parts = (source.valid, source.padding, *source.masked.values(), *source.faulty.values())
    assert sum(parts) == source.entries
    assert np.array_equal(found.counts, (slots >= 0).sum(-1))
    assert source.distinct_slots == np.unique(slots[slots >= 0]).size
    for number, name in {**report.MASKED, **report.FAULTY}.items():
        entries = {**source.masked, **source.faulty}.get(name, 0)
        assert entries == np.count_nonzero(slots == -number)
    repeats = 0
    for row in slots.reshape(found.rows, slots.shape[-1]):
        valid = row[row >= 0]
        repeats += valid.size - np.unique(valid).size
    assert source.duplicates == repeats

    first = reference.fault(kv_cache, indices, **arrays)
    assert found.ok == (first is None)
    if first is not None:
        fault = found.faults[0]
        assert (fault.tensor, fault.position, fault.value) == (
            first.tensor,
            first.position,
            first.value,
        )


def test_a_cache_with_more_slots_than_marks(monkeypatch):
    indices = np.random.default_rng(0).integers(0, 128, (5, 90))
    found = sparse_mla.check(cache(2), indices)
    monkeypatch.setattr(report, "MOST_MARKS", 100)
    assert sparse_mla.check(cache(2), indices).to_dict() == found.to_dict()


def test_other_frameworks():
    torch = pytest.importorskip("torch")
    table = np.array([[3, 1, -1, 2]], np.int32)
    indices = np.array([[0, 64, 130, 999]])
    lengths = np.array([200])
    kept = sparse_mla.check(cache(4), indices, block_table=table, seq_lens=lengths)
    found = sparse_mla.check(
        torch.zeros(4, 64, 576, dtype=torch.bfloat16),
        torch.from_numpy(indices),
        block_table=torch.from_numpy(table),
        seq_lens=torch.from_numpy(lengths),
    )
    assert found.to_dict() == kept.to_dict()


def test_no_rows():
    found = sparse_mla.check(cache(2), np.zeros((0, 16), np.int32))
    assert found.ok
    assert found.rows == found.sources[0].entries == 0
    assert str(found).startswith("0 rows: no faults")
    found = sparse_mla.check(cache(2), np.zeros((3, 0), np.int32))
    assert (found.rows, found.empty_rows) == (3, 3)


def test_text():
    indices = np.array([[0, 5, 5, -1, 127], [5, -1, -1, -1, 128]])
    found = sparse_mla.check(cache(2), indices)
    assert str(found).splitlines() == [
        "2 rows: 1 fault",
        "  entries                              10",
        "    valid                               5",
        "    padding (-1)                        4",
        "    faulty                              1",
        "  keys per row         1 to 4, median 2.5",
        "  rows without keys                     0",
        "  duplicates in a row                   1",
        "  distinct slots                        3",
        "  distinct blocks                       2",
        "  bytes read                       5.8 kB",
        "    of them distinct               3.5 kB",
        "  ! indices[1, 4] = 128 is outside the cache of 128 slots",
    ]


def test_html_is_escaped_and_uses_no_colour_of_the_page():
    found = sparse_mla.check(cache(2), np.array([[0, 999]]))
    fault = report.Fault("<b>&", (0,), 1, 1, "<script>")
    spoiled = report.Report(1, 0, found.sources, (fault,), 1, found.counts)
    text = spoiled._repr_html_()
    assert "<script>" not in text
    assert "&lt;b&gt;&amp;[0] = 1 &lt;script&gt;" in text
    assert not re.search(r"background(-color)?:(?!none)", text)
    assert re.findall(r"[^-]color:(\w+)", text) == ["inherit"]
    for tag in ("table", "tr", "td", "th", "ul", "li", "div"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>")


def test_dict_is_json():
    indices = np.array([[0, -2], [1, 2]])
    found = sparse_mla.check(cache(2), indices).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["ok"] is False
    assert found["faults"][0]["position"] == [0, 1]
    assert found["sources"][0]["valid_per_row"] == {"min": 1, "median": 1.5, "max": 2}


def test_bad_arguments_raise_as_attend_does():
    with pytest.raises(TypeError, match="indices"):
        sparse_mla.check(cache(2), np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="seq_lens: needs block_table"):
        sparse_mla.check(cache(2), np.zeros((2, 4), np.int32), seq_lens=np.array([1, 2]))
    with pytest.raises(TypeError, match="sequence_lengths"):
        sparse_mla.check(cache(2), np.zeros((2, 4), np.int32), sequence_lengths=np.array([1, 2]))


def test_without_numpy():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import sparse_mla\n"
        "try: sparse_mla.check(None, None)\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sparse-mla[numpy]" in run.stdout
