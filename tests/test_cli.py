"""`python -m sparse_mla`: what each command prints and the code it exits with."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import sparse_mla
from sparse_mla import __main__ as cli
from sparse_mla import bench, info


def test_as_a_module():
    run = subprocess.run(
        [sys.executable, "-m", "sparse_mla", "--version"], capture_output=True, text=True
    )
    assert run.returncode == 0
    assert run.stdout == f"sparse_mla {sparse_mla.__version__}\n"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("info", "demo", "check", "bench"):
        assert f"  {command} " in text


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"python -m sparse_mla {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["attend"], ["check"], ["bench", "--heads", "0"]])
def test_bad_usage(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: python -m sparse_mla" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "code"), [("info", 0), ("check a.npy", 2), ("bench", 2)])
def test_without_numpy(command, code):
    block = "import sys; sys.modules['numpy'] = sys.modules['ml_dtypes'] = None; "
    start = f"from sparse_mla.__main__ import main; sys.exit(main({command.split()}))"
    run = subprocess.run([sys.executable, "-c", block + start], capture_output=True, text=True)
    assert run.returncode == code
    assert "Traceback" not in run.stderr
    assert code == 0 or "pip install 'sparse-mla[numpy]'" in run.stderr


# ------------------------------------------------------------------------------ info


def test_info(capsys, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_NUM_THREADS", "3")
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"sparse_mla {sparse_mla.__version__}, Python ")
    for name in (*sparse_mla.cache_formats(), *info.ENVIRONMENT, *info.FRAMEWORKS):
        assert name in text
    for kernel in sparse_mla.build_info()["cpu_kernels"]:
        assert kernel["name"] in text
        assert kernel["isa"] in text
    assert text.count(" chosen") == 1
    assert max(map(len, text.splitlines())) < 200


def test_info_for_programs(capsys):
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sparse_mla"] == sparse_mla.__version__
    assert found["versions"]["NumPy"] == np.__version__
    assert found["devices"][0]["device"] == "cpu"


# ------------------------------------------------------------------------------ check


def test_check_of_slots(tmp_path, capsys):
    np.save(tmp_path / "indices.npy", np.array([[0, 5, 127, -1]]))
    argv = ["check", str(tmp_path / "indices.npy"), "--num-blocks", "2"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith("1 row: no faults\n")
    assert cli.main([*argv, "--block-size", "8"]) == 1
    text = capsys.readouterr().out
    assert "indices[0, 2] = 127 is outside the cache of 16 slots" in text


def test_check_of_many_arrays(tmp_path, capsys):
    np.savez(
        tmp_path / "call.npz",
        kv_cache=np.zeros((4, 16, 656), np.uint8),
        indices=np.array([[0, 20, 40, 63], [3, -1, -1, 16]], np.int32),
        block_table=np.array([[3, 0, 1, -1]], np.int32),
        request_ids=np.zeros(2, np.int32),
        seq_lens=np.array([50]),
        extra_indices=np.array([[1, 2], [3, 9]]),
    )
    argv = ["check", str(tmp_path / "call.npz"), "--cache-format", "fp8_ds_mla"]
    argv += ["--extra-num-blocks", "2", "--extra-block-size", "4"]
    assert cli.main([*argv, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [source["valid"] for source in found["sources"]] == [5, 3]
    assert found["sources"][0]["row_bytes"] == 656
    assert found["sources"][0]["masked"] == {"past_seq_len": 1}
    assert [fault["text"] for fault in found["faults"]] == [
        "extra_indices[1, 1] = 9 is outside the extra cache of 8 slots"
    ]


def test_check_of_a_shard_without_indices(tmp_path, capsys):
    table, lengths = np.array([[0, 1]]), np.array([40])
    np.savez(tmp_path / "a.npz", block_table=table, seq_lens=lengths, shard=[1, 2, 16])
    np.savez(tmp_path / "b.npz", block_table=table, seq_lens=lengths, max_seq_len=[40])
    size = ["--num-blocks", "2", "--block-size", "16", "--json"]
    assert cli.main(["check", str(tmp_path / "a.npz"), *size]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["valid"] == 16
    argv = ["check", str(tmp_path / "b.npz"), *size, "--shard", "0", "2", "16"]
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["valid"] == 24
    assert cli.main([*argv, "--max-seq-len", "39"]) == 1


def test_check_reads_bfloat16_caches(tmp_path, capsys):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = np.zeros((2, 4, 576), ml_dtypes.bfloat16)
    np.savez(tmp_path / "call.npz", kv_cache=cache, indices=[[0, 7]])
    assert cli.main(["check", str(tmp_path / "call.npz")]) == 0
    assert "2.3 kB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"indices": [[0]]}, [], "has no array 'kv_cache': give --num-blocks"),
        ({"indexes": [[0]]}, ["--num-blocks", "2"], "unknown array 'indexes'"),
        ({"indices": [[0.5]]}, ["--num-blocks", "2"], "indices: expected int32 or int64"),
        (
            {"indices": [[0]], "extra_indices": [[0]]},
            ["--num-blocks", "2"],
            "give --extra-num-blocks",
        ),
        ({"indices": [[0]], "shard": [1, 2]}, ["--num-blocks", "2"], "shard"),
        (
            {"indices": [[0]]},
            ["--num-blocks", "2", "--cache-format", "fp8"],
            "cache_format: expected one of dense, ",
        ),
    ],
)
def test_check_of_bad_input(tmp_path, capsys, arrays, options, message):
    np.savez(tmp_path / "call.npz", **arrays)
    assert cli.main(["check", str(tmp_path / "call.npz"), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("check: ")
    assert message in captured.err


def test_check_of_what_is_no_array_file(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("indices")
    for name in ("text.npz", "missing.npz"):
        assert cli.main(["check", str(tmp_path / name), "--num-blocks", "2"]) == 2
        assert name in capsys.readouterr().err


def test_check_loads_no_pickles(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    assert cli.main(["check", str(tmp_path / "a.npy"), "--num-blocks", "2"]) == 2


# ------------------------------------------------------------------------------ bench

SMALL = ["--topk", "64", "--tokens", "4096", "--sets", "2", "--repeats", "1", "--heads", "2"]


@pytest.fixture
def own_environment(monkeypatch):
    """bench sets the number of threads for its process."""
    for name in ("SPARSE_MLA", "OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "1")
    torch = sys.modules.get("torch")
    threads = torch and torch.get_num_threads()
    yield
    if torch:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("own_environment")
def test_bench(tmp_path, capsys):
    pytest.importorskip("ml_dtypes")
    file = tmp_path / "times.json"
    argv = ["bench", *SMALL, "--batch", "1", "2", "--against", "numpy", "--threads", "1"]
    assert cli.main([*argv, "--json", str(file)]) == 0
    captured = capsys.readouterr()
    report = json.loads(file.read_text())
    assert len(report["results"]) == 3 * 2 * 2
    assert "[12/12]" in captured.err
    table = captured.out.splitlines()
    heading = next(number for number, line in enumerate(table) if line.startswith("cache "))
    assert len(table) == heading + 1 + 12
    assert "NumPy µs" in table[heading]
    for kernel in report["machine"]["kernels"].values():
        assert kernel["instruction_set"] in captured.out
        assert kernel["peak_flops"] > 1e8
    for result in report["results"]:
        case = bench.Case(**result["case"])
        assert result["bytes"] == case.bytes
        assert result["flops"] == 2 * case.batch * 64 * 2 * (576 + 512)
        assert set(result["seconds"]) == {"sparse_mla", "numpy"}
        assert all(0 < seconds < 10 for seconds in result["median_seconds"].values())
        own = result["seconds"]["sparse_mla"]
        assert len(result["peak_flops"]) == len(own) >= 1
        assert min(result["peak_flops"]) > 1e8
        shares = [case.flops / s / p for s, p in zip(own, result["peak_flops"], strict=True)]
        assert min(shares) <= result["share_of_peak"] <= max(shares)


@pytest.mark.usefixtures("own_environment")
def test_bench_against_torch(capsys):
    pytest.importorskip("ml_dtypes")
    pytest.importorskip("torch")
    argv = ["bench", *SMALL, "--batch", "1", "--against", "torch", "--patterns", "trace"]
    assert cli.main([*argv, "--threads", "1"]) == 0
    assert capsys.readouterr().out.count(" trace ") == 3


@pytest.mark.usefixtures("own_environment")
def test_bench_gives_no_time_for_a_wrong_result(capsys, monkeypatch):
    pytest.importorskip("ml_dtypes")
    attend = sparse_mla.attend

    def wrong(*arguments, **options):
        out, lse = attend(*arguments, **options)
        return out * 1.1, lse

    monkeypatch.setattr(sparse_mla, "attend", wrong)
    argv = ["bench", *SMALL, "--batch", "1", "--against", "numpy", "--threads", "1"]
    assert cli.main(argv) == 1
    captured = capsys.readouterr()
    assert "the output of sparse_mla is " in captured.err
    assert "uniform" not in captured.out


def test_index_sets_like_those_of_a_model():
    rng = np.random.default_rng(0)
    case = bench.Case("bf16", 1, 20, 2048, "trace")
    slots = bench.index_set(rng, case, 1 << 16)
    assert slots.shape == (20, 2048)
    assert slots.min() >= 0
    assert slots.max() < 1 << 16
    assert all(np.unique(row).size == 2048 for row in slots)
    positions = bench.trace_positions(rng, 200_000)
    gaps = np.diff(np.sort(positions))
    assert np.median(gaps) == 1
    assert 46 <= np.percentile(gaps, 95) <= 52
    assert 0.86 <= np.mean(np.diff(positions) > 0) <= 0.88


def test_uniform_index_sets():
    case = bench.Case("bf16", 1, 3, 100, "uniform")
    slots = bench.index_set(np.random.default_rng(0), case, 128)
    assert all(np.unique(row).size == 100 for row in slots)
