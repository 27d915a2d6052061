"""The example for several GPUs, by its own functions and as a program, on ranks of its own.

Ranks are processes. They run on the CPU with gloo, and on two GPUs with NCCL where there are two;
`python tests/test_context_parallel.py` is where they come from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cases
from cases import ALL, PAGED, Case
from compare import assert_within, expected, to_framework, to_numpy
from sparse_mla import reference

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

EXAMPLE = Path(__file__).parent.parent / "examples" / "context_parallel.py"
SECONDS = 240  # for ranks that share few cores

HELD = replace(PAGED, topk=60, holes=0.0, num_blocks=20, max_blocks=6)
EVERY = replace(ALL, holes=0.0, num_blocks=20, max_blocks=6)
FP8 = replace(HELD, cache_format="fp8_ds_mla")
COMMON = {"leading": (7,), "heads": 12, "requests": 4, "request_ids": True}
# A case, its interleave, and the dtype of its parts where that is not float32.
TABLE: list[tuple[Case, int, str | None]] = [
    (Case("bfloat16", main=HELD, **COMMON), 1, None),
    (Case("bfloat16_parts", main=HELD, **COMMON), 4, "bfloat16"),
    (Case("float16", main=HELD, dtype="float16", **COMMON), 3, None),
    (Case("float16_parts", main=HELD, dtype="float16", **COMMON), 3, "float16"),
    (Case("float32", main=HELD, dtype="float32", **COMMON), 16, None),
    (Case("fp8", main=FP8, sink="normal", **COMMON), 1, None),
    (Case("sink", main=HELD, sink="infinite", **COMMON), 5, None),
    (Case("causal", main=HELD, query_positions=True, **COMMON), 64, None),
    (Case("all_causal", main=EVERY, query_positions=True, **COMMON), 2, None),
    (Case("int64", main=replace(FP8, index_dtype="int64"), **COMMON), 2, None),
    (Case("one_row", main=HELD, leading=(1,), heads=6), 1, None),
]
CASES = {case.name: (case, interleave, parts) for case, interleave, parts in TABLE}


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("context_parallel", EXAMPLE)
    module = sys.modules["context_parallel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------ ranks


def start(size: int, *task: str) -> None:
    """Runs a task of `run_rank` on `size` ranks and waits for all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "SPARSE_MLA_NUM_THREADS": "1",
    }
    ranks = subprocess.Popen(
        [sys.executable, __file__, *task],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = ranks.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, output


def fork_ranks(task: list[str]) -> bool:
    """The ranks, forked from one process that has imported everything; whether all succeeded."""
    context = multiprocessing.get_context("fork")
    size = int(os.environ["WORLD_SIZE"])
    ranks = [context.Process(target=run_rank, args=(rank, task)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for ended in multiprocessing.connection.wait(list(running)):
            rank = running.pop(ended)
            rank.join()
            if rank.exitcode != 0:
                return False  # and the others may wait for it
    return True


def run_rank(rank: int, task: list[str]) -> None:
    """ "cases", a directory and a backend; or "program" and its arguments."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    kind, *rest = task
    if kind == "program":
        raise SystemExit(load_example().main(rest))
    run_cases(Path(rest[0]), rest[1])


def shard_of(example: ModuleType, arguments: dict[str, Any], shard: tuple[int, int, int]) -> None:
    """Puts a rank's cache and block table into the place of those of one that holds everything."""
    rank, size, interleave = shard
    whole, table = arguments["kv_cache"], arguments["block_table"]
    requests, blocks = table.shape
    block_size, width = whole.shape[1:]
    longest = blocks * block_size
    mine = -(-longest // (interleave * size) * interleave // block_size)
    order = torch.randperm(requests * mine, generator=torch.Generator().manual_seed(rank))
    local = order.reshape(requests, mine).to(table.dtype)
    kv_cache = torch.zeros((requests * mine, block_size, width), dtype=whole.dtype)
    kv_cache.view(torch.uint8).fill_(0xFF)
    positions = torch.arange(longest).expand(requests, -1)
    ids = torch.arange(requests)[:, None].expand(-1, longest)
    there = example.local_slots(positions, ids, local, block_size, shard)
    here = example.local_slots(positions, ids, table, block_size, (0, 1, 1))
    there, here = there[there >= 0].long(), here[there >= 0].long()
    kv_cache.view(-1, width)[there] = whole.reshape(-1, width)[here]
    arguments.update(kv_cache=kv_cache, block_table=local)


def run_cases(directory: Path, backend: str) -> None:
    """All cases on one rank; its heads' results go to a file."""
    import torch.distributed as dist

    example = load_example()
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    results = {}
    for name, (case, interleave, parts) in CASES.items():
        arguments = to_framework(cases.make(case, seed=1), "torch")
        heads = case.heads // size
        own = slice(rank * heads, (rank + 1) * heads)
        arguments["q"] = arguments["q"][:, own]
        if case.sink:
            arguments["attn_sink"] = arguments["attn_sink"][own]
        shard = (rank, size, interleave)
        shard_of(example, arguments, shard)
        arguments = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in arguments.items()
        }
        if parts:
            arguments["part_dtype"] = getattr(torch, parts)
        out, lse = example.context_parallel(**arguments, group=dist.group.WORLD, shard=shard)
        assert out.transpose(0, 1).is_contiguous()
        results[name] = to_numpy(out), to_numpy(lse)
    (directory / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


def join_ranks(directory: Path, size: int, backend: str = "gloo") -> list[dict[str, Any]]:
    start(size, "cases", str(directory), backend)
    return [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def compare(name: str, ranks: list[dict[str, Any]]) -> None:
    """All heads against the oracle: within the bounds of a single call, but for 16-bit parts, whose
    rounding counts once more."""
    case, _, parts = CASES[name]
    want = expected(cases.make(case, seed=1))
    times = 2 if parts else 1
    out, lse = (np.concatenate([rank[name][i] for rank in ranks], axis=1) for i in range(2))
    assert_within("lse", lse, want.lse, want.bound_lse)
    assert_within("out", out, want.out, times * want.bound_out, out.dtype.name)


# ------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, Any]]:
    return join_ranks(tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_rank(name: str, ranks: list[dict[str, Any]]) -> None:
    compare(name, ranks)


@pytest.mark.parametrize(("size", "group"), [(2, 2), (4, 2)], ids=["context", "heads and context"])
def test_program(size: int, group: int, tmp_path: Path) -> None:
    """The program compares itself; its bytes are those of the cost model."""
    small = "--rows 4 --heads 12 --context 200 --topk 32 --block-size 16 --layers 1 --replays 1"
    formats = "--cache-format dense fp8_ds_mla --parts bfloat16 float32"
    options = f"--backend gloo {small} {formats} --group-size {group}"
    start(size, "program", *options.split(), "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == 4
    for result in results:
        if result["case"]["parts"] == "float32":
            part_bytes = 512 * 4 + 16
            assert result["share_of_bound"] <= 1
        else:
            part_bytes = 512 * 2 + 16
            assert result["share_of_bound"] <= 2
        assert result["seconds"]["step"] > 0
        assert result["bytes"]["queries"] == (group - 1) * 4 * (12 // size) * 1152
        assert result["bytes"]["parts"] == (group - 1) * 4 * (12 // size) * part_bytes


@pytest.mark.gpu
def test_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = join_ranks(tmp_path, 2, "nccl")
    for name in CASES:
        compare(name, ranks)


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 4), (4, 64)])
def test_slots_that_are_written_are_those_that_attend_reads(size: int, interleave: int) -> None:
    local_slots = load_example().local_slots
    positions = torch.arange(500)
    requests = torch.ones_like(positions)
    owners = np.zeros(500, int)
    for rank in range(size):
        shard = (rank, size, interleave)
        table = torch.randperm(64, generator=torch.Generator().manual_seed(rank)).reshape(2, 32)
        slots = local_slots(positions, requests, table, 16, shard).numpy()
        (want,) = reference.resolve(
            np.empty((64, 16, 1), np.float32),
            positions[None].numpy(),
            block_table=table.numpy(),
            request_ids=np.array([1]),
            shard=shard,
        )
        np.testing.assert_array_equal(slots, np.maximum(want[0], -1))
        owners += slots >= 0
    assert (owners == 1).all()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ("", {}, "start it with torchrun"),
        ("--heads 7", {"RANK": "0", "WORLD_SIZE": "2"}, "--heads: expected multiples of 2"),
        ("--group-size 3", {"RANK": "0", "WORLD_SIZE": "4"}, "--group-size: expected a divisor"),
    ],
)
def test_bad_usage(arguments: str, environment: dict[str, str], message: str, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        load_example().main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(0 if fork_ranks(sys.argv[1:]) else 1)
