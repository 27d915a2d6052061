"""FlashMLA's own tests against `sparse_mla.flash_mla`, on an NVIDIA GPU.

    python tools/run_flash_mla_tests.py PATH [decoding] [prefill]

PATH is a checkout of FlashMLA (of April 2026), of which only the Python files in tests/ are read:
they import a module `flash_mla`, and get ours. Their cases, references and tolerances are used as
they are; selected are all cases of sparse prefill, and of sparse decoding those over the 656-byte
cache (d_qk 576). What they time by the names of kernels is run once and not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import sparse_mla.flash_mla


class NoTimes:
    """In the place of the kernels' times: a second each."""

    def get_kernel_names(self) -> list[str]:
        return []

    def get_kernel_time(self, name: str) -> float:
        return 1.0


def run_once(function: Callable[[], Any], num_tests: int = 1, **options: Any) -> NoTimes:
    function()
    return NoTimes()


@contextlib.contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Empty modules for what the tests import for their tables and their timing, where it is not
    installed. They are gone again afterwards, since PyTorch looks for triton too."""
    missing = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].jit = lambda function: function  # type: ignore[attr-defined]
    yield
    for name in missing:
        del sys.modules[name]


def prepare(tests: Path) -> None:
    """Makes the test files importable, with our module under the name that they ask for."""
    sys.path.insert(0, str(tests))
    sys.modules["flash_mla"] = sparse_mla.flash_mla
    # With this set the tests believe in a profiler and look for no kernel's time.
    os.environ["NSYS_PROFILING_SESSION_ID"] = "none"
    with stand_ins("triton"):
        import kernelkit
    kernelkit.bench_kineto = run_once


def run_decoding() -> tuple[int, int]:
    """(cases, failed)."""
    with stand_ins("rich", "rich.console", "rich.table"):
        import test_flash_mla_sparse_decoding as tests
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    torch.set_float32_matmul_precision("high")
    cases = [case.to_test_param() for case in tests.gen_testcase() if case.d_qk == 576]
    failed = [case for case in cases if not tests.test_flash_mla(case).is_correct]
    for case in failed:
        print("failed:", case)
    return len(cases), len(failed)


def run_prefill(path: Path) -> tuple[int, int]:
    """(cases, failed); the file has its cases in its main part, which ends with status 1 where one
    has failed."""
    cases = 0
    import lib

    generate = lib.generate_testcase

    def count(case: Any) -> Any:
        nonlocal cases
        cases += 1
        return generate(case)

    lib.generate_testcase = count
    try:
        names = runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        return cases, int(bool(stop.code))
    return cases, len(names["failed_cases"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a checkout of FlashMLA")
    parser.add_argument("parts", nargs="*", help="decoding, prefill; without: both")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {"decoding", "prefill"}:
        parser.error(f"expected decoding or prefill, got {' '.join(sorted(unknown))}")
    tests = arguments.path / "tests"
    prepare(tests)
    status = 0
    for part in arguments.parts or ["decoding", "prefill"]:
        if part == "decoding":
            cases, failed = run_decoding()
        else:
            cases, failed = run_prefill(tests / "test_flash_mla_sparse_prefill.py")
        print(f"{part}: {cases} cases, {failed or 'none'} failed", flush=True)
        status |= bool(failed)
    return status


if __name__ == "__main__":
    sys.exit(main())
