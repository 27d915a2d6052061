"""plan, devices, build_info: which kernel runs, and in how many parts."""

from __future__ import annotations

import itertools

import pytest

import sparse_mla
from conftest import cpu_kernels

SHAPE = {"batch": 4, "heads": 16, "topk": 2048}


def test_says_what_attend_does() -> None:
    plan = sparse_mla.plan(**SHAPE)
    assert set(plan) == {
        "kernel",
        "splits",
        "split_entries",
        "head_tile",
        "launches",
        "workspace_bytes",
    }
    assert plan["kernel"] == cpu_kernels()[0] == sparse_mla.devices()[0]["kernel"]
    assert plan["launches"] == 0


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_splits_cover_the_entries(batch_invariant: bool) -> None:
    for batch, heads, topk, extra in itertools.product(
        (0, 1, 3, 70, 5000), (1, 7, 16, 128, 256), (0, 1, 63, 512, 2051, 100_000), (0, 640)
    ):
        plan = sparse_mla.plan(
            batch=batch, heads=heads, topk=topk, extra_topk=extra, batch_invariant=batch_invariant
        )
        assert plan["splits"] >= 1
        assert plan["splits"] * plan["split_entries"] >= max(topk, extra)
        assert 1 <= plan["head_tile"] <= heads
        assert 0 <= plan["workspace_bytes"] < 2**30


def test_batch_invariant_does_not_look_at_the_batch() -> None:
    plans = [
        sparse_mla.plan(batch=batch, s_q=s_q, heads=16, topk=2048, batch_invariant=True)
        for batch, s_q in ((1, 1), (2, 1), (70, 1), (1, 70), (70_000, 1))
    ]
    for plan in plans:
        assert [plan[key] for key in ("kernel", "splits", "split_entries", "head_tile")] == [
            plans[0][key] for key in ("kernel", "splits", "split_entries", "head_tile")
        ]


def test_one_row_is_split_and_many_are_not() -> None:
    assert sparse_mla.plan(batch=1, heads=16, topk=2048)["splits"] > 1
    assert sparse_mla.plan(batch=1000, heads=16, topk=2048)["splits"] == 1


@pytest.mark.parametrize("kernel", cpu_kernels())
def test_kernel_can_be_forced(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_KERNEL", kernel)
    assert sparse_mla.plan(**SHAPE)["kernel"] == kernel
    assert sparse_mla.devices()[0]["kernel"] == kernel


def test_every_dtype_and_format() -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        for name, fmt in sparse_mla.cache_formats().items():
            d_qk = fmt["d_qk"] or 576
            plan = sparse_mla.plan(**SHAPE, dtype=dtype, cache_format=name, d_qk=d_qk)
            assert plan["kernel"] in cpu_kernels()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"batch": -1}, ValueError, "batch: expected 0 to"),
        ({"heads": 0}, ValueError, "heads: expected 1 to"),
        ({"heads": 257}, ValueError, "heads: expected 1 to 256"),
        ({"topk": 1.5}, TypeError, "topk: expected an int"),
        ({"topk": -1}, ValueError, "topk: expected 0 to"),
        ({"d_v": 0}, ValueError, "d_v: expected 1 to"),
        ({"d_v": 577}, ValueError, "d_v: expected 1 to"),
        ({"cache_format": "fp8_ds_mla", "d_qk": 512}, ValueError, "d_qk: expected 576"),
        ({"extra_cache_format": "dense"}, ValueError, "extra_cache_format: needs extra_topk"),
        ({"dtype": "float64"}, ValueError, "dtype: expected 'bfloat16', 'float16' or 'float32'"),
        ({"cache_format": "fp4"}, ValueError, "cache_format: expected one of dense"),
        ({"device": "tpu"}, ValueError, "device: expected 'cpu', 'cuda'"),
        ({"rows": 1}, TypeError, "plan() got an unexpected keyword argument 'rows'"),
    ],
)
def test_errors(changes: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        sparse_mla.plan(**{**SHAPE, **changes})
    assert str(raised.value).startswith(text), str(raised.value)


def test_required_arguments() -> None:
    for name in SHAPE:
        with pytest.raises(TypeError, match=name):
            sparse_mla.plan(**{key: value for key, value in SHAPE.items() if key != name})


def test_kernels_are_listed_best_first() -> None:
    kernels = sparse_mla.build_info()["cpu_kernels"]
    assert kernels[-1]["name"] == "cpu_plain"
    assert kernels[-1]["runs"] is True
    assert all(set(kernel) == {"name", "isa", "runs"} for kernel in kernels)


def test_devices_begin_with_the_cpu() -> None:
    cpu = sparse_mla.devices()[0]
    assert cpu["device"] == "cpu"
    assert cpu["threads"] >= 1


def test_load_of_the_cpu_is_nothing() -> None:
    assert sparse_mla.load("cpu") is None
    assert sparse_mla.load() is None
    assert sparse_mla.synchronize("cpu") is None
