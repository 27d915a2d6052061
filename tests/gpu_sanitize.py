"""Runs every kernel of the build on small shapes, for compute-sanitizer:

    compute-sanitizer --tool memcheck  python3 tests/gpu_sanitize.py
    compute-sanitizer --tool racecheck --kernel-name kns=any_ --kernel-name kns=sm80_ \\
        --kernel-name kns=sm90_ python3 tests/gpu_sanitize.py --few
    compute-sanitizer --tool synccheck python3 tests/gpu_sanitize.py
    compute-sanitizer --tool initcheck --check-api-memory-access no \\
        --kernel-name kns=any_ --kernel-name kns=sm80_ --kernel-name kns=sm90_ \\
        python3 tests/gpu_sanitize.py

Every specialisation of the attend kernels is reached by SPARSE_MLA_KERNEL and shapes: each format,
width and dtype, head tiles full and in part, rows in one part and in several. Index arrays hold
padding and faults, slots that no entry selects NaN, and every array is an allocation of its own
that ends with its last number, since PyTorch's caching is switched off: one byte read or written
past it is an error. Results are compared with the oracle, so that the run is a test by itself.
`--kernel NAME` runs one family of the attend kernels; `--few` has each specialisation once in one
part and once in several, for racecheck, which is slower than the others by far.

initcheck looks at the kernels of this project alone, of all its families at once, since one reads
what another wrote. What PyTorch's own kernels write it then takes for never written, and so would
complain of the copies that bring it to the host: those are not looked at. Arrays come to the GPU by
copies, of which it knows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the tools run side by side

import numpy as np

import cases
import sparse_mla
from cases import Case, Source
from compare import check_call, to_framework, to_numpy
from conftest import gpu_kernels
from sparse_mla import reference
from test_writers import assert_same_rows, rows_of_every_kind, scale

FAULTS = ("index", "slot", "logical", "block", "topk", "seq")
PAGED = {"paged": True, "seq_lens": True, "topk_lens": "row", "padding": 0.2, "max_blocks": 12}
FORMATS = [
    ("dense", 576),
    ("dense", 512),
    *((name, f.d_qk) for name, f in reference.FORMATS.items()),
]
FULL_TILES, TILES_IN_PART = (16, 32, 64), (5, 20, 48, 70)


def attend_cases(few: bool) -> Iterator[Case]:
    """Rows in one part, in two, and in so many that the parts are merged in the other way."""
    for name, d_qk in FORMATS:
        for dtype in ("bfloat16", "float16", "float32"):
            main = Source(cache_format=name, topk=150, num_blocks=20, faults=FAULTS, **PAGED)
            for heads in FULL_TILES if few else FULL_TILES + TILES_IN_PART:
                case = Case(leading=(3,), heads=heads, d_qk=d_qk, dtype=dtype, main=main)
                yield replace(case, request_ids=True, sink="normal", max_logits="given")
            case = Case(leading=(1,), heads=16, d_qk=d_qk, dtype=dtype, logit_cap=20.0)
            long = not few or (name, dtype) == ("dense", "bfloat16")
            for topk in (600, 6000) if long else (600,):
                slots = Source(
                    cache_format=name, topk=topk, num_blocks=20, faults=("index", "slot")
                )
                for heads in FULL_TILES if few else (*FULL_TILES, 24):
                    case = replace(case, heads=heads, main=slots, out="float32")
                    yield replace(case, batch_invariant=True)
                    if not few:
                        yield case
    for scales in ("wild", "far"):
        main = Source(cache_format="fp8_ds_mla", scales=scales, topk=300, num_blocks=20)
        for heads in FULL_TILES:
            yield Case(leading=(2,), heads=heads, main=main, max_logits="given")
    for name in ("dense", "fp8_ds_mla"):  # more rows than an H200 has multiprocessors
        main = Source(cache_format=name, topk=600, num_blocks=20, padding=0.1)
        yield Case(leading=(134,), heads=64, main=main)
    ds_mla = Source(cache_format="fp8_ds_mla_norope", topk=70, **PAGED)
    window = Source(topk=90, block_size=5, **PAGED)
    for main, extra in ((ds_mla, window), (window, ds_mla), (ds_mla, ds_mla)):
        yield Case(leading=(2, 2), d_qk=512, heads=16, main=main, extra=extra, query_positions=True)
    everything = replace(cases.ALL, max_blocks=9, faults=("block", "seq"))
    yield Case(heads=16, main=everything, q_rope=64, q_layout="transposed", leading=(2, 2))
    yield Case(heads=16, main=cases.ALL, shard=(1, 3, 2), lse="strided", out="strided")
    for width, values in ((1, 1), (67, 31), (2000, 1900)):  # the last is for rows wider than usual
        yield Case(d_qk=width, d_v=values, heads=9, main=Source(topk=200))
    for layout in ("padded", "offset", "interleaved"):
        yield Case(heads=16, main=Source(layout=layout, topk=100))
        yield Case(heads=16, main=Source(layout=layout, topk=100, cache_format="fp8_ds_mla"))


def run_attend(kernel: str, few: bool) -> tuple[int, int]:
    """Calls that ran, and calls that this kernel does not take."""
    done = refused = 0
    os.environ["SPARSE_MLA_KERNEL"] = kernel
    for number, case in enumerate(attend_cases(few)):
        if case.main.topk is None and len(case.leading) == 2:
            case = replace(case, query_positions=True)
        validate = ("record", "deferred", "mask", "raise")[number % 4]
        arguments = cases.make(replace(case, validate=validate), seed=number)
        try:
            check_call(arguments, "torch", "cuda")
            done += 1
        except sparse_mla.UnsupportedError:
            refused += 1
    del os.environ["SPARSE_MLA_KERNEL"]
    return done, refused


def run_caches() -> int:
    """pack, append and unpack of every format."""
    done = 0
    for name in ("dense", *reference.FORMATS):
        for dtype in ("bfloat16", "float16", "float32"):
            rows, keywords = rows_of_every_kind(name, dtype), {"cache_format": name, **scale(name)}
            tensor = to_framework(rows, "torch", "cuda")
            cache = sparse_mla.pack(tensor, block_size=7, **keywords)
            want = sparse_mla.pack(rows, block_size=7, **keywords)
            assert_same_rows(to_numpy(cache), want, name)
            slots = np.random.default_rng(0).integers(-5, 50, len(rows))
            cut = rows.shape[1] - 64
            both = (rows[:, :cut], rows[:, cut:])
            sparse_mla.append(cache, *to_framework((slots, *both), "torch", "cuda"), **keywords)
            sparse_mla.append(want, slots, *both, **keywords)
            assert_same_rows(to_numpy(cache), want, name)
            numbers = to_numpy(sparse_mla.unpack(cache, **keywords))
            np.testing.assert_array_equal(numbers, sparse_mla.unpack(want, **keywords))
            done += 3
    return done


def run_merge() -> int:
    """Numbers one at a time and four at a time, one part and as many as there may be."""
    done = 0
    rng = np.random.default_rng(0)
    for dtype in cases.DTYPES.values():
        for d_v, count in ((512, 1), (512, 32), (63, 3), (1, 2)):
            outs = [rng.standard_normal((5, 3, d_v)).astype(dtype) for _ in range(count)]
            lses = [rng.standard_normal((5, 3)).astype(np.float32) for _ in range(count)]
            for lse in lses:
                lse[rng.random(lse.shape) < 0.3] = -np.inf
            sink = rng.standard_normal(3).astype(np.float32)
            got = sparse_mla.merge(
                *to_framework((outs, lses), "torch", "cuda"),
                attn_sink=to_framework(sink, "torch", "cuda"),
            )
            want = reference.merge(outs, lses, attn_sink=sink)
            np.testing.assert_allclose(to_numpy(got[0]).astype(float), want[0], atol=0.03)
            np.testing.assert_allclose(to_numpy(got[1]), want[1], rtol=1e-4, atol=1e-5)
            done += 1
    return done


def run_resolve() -> int:
    done = 0
    for case in cases.CASES:
        if case.main.faults or case.extra:
            arguments: dict[str, Any] = cases.make(case, seed=1)
            names = ("kv_cache", "indices", "block_table", "seq_lens", "topk_lens", "request_ids")
            names += tuple("extra_" + name for name in names[:5])
            keywords = {name: arguments[name] for name in names if name in arguments}
            if keywords["indices"] is None:
                keywords["request_ids"] = np.arange(case.leading[0], dtype=np.int32)
            got = sparse_mla._core.resolve(**to_framework(keywords, "torch", "cuda"))
            for one, other in zip(got, sparse_mla._core.resolve(**keywords), strict=True):
                np.testing.assert_array_equal(one, other)
            done += 1
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=gpu_kernels(), help="one family of attend kernels")
    parser.add_argument("--few", action="store_true", help="fewer calls of attend")
    options = parser.parse_args()
    for kernel in [options.kernel] if options.kernel else gpu_kernels():
        done, refused = run_attend(kernel, options.few)
        print(f"attend {kernel}: {done} calls, {refused} not for this kernel", flush=True)
        if not done:
            return 1
    print(f"pack, append, unpack: {run_caches()} calls", flush=True)
    print(f"merge: {run_merge()} calls", flush=True)
    print(f"resolve: {run_resolve()} calls", flush=True)
    sparse_mla.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
