"""How many instructions a call takes on the host: the same on every run, unlike its time.

Under valgrind's callgrind, which counts inside `attend` alone. The call has no query rows, so that
what is counted is the way in and out: arguments, tensors, checks, plan.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VALGRIND = shutil.which("valgrind")
pytestmark = [
    pytest.mark.skipif(VALGRIND is None, reason="valgrind is not installed"),
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="under a sanitizer"),
]

# Six NumPy arrays, out and lse given. A half more than was measured, for other compilers, other C
# libraries and other versions of Python and NumPy.
MOST = 15_000

CALLS = """
import sys
import numpy as np
import sparse_mla

q, cache, indices, lens, out, lse = (np.zeros(shape, dtype) for shape, dtype in (
    ((0, 16, 576), np.float32), ((8, 64, 576), np.float32), ((0, 64), np.int32), ((0,), np.int32),
    ((0, 16, 512), np.float32), ((0, 16), np.float32)))
attend = sparse_mla.attend
for _ in range(int(sys.argv[1])):
    attend(q, cache, indices, softmax_scale=0.1, topk_lens=lens, out=out, lse=lse)
"""


def instructions(calls: int, directory: Path) -> int:
    output = directory / f"callgrind.{calls}"
    command = [VALGRIND, "--tool=callgrind", "--toggle-collect=attend"]
    command += [f"--callgrind-out-file={output}", sys.executable, "-c", CALLS, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    collected = re.search(r"Collected : (\d+)", done.stderr)
    assert collected, done.stderr
    return int(collected[1])


def test_instructions_of_a_call(tmp_path):
    few, many = (instructions(calls, tmp_path) for calls in (20, 220))
    if many == 0:
        pytest.skip("a build without symbols")
    a_call = (many - few) / 200
    print(f"{a_call:.0f} instructions a call")
    assert 1_000 < a_call < MOST
