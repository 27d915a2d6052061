"""plan, devices, build_info: which kernel runs, and in how many parts."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest

import sparse_mla
import test_gpu_driver
from conftest import cpu_kernels
from test_gpu_driver import needs_kernels, run

fake = test_gpu_driver.fake

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


@pytest.mark.parametrize("kernel", ["any", "sm80", "sm90"])
def test_devices_are_listed_whatever_kernel_is_forced(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_MLA_KERNEL", kernel)
    assert sparse_mla.devices()[0]["kernel"] == cpu_kernels()[0]


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


# ---------------------------------------------------------------- for the GPU of the made-up driver


def planned(fake: Path, shapes: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """What plan says of each shape for a GPU."""
    code = f"import sparse_mla\nfor shape in {shapes!r}:\n"
    code += "    print(sparse_mla.plan(**shape, device='cuda:0'))\n"
    return [ast.literal_eval(line) for line in run(code, fake, **environment).splitlines()]


CACHES = [
    {"cache_format": "dense", "d_qk": 576},
    {"cache_format": "dense", "d_qk": 512},
    {"cache_format": "fp8_ds_mla", "d_qk": 576},
    {"cache_format": "fp8_ds_mla_norope", "d_qk": 512},
    {"cache_format": "fp8_tensor", "d_qk": 576},
]
SIZES = [
    {"batch": batch, "heads": heads, "topk": topk, "batch_invariant": batch_invariant}
    for batch, heads, topk in (
        (0, 1, 0),
        (1, 1, 0),
        (1, 16, 2048),
        (1, 128, 2051),
        (3, 5, 63),
        (16, 8, 2048),
        (300, 64, 130),
        (70_000, 24, 600),
    )
    for batch_invariant in (False, True)
]


@needs_kernels
def test_tensor_cores_run_whatever_is_made_for_them(fake: Path) -> None:
    """bfloat16 and float16 queries over each kind of cache, whatever the sizes; two caches of one
    kind. float32, other widths and two kinds at once are for the kernel that takes everything."""
    sm80 = [
        {**size, **cache, "dtype": dtype}
        for size, cache, dtype in itertools.product(SIZES, CACHES, ("bfloat16", "float16"))
    ]
    sm80 += [
        {**SHAPE, **cache, "extra_topk": 640, "extra_cache_format": cache["cache_format"]}
        for cache in CACHES
    ]
    everything = [{**size, **cache, "dtype": "float32"} for size in SIZES for cache in CACHES]
    everything += [{**SHAPE, **cache, "d_v": d_v} for cache in CACHES for d_v in (1, 256, 511)]
    everything += [{**SHAPE, "d_qk": d_qk, "d_v": 64} for d_qk in (64, 511, 513, 577)]
    everything += [{**SHAPE, "d_qk": 1024}]
    for one, other in (("dense", "fp8_ds_mla_norope"), ("fp8_ds_mla_norope", "dense")):
        both = {"cache_format": one, "extra_cache_format": other, "extra_topk": 128}
        everything.append({**SHAPE, "d_qk": 512, **both})
    for kernel, shapes in (("sm80", sm80), ("any", everything)):
        for shape, plan in zip(shapes, planned(fake, shapes), strict=True):
            assert plan["kernel"] == kernel, shape
    forced = planned(fake, sm80, SPARSE_MLA_KERNEL="any")
    assert {plan["kernel"] for plan in forced} == {"any"}


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_on_a_gpu(dtype: str, fake: Path) -> None:
    """Parts cover the entries; more than one is merged by a second launch, from a workspace of as
    much as their results and no more; batch_invariant does not look at the batch."""
    shapes = [{**size, **cache, "dtype": dtype} for size in SIZES for cache in CACHES]
    for shape, plan in zip(shapes, planned(fake, shapes), strict=True):
        splits, rows = plan["splits"], shape["batch"] * shape["heads"]
        assert 1 <= splits <= 64
        assert splits * plan["split_entries"] >= shape["topk"]
        assert plan["launches"] == (2 if splits > 1 else 1)
        assert plan["workspace_bytes"] == (splits > 1) * splits * rows * (512 + 2) * 4
    for cache, heads in itertools.product(CACHES, (5, 16, 20, 128)):
        shape = {**cache, "dtype": dtype, "heads": heads, "topk": 2051, "batch_invariant": True}
        plans = planned(
            fake,
            [{**shape, "batch": batch, "s_q": s_q} for batch in (1, 2, 70, 5000) for s_q in (1, 3)],
        )
        for plan in plans:
            for key in ("kernel", "splits", "split_entries", "head_tile"):
                assert plan[key] == plans[0][key]


CALLS = """
import numpy as np, sparse_mla
from fake_gpu import last_launch, tensor

def attend(cache=0, stride=576, q=(576,), d_v=512):
    queries = tuple(tensor(1, 16, width, dtype=np.float16) for width in q)
    slots = tensor(1, 8, dtype=np.int32)
    rows = tensor(4, 8, stride, offset=cache, dtype=np.float16)
    if stride > 576:
        rows.array = rows.array[..., :576]
    out, lse = tensor(1, 16, d_v, dtype=np.float16), tensor(1, 16)
    sparse_mla.attend(queries if len(q) > 1 else queries[0], rows, slots, out=out, lse=lse,
                      softmax_scale=1.0, head_dim_v=d_v)
    print(last_launch().kernel.decode())

"""


@needs_kernels
@pytest.mark.parametrize(
    ("call", "family"),
    [
        ("attend()", "sm80"),
        ("attend(cache=8)", "sm80"),
        ("attend(cache=1)", "any"),
        ("attend(stride=584)", "sm80"),
        ("attend(stride=577)", "any"),
        ("attend(q=(512, 64))", "sm80"),
        ("attend(q=(504, 72))", "any"),
        ("attend(d_v=256)", "any"),
    ],
)
def test_a_call_runs_on_what_its_memory_allows(call: str, family: str, fake: Path) -> None:
    """Copies of 16 bytes want rows that begin at such an address, and a pair is cut at 512."""
    assert run(CALLS + call, fake).startswith(family + "_")


PARTS = """
import numpy as np, sparse_mla
from fake_gpu import last_launch, tensor

q, rows = tensor(1, 16, 576, dtype=np.float16), tensor(4, 8, 576, dtype=np.float16)
out, lse = tensor(1, 16, 512), tensor(1, 16)
for topk in (8, 2048):
    slots = tensor(1, topk, dtype=np.int32)
    sparse_mla.attend(q, rows, slots, out=out, lse=lse, softmax_scale=1.0)
    print(last_launch().kernel.decode(), last_launch().overlaps)
"""


@needs_kernels
@pytest.mark.parametrize(
    ("compute", "kernel", "printed"),
    [
        ("80", "sm80", "sm80_fp16_576_16 0\nsm80_combine_many 0"),
        ("90", "sm80", "sm80_fp16_576_16 0\nsm80_combine_many 1"),
        ("90", "any", "any_attend 0\nany_combine 0"),
    ],
)
def test_launches_begin_early_where_the_gpu_can_and_the_kernel_waits(
    compute: str, kernel: str, printed: str, fake: Path
) -> None:
    environment = {"FAKE_CUDA_COMPUTE": compute, "SPARSE_MLA_KERNEL": kernel}
    assert run(PARTS, fake, **environment) == printed + "\n"


HOPPER = {"FAKE_CUDA_COMPUTE": "90"}
MANY = {"batch": 16, "heads": 128, "topk": 2048}


@needs_kernels
def test_hopper_kernels_run_where_they_are_asked_for(fake: Path) -> None:
    shapes = [
        MANY,
        {**MANY, "heads": 5, "batch": 1},
        {**MANY, "cache_format": "fp8_ds_mla", "topk": 63},
        {**MANY, "d_qk": 512, "cache_format": "fp8_ds_mla_norope", "batch_invariant": True},
        {**MANY, "cache_format": "fp8_ds_mla", "heads": 33},
        {**MANY, "cache_format": "fp8_ds_mla", "heads": 32},
        {**MANY, "cache_format": "fp8_ds_mla", "heads": 17},
        {**MANY, "cache_format": "fp8_ds_mla", "heads": 16},
        {**MANY, "d_qk": 512, "cache_format": "fp8_ds_mla_norope", "heads": 1},
    ]
    tiles = [32, 32, 64, 64, 64, 64, 64, 64, 64]  # entries
    head_tiles = [64, 64, 64, 64, 64, 32, 32, 16, 16]
    plans = planned(fake, shapes, **HOPPER, SPARSE_MLA_KERNEL="sm90")
    for plan, tile, heads in zip(plans, tiles, head_tiles, strict=True):
        assert plan["split_entries"] % tile == 0
        assert (plan["kernel"], plan["head_tile"]) == ("sm90", heads)


@needs_kernels
@pytest.mark.parametrize(
    ("kernel", "changed"),
    [
        ("sm90", {}),
        ("sm90", {"cache_format": "fp8_ds_mla"}),
        ("sm90", {"heads": 33, "batch": 6}),
        ("sm80", {"heads": 33, "batch": 5}),
        ("sm90", {"batch": 3}),
        ("sm80", {"batch": 2}),
        ("sm90", {"heads": 17, "batch": 9}),
        ("sm80", {"heads": 17, "batch": 8}),
        ("sm90", {"heads": 32, "batch": 9, "cache_format": "fp8_ds_mla"}),
        ("sm80", {"heads": 32, "batch": 8, "cache_format": "fp8_ds_mla"}),
        ("sm90", {"heads": 8, "batch": 8, "cache_format": "fp8_ds_mla"}),
        ("sm80", {"heads": 8, "batch": 7, "cache_format": "fp8_ds_mla"}),
        ("sm80", {"heads": 16, "batch": 70, "cache_format": "fp8_ds_mla"}),
        ("sm90", {"heads": 16, "batch": 116, "cache_format": "fp8_ds_mla"}),
        ("sm80", {"heads": 16, "batch": 116, "cache_format": "fp8_ds_mla", "topk": 511}),
        ("sm80", {"heads": 16, "batch": 4096}),
        ("sm90", {"topk": 512}),
        ("sm80", {"topk": 511}),
        ("sm80", {"batch_invariant": True}),
        ("sm80", {"cache_format": "fp8_tensor"}),
        ("sm80", {"dtype": "float16"}),
    ],
)
def test_hopper_kernels_run_where_they_pay(kernel: str, changed: dict, fake: Path) -> None:
    shapes = [{**MANY, **changed}]
    assert planned(fake, shapes, **HOPPER)[0]["kernel"] == kernel
    for compute in ("80", "89", "100", "120"):
        assert planned(fake, shapes, FAKE_CUDA_COMPUTE=compute)[0]["kernel"] == "sm80"


@needs_kernels
@pytest.mark.parametrize(
    ("cache", "heads", "tile"),
    [
        ({}, 128, 64),
        ({"cache_format": "fp8_ds_mla"}, 128, 64),
        ({"cache_format": "fp8_ds_mla"}, 32, 32),
        ({"cache_format": "fp8_ds_mla"}, 10, 16),
    ],
    ids=["dense", "packed", "packed-32", "packed-16"],
)
def test_hopper_kernels_cut_what_is_past_the_last_full_round(
    cache: dict, heads: int, tile: int, fake: Path
) -> None:
    """Of 116 multiprocessors. The workspace is for the pieces that are cut, a tile's heads each;
    where that would cost more than it spares, none is."""
    pieces_cut = {10: 10, 116: 0, 124: 8, 200: 0, 234: 2, 8192: 8192 % 116}
    of_row = -(-heads // tile)
    shapes = [{**MANY, **cache, "heads": heads, "batch": pieces // of_row} for pieces in pieces_cut]
    for plan, cut in zip(planned(fake, shapes, **HOPPER), pieces_cut.values(), strict=True):
        assert (plan["kernel"], plan["splits"] > 1) == ("sm90", cut > 0), plan
        assert plan["workspace_bytes"] == (cut > 0) * plan["splits"] * cut * tile * (512 + 2) * 4


BLOCKS = """
import functools, numpy as np, sparse_mla
from capsules import Producer
from fake_gpu import last_launch, tensor

bfloat16 = functools.partial(tensor, dtype=np.float16, kind=functools.partial(Producer, code=4))
caches = {"dense": bfloat16(4, 8, 576), "fp8_ds_mla": tensor(4, 8, 656, dtype=np.uint8)}
for name, rows, heads in (
    ("dense", 58, 70), ("dense", 62, 70), ("dense", 70, 70),
    ("fp8_ds_mla", 124, 20), ("fp8_ds_mla", 124, 10),
):
    q, slots = bfloat16(rows, heads, 576), tensor(rows, 2048, dtype=np.int32)
    out, lse = tensor(rows, heads, 512), tensor(rows, heads)
    sparse_mla.attend(
        q, caches[name], slots, out=out, lse=lse, softmax_scale=1.0, cache_format=name
    )
    plan = sparse_mla.plan(
        batch=rows, heads=heads, topk=2048, cache_format=name, device="cuda:0"
    )
    print(last_launch().kernel.decode(), last_launch().blocks, plan["splits"], plan["head_tile"])
    assert last_launch().overlaps  # both launches wait for the one before by themselves
"""


@needs_kernels
def test_blocks_are_for_all_pieces_and_merging_is_for_those_that_are_cut(fake: Path) -> None:
    """116 multiprocessors: a full round of 58 rows of two head tiles, and rows beyond it. What
    merges takes 8 warps a block, of which each has so many of a head's four runs as fit its eight
    loads; heads are those of whole tiles."""
    lines = [line.split() for line in run(BLOCKS, fake, **HOPPER).splitlines()]
    assert lines[0] == ["sm90_bf16_576_64", "116", "1", "64"]
    assert [int(line[3]) for line in lines] == [64, 64, 64, 32, 16]
    for (kernel, blocks, splits, tile), cut in zip(lines[1:], (8, 24, 8, 8), strict=True):
        runs = {1: 4, 2: 4, 3: 2, 4: 2}.get(int(splits), 1)
        if int(splits) > 8:
            assert (kernel, int(blocks)) == ("sm80_combine_many", cut * int(tile) * 4)
        else:
            assert (kernel, int(blocks)) == ("sm80_combine", cut * int(tile) * 4 // runs // 8)


@needs_kernels
def test_hopper_kernels_that_are_asked_for_elsewhere(fake: Path) -> None:
    code = (
        "import sparse_mla\n"
        "try:\n"
        "    sparse_mla.plan(batch=16, heads=128, topk=2048, device='cuda')\n"
        "except sparse_mla.UnsupportedError as error:\n"
        "    print(error)"
    )
    printed = run(code, fake, SPARSE_MLA_KERNEL="sm90")  # of compute capability 7.5
    assert printed.startswith("SPARSE_MLA_KERNEL: sm90 takes")
    assert "compute capability 9.0" in printed
