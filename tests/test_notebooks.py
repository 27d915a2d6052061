"""The notebooks run from top to bottom, and show what their prose says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def cells(name: str, kind: str) -> list[str]:
    notebook = json.loads((NOTEBOOKS / name).read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def run(monkeypatch):
    """A function that runs a notebook's code and returns its names."""
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("ml_dtypes")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))

    def run(name: str) -> dict:
        names: dict = {"__name__": "__main__"}
        for number, source in enumerate(cells(name, "code"), 1):
            exec(compile(source, f"{name}, code cell {number}", "exec"), names)
        return names

    return run


def test_quickstart(run, capsys):
    names = run("quickstart.ipynb")
    lse, full_lse = names["lse"], names["full_lse"]
    covered = np.exp(lse - full_lse)
    assert 0.7 < covered.mean() < 1
    assert np.isclose(names["weights"].sum(), 1, atol=1e-4)
    assert np.isclose(names["weights"][names["kept"]].sum(), covered.mean(), atol=1e-4)

    by_size = np.exp(names["lses"] - full_lse).mean(axis=1)
    window = np.exp(names["window_lses"] - full_lse).mean(axis=1)
    assert np.all(np.diff(by_size) > 0)
    assert np.all(by_size[:-1] > window[:-1])
    assert np.isclose(by_size[-1], 1, atol=1e-5)

    assert np.abs(names["merged"] - names["out"]).max() < 1e-4
    assert np.abs(names["merged_lse"] - lse).max() < 1e-4

    report = names["report"]
    assert [fault.tensor for fault in report.faults] == ["indices", "block_table"]
    assert report.sources[0].duplicates == 1
    printed = capsys.readouterr().out
    assert "indices[0, 17] = -2147483648 is negative" in printed
    assert "fp8_ds_mla            656" in printed


def test_frameworks(run, capsys):
    names = run("frameworks.ipynb")
    assert "numpy" in names["results"]
    assert all(difference < 1e-4 for difference in names["differences"].values())
    assert names["same_address"] and all(names["same_address"].values())
    assert names["sees_change"] and all(names["sees_change"].values())
    for name in names["frameworks"]:
        assert type(names["results"][name][0]).__module__.startswith(name.partition(".")[0][:3])
    printed = capsys.readouterr().out
    if "torch" in names["frameworks"]:
        assert "one memory: True" in printed
        assert "q.detach()" in printed


def strings(node: Any) -> Iterator[str]:
    """All of a notebook but the bytes of its images, which are letters and slashes."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for each in node:
            yield from strings(each)
    elif isinstance(node, dict):
        for name, each in node.items():
            yield name
            if not name.startswith("image/"):
                yield from strings(each)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_stored_form(path):
    """Small enough for a repository, without errors, and of no particular machine."""
    text = path.read_text()
    assert len(text) < 250_000
    notebook = json.loads(text)
    outputs = [
        output
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    ]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert "site-packages" not in text
    folder = re.compile("/[A-Za-z]+/")  # as paths of any machine have
    assert not [each for each in strings(notebook) if folder.search(each)]
