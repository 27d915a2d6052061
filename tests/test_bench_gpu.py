"""The benchmark of a GPU: its index sets, its arithmetic and its table, on arrays in host memory
that stand in for a GPU's; and a few cases on a real one."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import sparse_mla
from sparse_mla import _core, bench, bench_device, bench_gpu
from sparse_mla.bench_gpu import GpuCase

pytest.importorskip("ml_dtypes")

LIMITS = {"matrix_flops": 1e12, "launch_seconds": 1e-6}


class Host:
    """Host memory in the place of a GPU's: a graph is a list of calls."""

    def record(self, call, count):
        def replay():
            for i in range(count):
                call(i)

        call(0)
        return replay

    def seconds(self, replay):
        begin = time.perf_counter()
        replay()
        return time.perf_counter() - begin

    def facts(self):
        return {"name": "no GPU", "l2_bytes": 0, "framework": self.framework, "cuda": "0.0"}


class NumpyDevice(Host, bench_device.CupyDevice):
    """NumPy, which CuPy repeats."""

    def __init__(self) -> None:
        np.random.seed(0)
        self.cupy = np

    def download(self, array):
        return np.array(array)


class TorchCpuDevice(Host, bench_device.TorchDevice):
    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        self.device = self.torch.device("cpu")
        self.torch.manual_seed(0)


HOSTS = [NumpyDevice, TorchCpuDevice]


@pytest.fixture(params=HOSTS, ids=["cupy", "torch"])
def device(request):
    return request.param()


def exclusive_or(kv_cache, slots):
    rows = np.ascontiguousarray(kv_cache.reshape(-1, kv_cache.shape[-1])[slots])
    return np.bitwise_xor.reduce(rows.view(np.int32).ravel())


def gather_on_host(kv_cache, indices, out):
    out[...] = kv_cache.reshape(-1, kv_cache.shape[-1])[indices].shape[0]


@pytest.fixture
def host(monkeypatch, device):
    """The whole command on a host's arrays, with little to do."""
    found = {**bench_gpu.info.facts(), "devices": [{}, {"multiprocessors": 1}]}
    plan = {"kernel": "any", "launches": 2}
    monkeypatch.setattr(bench_gpu, "open_device", lambda *arguments: device)
    monkeypatch.setattr(bench_gpu, "plan_of", lambda case, device: plan)
    monkeypatch.setattr(bench_gpu.info, "facts", lambda: found)
    monkeypatch.setattr(sparse_mla, "load", lambda device: None)
    monkeypatch.setattr(_core, "gather", gather_on_host)
    monkeypatch.setattr(bench_device, "MATRIX", 8)
    monkeypatch.setattr(bench_gpu, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(bench_gpu, "COLD_BYTES", 1)
    monkeypatch.setattr(bench_gpu, "FEWEST_CALLS", 2)
    monkeypatch.setattr(bench_gpu, "REPLAYS", 2)


def run(*argv: str) -> int:
    return bench.main(["--device", "cuda", *argv])


# ------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        (GpuCase("bf16", 16, 1, 2048, "uniform"), 114),
        (GpuCase("fp8", 16, 1, 2048, "uniform"), 200),
        (GpuCase("fp8", 16, 16, 2048, "uniform"), 16),
        (GpuCase("bf16", 128, 256, 2048, "uniform"), 16),
        (GpuCase("fp8", 16, 1, 2048, "uniform", kind="faults"), 200),
    ],
)
def test_calls_leave_the_cache_cold(case, calls):
    assert case.calls == calls
    assert case.calls * case.listed * case.row_bytes >= 256 << 20


def test_what_a_call_costs():
    case = GpuCase("fp8", 64, 128, 2048, "uniform", s_q=2)
    assert case.rows == 256
    assert case.bytes == 256 * 2048 * 656
    assert case.flops == 2 * 256 * 2048 * 64 * (576 + 512)
    assert case.context == 32768
    uneven = GpuCase("fp8", 64, 5, 2048, "uniform", kind="uneven")
    assert uneven.entries == 3 * 2048 + 2 * 100
    assert GpuCase("fp8", 64, 4, 64, "uniform", kind="uneven").entries == 4 * 64
    assert GpuCase("fp8", 64, 5, 2048, "uniform", kind="faults").bytes == 0


def test_floor_is_the_longer_of_reading_and_computing():
    case = GpuCase("fp8", 1, 1, 1, "uniform")
    products = case.flops / 1e12 + 1e-6
    assert bench_gpu.floor_seconds(case, 1.0, LIMITS) == 1.0
    assert bench_gpu.floor_seconds(case, 0.0, LIMITS) == products


def result_of(microseconds: float, **changed) -> dict:
    case = {"format": "fp8", "heads": 64, "batch": 1, "topk": 2048, "pattern": "uniform"}
    case |= {"s_q": 1, "kind": "slots", **changed}
    return {"case": case, "median_seconds": {"sparse_mla": microseconds / 1e6}}


def test_the_summary_has_the_plain_cases_by_heads_and_rows():
    results = [
        result_of(11.04),
        result_of(22.5, batch=16),
        result_of(15.0, heads=128),
        result_of(1.0, kind="table"),
        result_of(2.0, s_q=2),
        result_of(3.0, topk=512),
    ]
    assert bench_gpu.summary(results) == (
        "\nuniform indices, topk 2048, µs\n\n"
        "| cache | heads | 1 row | 16 rows |\n"
        "|---|---|---|---|\n"
        "| fp8 | 64 | 11.0 | 22.5 |\n"
        "| fp8 | 128 | 15.0 |  |\n"
    )
    assert bench_gpu.summary(results[:1]) == ""


def test_groups():
    table = list(bench_gpu.cases(bench_gpu.parse([])))
    assert len(table) == len(set(table)) == 2 * 2 * 5 * 5
    assert [case.format for case in table] == ["bf16"] * 50 + ["fp8"] * 50
    everything = list(bench_gpu.cases(bench_gpu.parse(["--groups", "all"])))
    assert len(everything) == len(set(everything)) > 200
    assert {case.kind for case in everything} == set(bench_gpu.KINDS)
    assert {24, 70, 100, 133, 200, 8192} <= {case.batch for case in everything}
    assert {24, 96} <= {case.heads for case in everything}
    assert {512, 1024, 2048, 16384} == {case.topk for case in everything}
    assert {1, 2, 4} == {case.s_q for case in everything}
    quick = list(bench_gpu.cases(bench_gpu.parse(["--quick"])))
    assert len(quick) == 12
    argv = ["--groups", "uneven", "--heads", "6", "--batch", "3", "--formats", "fp8"]
    assert list(bench_gpu.cases(bench_gpu.parse(argv))) == [
        GpuCase("fp8", 6, 3, 2048, "uniform", kind="uneven")
    ]


# ------------------------------------------------------------------------------ index sets


@pytest.mark.parametrize("size", [64, 1 << 13, 1 << 22])
def test_scattered_numbers_stay_distinct(device, size):
    numbers = device.arange(min(size, 5000))
    rows = device.download(bench_gpu.scattered(device, numbers, 3, size))
    assert rows.min() >= 0
    assert rows.max() < size
    assert all(np.unique(row).size == row.size for row in rows)
    assert not np.array_equal(rows[0], rows[1])
    if size > 5000:  # and they lie everywhere
        assert np.all(np.histogram(rows, 16, (0, size))[0] > rows.size / 16 * 0.8)


def test_trace_positions(device):
    positions = device.download(bench_gpu.trace_positions(device, 20, 2048))
    gaps = np.diff(np.sort(positions, axis=1))
    assert gaps.min() >= 1
    assert np.median(gaps) == 1
    assert 46 <= np.percentile(gaps, 95) <= 52
    assert 0.86 <= np.mean(np.diff(positions) > 0) <= 0.88
    assert 8192 < positions.max() < 32768


@pytest.mark.parametrize("kind", bench_gpu.KINDS)
@pytest.mark.parametrize("pattern", bench.PATTERNS)
@pytest.mark.parametrize("s_q", [1, 2])
def test_index_sets(device, kind, pattern, s_q):
    tokens = 1 << 16
    case = GpuCase("fp8", 2, 6, 512, pattern, s_q, kind)
    each = bench_gpu.index_set(device, case, tokens)
    slots, indices = device.download(each.slots), device.download(each.indices)
    assert slots.shape == indices.shape == (6 * s_q, 512)
    assert slots.dtype == indices.dtype == np.int32
    assert slots.min() >= 0
    assert slots.max() < tokens
    assert all(np.unique(row).size == 512 for row in slots)
    arguments = {}
    if each.block_table is not None:
        arguments["block_table"] = device.download(each.block_table)
        arguments["request_ids"] = np.arange(6 * s_q) // s_q
    cache = np.broadcast_to(np.zeros(656, np.uint8), (tokens // 64, 64, 656))
    (resolved,) = _core.resolve(cache, indices, cache_format="fp8_ds_mla", **arguments)
    if kind == "faults":
        assert np.all(resolved < 0)
    else:
        np.testing.assert_array_equal(resolved, slots)
        assert bench_gpu.counted(device, case, each).shape == (case.entries,)
    if kind == "prefill":
        assert np.unique(slots // 64).size <= case.context // 64


# ------------------------------------------------------------------------------ the command


def test_table_and_file(host, tmp_path, capsys):
    file = tmp_path / "times.json"
    argv = ["--groups", "all", "--heads", "2", "--batch", "3", "--topk", "16", "--tokens", "4096"]
    assert run(*argv, "--json", str(file)) == 0
    captured = capsys.readouterr()
    report = json.loads(file.read_text())
    number = len(report["results"])
    assert f"[{number}/{number}]" in captured.err
    table = captured.out.splitlines()
    columns = next(i for i, text in enumerate(table) if text.startswith("cache "))
    assert len(table) == columns + 1 + number
    widths = {len(bench_gpu.COLUMNS), len(table[columns])}
    assert {len(text) for text in table[columns:]} == widths
    assert {each["case"]["kind"] for each in report["results"]} == set(bench_gpu.KINDS)
    for result in report["results"]:
        case = GpuCase(**result["case"])
        assert result["index_sets"] == case.calls == 2
        assert len(result["seconds"]["sparse_mla"]) == bench_gpu.REPLAYS
        assert result["bytes"] == case.entries * case.row_bytes
        assert result["floor_seconds"] >= result["gather_seconds"] >= 0
        assert (result["gather_seconds"] > 0) == (case.kind != "faults")
    assert set(report["machine"]["ceilings"]) == {
        "copy_bytes_per_second",
        "matrix_flops",
        "matrix_dtype",
        "launch_seconds",
    }


@pytest.mark.parametrize("which", [0, 1])
def test_no_time_for_a_wrong_result(host, capsys, monkeypatch, which):
    attend = sparse_mla.attend

    def wrong(*arguments, **options):
        results = attend(*arguments, **options)
        results[which][...] *= 1.1
        return results

    monkeypatch.setattr(sparse_mla, "attend", wrong)
    argv = ["--heads", "2", "--batch", "3", "--topk", "16", "--tokens", "4096"]
    assert run(*argv) == 1
    captured = capsys.readouterr()
    assert f"{('out', 'lse')[which]} of sampled row 0 is " in captured.err
    assert "uniform" not in captured.out


def test_no_time_for_a_result_that_is_not_written(host, capsys, monkeypatch):
    calls = []

    def lazy(q, *arguments, **options):
        calls.append(q)

    monkeypatch.setattr(sparse_mla, "attend", lazy)
    assert run("--heads", "2", "--batch", "3", "--topk", "16", "--tokens", "4096") == 1
    assert "is nan" in capsys.readouterr().err
    assert calls


@pytest.mark.parametrize(
    "argv",
    [["--device", "gpu"], ["--device", "cuda:x"], ["--device", "cuda", "--tokens", "5000"]],
)
def test_bad_usage(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(argv)
    assert caught.value.code == 2
    assert "usage: python -m sparse_mla bench" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in (*bench_gpu.GROUPS, *bench_gpu.KINDS):
        assert f"  {name} " in text


def test_without_a_framework(monkeypatch):
    monkeypatch.setattr(bench_device, "find_spec", lambda name: None)
    with pytest.raises(bench_device.NoFramework, match="pip install torch, or cupy-cuda13x"):
        bench_device.open_device("cuda", None, 0)


@pytest.mark.skipif(len(sparse_mla.devices()) > 1, reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert run("--quick") == 2
    assert capsys.readouterr().err.startswith("bench: ")


# ------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("framework", bench_device.FRAMEWORKS)
def test_on_a_gpu(framework, tmp_path, monkeypatch):
    pytest.importorskip(framework)
    monkeypatch.setattr(bench_gpu, "COLD_BYTES", 1)
    file = tmp_path / "times.json"
    argv = ["--groups", "all", "--heads", "2", "--batch", "3", "--topk", "64", "--tokens", "65536"]
    assert run(*argv, "--framework", framework, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert {each["case"]["kind"] for each in report["results"]} == set(bench_gpu.KINDS)
    for result in report["results"]:
        assert 0 < result["median_seconds"]["sparse_mla"] < 1
        assert ("torch" in result["seconds"]) == (
            framework == "torch" and result["case"]["kind"] == "slots"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("bytes_per_row", [16, 48, 656, 1152, 2304])
@pytest.mark.parametrize("blocks", [1, 7, 1584])
def test_gather_reads_every_row(bytes_per_row, blocks):
    torch = pytest.importorskip("torch")
    cache = torch.randint(256, (1000, bytes_per_row), dtype=torch.uint8)
    slots = torch.randint(1000, (4099,), dtype=torch.int32)
    out = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    _core.gather(cache.cuda(), slots.cuda(), out)
    read = np.bitwise_xor.reduce(out.cpu().numpy())
    assert read == exclusive_or(cache.numpy(), slots.numpy())


@pytest.mark.gpu
def test_gather_leaves_out_what_is_not_there():
    torch = pytest.importorskip("torch")
    cache = torch.randint(256, (10, 656), dtype=torch.uint8)
    slots = torch.tensor([3, -1, 10, 2**31 - 1, -(2**31), 7], dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    _core.gather(cache.cuda(), slots.cuda(), out)
    assert np.bitwise_xor.reduce(out.cpu().numpy()) == exclusive_or(cache.numpy(), [3, 7])


def test_gather_is_for_gpus():
    cache, slots = np.zeros((4, 656), np.uint8), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="kv_cache: expected a tensor on a GPU"):
        _core.gather(cache, slots, np.zeros(4, np.int32))
