"""`python -m sparse_mla info`: what this installation is and what it finds on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import sparse_mla

ENVIRONMENT = {
    "SPARSE_MLA_KERNEL": "a kernel's name: run this one, or fail",
    "SPARSE_MLA_NUM_THREADS": "threads of a call on the CPU",
    "SPARSE_MLA_VLLM": "auto, always: take a backend's place in vLLM",
    "SPARSE_MLA_VLLM_INDEXER": "own: vLLM's indexer has been replaced",
    "SPARSE_MLA_SGLANG": "1: run the attention of SGLang's DSA backend",
}

# Distributions, by the name that people know them by.
FRAMEWORKS = {
    "NumPy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "PyTorch": ("torch",),
    "JAX": ("jax",),
    "CuPy": ("cupy", "cupy-cuda12x", "cupy-cuda13x"),
}


def versions() -> dict[str, str]:
    """Versions of the frameworks that are installed; none of them is imported."""
    found = {}
    for framework, names in FRAMEWORKS.items():
        for name in names:
            try:
                found[framework] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return found


def instruction_set(kernel: str) -> str:
    """What a CPU kernel is made of, for people: "AVX2 + FMA + F16C"."""
    return next(
        each["isa"] for each in sparse_mla.build_info()["cpu_kernels"] if each["name"] == kernel
    )


def processor() -> str:
    """The CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def facts() -> dict[str, Any]:
    """Everything that the command prints, for json.dumps."""
    return {
        "sparse_mla": sparse_mla.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "build": sparse_mla.build_info(),
        "devices": sparse_mla.devices(),
        "cache_formats": sparse_mla.cache_formats(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "versions": versions(),
    }


def table(rows: list[list[str]], right: tuple[int, ...] = ()) -> str:
    """Aligned columns, those in `right` to the right, two blanks before each line."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def text(found: dict[str, Any]) -> str:
    build, devices = found["build"], found["devices"]
    parts = [f"sparse_mla {found['sparse_mla']}, Python {found['python']}, {found['platform']}"]
    parts.append(f"on {found['processor']}")

    parts.append("\nbuild")
    lists = {"cpu_kernels", "version"}
    plain = [[name, _value(value)] for name, value in build.items() if name not in lists]
    parts.append(table(plain))

    parts.append("\ndevices")
    for device in devices:
        rest = ", ".join(
            f"{name} {_value(value)}"
            for name, value in device.items()
            if name not in ("device", "name")
        )
        parts.append(f"  {device['device']}  {device['name']}: {rest}")

    parts.append("\nCPU kernels")
    rows = []
    for kernel in build["cpu_kernels"]:
        chosen = devices[0].get("kernel") == kernel["name"]
        state = "chosen" if chosen else "runs here" if kernel["runs"] else "not on this CPU"
        rows.append([kernel["name"], kernel["isa"], state])
    parts.append(table(rows))

    parts.append("\ncache formats")
    rows = [["name", "row bytes", "d_qk", "d_v", "scale", "layout"]]
    for name, each in found["cache_formats"].items():
        numbers = [str(each[key] or "any") for key in ("row_bytes", "d_qk", "d_v")]
        rows.append([name, *numbers, str(each["scale"]), each["layout"]])
    parts.append(table(rows, right=(1, 2, 3)))

    parts.append("\nenvironment")
    rows = [
        [name, "not set" if found["environment"][name] is None else found["environment"][name], use]
        for name, use in ENVIRONMENT.items()
    ]
    parts.append(table(rows))

    parts.append("\nframeworks")
    rows = [[name, found["versions"].get(name, "not installed")] for name in FRAMEWORKS]
    parts.append(table(rows))
    return "\n".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(each) for each in value) or "none"
    if isinstance(value, dict):
        return str(value.get("name", value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, "") else str(value)


def main(argv: list[str] | None = None) -> int:
    """Prints the facts and returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla info",
        description="What this installation is: version, build, devices, kernels, cache formats, "
        "environment variables, frameworks.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    found = facts()
    print(json.dumps(found, indent=1) if options.json else text(found))
    return 0
