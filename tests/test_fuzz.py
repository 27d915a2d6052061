"""A small, fixed budget of the fuzzer, and the fuzzer's own machinery."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fuzz
from cases import Case, Source

FUZZ = Path(fuzz.__file__)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FUZZ), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("kernel", fuzz.kernels())
def test_fixed_budget(kernel: str) -> None:
    done = run("--cases", "150", "--seed", "2026", "--kernel", kernel)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("150 cases of seed 2026, 0 mismatches, ")


def test_a_case_is_drawn_from_its_number() -> None:
    assert fuzz.draw_problem(5, 17, None) == fuzz.draw_problem(5, 17, None)
    assert fuzz.draw_problem(5, 17, None) != fuzz.draw_problem(5, 18, None)
    assert fuzz.draw_problem(5, 17, None) != fuzz.draw_problem(6, 17, None)


def test_cases_are_legal() -> None:
    for number in range(2000):
        assert fuzz.legal(fuzz.draw_case(7, number)), number


def test_shrinks_to_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that needs a sink and three heads shrinks to little else, and reads as a test."""

    def failure(problem: fuzz.Problem) -> str | None:
        found = problem.case.sink and problem.case.heads >= 3
        return "AssertionError: too many heads for a sink" if found else None

    monkeypatch.setattr(fuzz, "failure", failure)
    main = Source(paged=True, seq_lens=True, topk_lens="row", faults=("index", "seq"))
    case = Case(leading=(2, 3), heads=19, main=main, extra=main, sink="large", query_positions=True)
    problem, text = fuzz.shrink(fuzz.Problem(case, seed=3, kernel="cpu_plain"))
    assert problem.case == replace(fuzz.PLAIN, heads=3, sink="large")
    test = fuzz.as_test(problem, text, seed=1, number=2)
    assert "def test_fuzz_1_2(monkeypatch):" in test
    assert "heads=3" in test
    compile(test, "test", "exec")


def test_tells_of_a_process_that_died(capsys: pytest.CaptureFixture[str]) -> None:
    """A crash of a worker is a failed case, and the exit status says so."""
    progress = fuzz.Progress(argparse.Namespace(cases=9, seed=4))
    told = "import os; print('{\"at\": 8}', flush=True); os.abort()"
    with subprocess.Popen(
        [sys.executable, "-c", told], stdout=subprocess.PIPE, text=True
    ) as worker:
        progress.listen(worker)
    assert progress.failed == [8]
    assert "# case 8 of seed 4\nthe process died with status -6" in capsys.readouterr().out
