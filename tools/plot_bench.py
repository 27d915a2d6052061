"""Draws what `python -m sparse_mla bench --device cuda --json FILE` has written: µs over query
rows, a panel for each cache format, a colour for each number of heads, the floors dashed.

    python tools/plot_bench.py times.json docs/h200.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

TITLES = {"bf16": "dense bfloat16 cache", "fp8": "fp8_ds_mla cache", "fp32": "dense float32 cache"}


def series(
    results: list[dict[str, Any]], cache: str, pattern: str, topk: int
) -> dict[int, list[tuple[int, float, float]]]:
    """By heads: (rows, µs, µs of the floor) of the plain cases, in the order of the rows."""
    found: dict[int, list[tuple[int, float, float]]] = {}
    wanted = {"format": cache, "pattern": pattern, "topk": topk, "kind": "slots", "s_q": 1}
    for result in results:
        case = result["case"]
        if all(case[name] == value for name, value in wanted.items()):
            own = result["median_seconds"]["sparse_mla"]
            point = (case["batch"], own * 1e6, result["floor_seconds"] * 1e6)
            found.setdefault(case["heads"], []).append(point)
    return {heads: sorted(points) for heads, points in sorted(found.items())}


def draw(report: dict[str, Any], pattern: str, topk: int) -> Any:
    """The figure of a report."""
    results = report["results"]
    caches = sorted({result["case"]["format"] for result in results})
    figure, panels = pyplot.subplots(
        1, len(caches), figsize=(5.2 * len(caches), 4.4), sharey=True, squeeze=False
    )
    for panel, cache in zip(panels[0], caches, strict=True):
        rows = set()
        for heads, points in series(results, cache, pattern, topk).items():
            batch, own, floor = zip(*points, strict=True)
            (drawn,) = panel.plot(batch, own, marker="o", markersize=3.5, label=f"{heads} heads")
            panel.plot(batch, floor, linestyle="--", linewidth=1, color=drawn.get_color())
            rows.update(batch)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sorted(rows), [str(each) for each in sorted(rows)])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.set_title(TITLES[cache], fontsize=10)
        panel.set_xlabel("query rows")
    panels[0][0].set_ylabel("µs a call")
    panels[0][-1].plot([], [], linestyle="--", linewidth=1, color="gray", label="floor")
    panels[0][-1].legend(fontsize=8)
    machine = report["machine"]
    figure.suptitle(
        f"sparse_mla {machine['sparse_mla']} on {machine['gpu']['name']}: topk {topk}, "
        f"{pattern} index sets",
        fontsize=11,
    )
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("times", type=Path, help="the file of bench --json")
    parser.add_argument("figure", type=Path, help="what to write: .svg, .png or .pdf")
    parser.add_argument("--pattern", choices=("uniform", "trace"), default="uniform")
    parser.add_argument("--topk", type=int, default=2048)
    options = parser.parse_args()
    report = json.loads(options.times.read_text())
    draw(report, options.pattern, options.topk).savefig(options.figure, metadata={"Date": None})


if __name__ == "__main__":
    main()
