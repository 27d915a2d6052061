"""The command line: `python -m sparse_mla info | demo | check | bench`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import sparse_mla
from sparse_mla import bench, demo, info

ARRAYS = (
    "indices",
    "block_table",
    "request_ids",
    "seq_lens",
    "query_positions",
    "topk_lens",
    "extra_indices",
    "extra_topk_lens",
    "extra_block_table",
    "extra_seq_lens",
)
CACHES = ("kv_cache", "extra_kv_cache")
SCALARS = ("shard", "max_seq_len")


class BadInput(Exception):
    """What the user gave cannot be checked."""


def load_arrays(path: str) -> dict[str, Any]:
    """The arrays of an .npz by name, or of an .npy as `indices`."""
    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"indices": loaded}
        with loaded:
            arrays = {name: typed(loaded[name]) for name in loaded.files}
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path}: {error}") from error
    known = (*ARRAYS, *CACHES, *SCALARS)
    unknown = [name for name in arrays if name not in known]
    if unknown:
        raise BadInput(f"{path}: unknown array {unknown[0]!r}, expected any of {', '.join(known)}")
    return arrays


def typed(array: Any) -> Any:
    """NumPy's files keep bfloat16 and float8 as bytes without a type; check only needs the size."""
    if array.dtype.kind != "V":
        return array
    return array.view({1: "u1", 2: "f2"}.get(array.dtype.itemsize, array.dtype))


def stand_in(num_blocks: int, block_size: int, cache_format: str | None) -> Any:
    """A cache of the wanted geometry that takes one row of memory: check reads no contents."""
    import numpy as np

    formats = sparse_mla.cache_formats()
    if cache_format in (None, "dense"):
        row = np.zeros(576, np.float16)
    elif cache_format in formats:
        row = np.zeros(formats[cache_format]["row_bytes"], np.uint8)
    else:
        names = ", ".join(formats)
        raise BadInput(f"cache_format: expected one of {names}, got {cache_format!r}")
    return np.broadcast_to(row, (num_blocks, block_size, row.size))


def check_arguments(options: argparse.Namespace) -> dict[str, Any]:
    arrays = load_arrays(options.file)
    arguments = {"indices": None, **{name: arrays[name] for name in ARRAYS if name in arrays}}
    if "shard" in arrays:
        arguments["shard"] = tuple(int(number) for number in arrays["shard"].ravel())
    if options.shard is not None:
        arguments["shard"] = tuple(options.shard)
    if "max_seq_len" in arrays:
        arguments["max_seq_len"] = int(arrays["max_seq_len"].item())
    if options.max_seq_len is not None:
        arguments["max_seq_len"] = options.max_seq_len
    for prefix in ("", "extra_"):
        name = f"{prefix}kv_cache"
        blocks, size, cache_format = (
            getattr(options, f"{prefix}{each}")
            for each in ("num_blocks", "block_size", "cache_format")
        )
        if cache_format is not None:
            arguments[f"{prefix}cache_format"] = cache_format
        if name in arrays:
            arguments[name] = arrays[name]
        elif blocks is not None:
            arguments[name] = stand_in(blocks, size, cache_format)
        elif not prefix or f"{prefix}indices" in arrays:
            option = f"--{prefix}num-blocks".replace("_", "-")
            raise BadInput(f"{options.file} has no array {name!r}: give {option}")
    return arguments


def check_main(argv: list[str]) -> int:
    """Prints the report of a file's arrays; 0 without faults, 1 with, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla check",
        description="Reports what index arrays and block tables select: valid and masked entries, "
        "faults, duplicates, rows without keys.",
        epilog="The exit code is 0 where there is no fault, 1 where there is one, 2 for bad usage.",
    )
    add = parser.add_argument
    add(
        "file",
        help=f".npz with arrays named as attend's arguments ({', '.join((*CACHES, *ARRAYS))}, "
        f"{', '.join(SCALARS)}), or .npy with the indices alone",
    )
    for prefix, of in (("", "the cache"), ("extra-", "the extra cache")):
        add(
            f"--{prefix}num-blocks",
            type=bench.positive,
            metavar="N",
            help=f"blocks of {of}, where the file has none",
        )
        add(
            f"--{prefix}block-size",
            type=bench.positive,
            metavar="N",
            default=64,
            help="tokens of a block (default: 64)",
        )
        add(f"--{prefix}cache-format", metavar="NAME", help=f"of {of} (default: dense)")
    add("--shard", nargs=3, type=int, metavar=("RANK", "SIZE", "INTERLEAVE"))
    add("--max-seq-len", type=int, metavar="N", help="for files without indices")
    add("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    try:
        report = sparse_mla.check(**check_arguments(options))
    except ImportError:
        print("check: needs NumPy: pip install 'sparse-mla[numpy]'", file=sys.stderr)
        return 2
    except (BadInput, TypeError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 0 if report.ok else 1


COMMANDS = {
    "info": (info.main, "version, devices, kernels, cache formats"),
    "demo": (demo.main, "the main job on recorded model data, with its errors and times"),
    "check": (check_main, "a report on the index arrays and block tables of a file"),
    "bench": (bench.main, "times beside NumPy and PyTorch"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla",
        description="DeepSeek Sparse Attention over a paged latent KV cache.",
        epilog="\n".join(
            ["commands:"]
            + [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
            + ["", "`python -m sparse_mla COMMAND --help` tells more."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"sparse_mla {sparse_mla.__version__}"
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    options = parser.parse_args(argv)
    return COMMANDS[options.command][0](options.arguments)


if __name__ == "__main__":
    sys.exit(main())
