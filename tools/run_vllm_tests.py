"""The tests of the vLLM plug-in beside vLLM's own wheel, in an environment made for them.

    python tools/run_vllm_tests.py [--package WHEEL] [--torch SPEC] [--keep DIRECTORY] [RELEASE ...]

For each release (as "0.32"; without: the newest that the package index has) its wheel is installed
without its dependencies beside a PyTorch for the CPU and what importing vLLM's attention code
needs, in the ranges that this wheel asks for; then tests/engines/test_vllm.py is run. Prints a line
for each release and ends with status 1 where one has failed.

--package is the wheel of sparse_mla to test; without it, the one that PYTHONPATH has. --keep makes
or reuses the environment in a directory.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Of vLLM's dependencies those that its attention code imports, by way of its configuration and its
# model layers.
NEEDED = [
    "aiohttp",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "einops",
    "fastapi",
    "llguidance",
    "msgspec",
    "numpy",
    "openai",
    "openai-harmony",
    "oss-harmony",
    "partial-json-parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pydantic",
    "pyzmq",
    "regex",
    "requests",
    "transformers",
]
ALSO = ["packaging", "urllib3", "uvloop"]  # these by way of others
# These ask for Triton, several hundred MB that nothing here uses.
BARE = ["xgrammar", "apache-tvm-ffi"]

ASKED = "import importlib.metadata as m; print(m.version('vllm'), *m.requires('vllm'), sep='\\n')"


def run(*command: object) -> str:
    """What a command prints; it says nothing else unless it fails. pip would say of every
    dependency that is not there that it is not there."""
    result = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(str(each) for each in command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def ranges(requirements: list[str], names: list[str]) -> list[str]:
    """What is asked of the packages named, without extras and markers."""
    found = {}
    for requirement in requirements:
        asked, _, marker = requirement.partition(";")
        name, specifier = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[.*\])?\s*(.*?)\s*", asked).groups()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in names and "extra ==" not in marker:
            found[name] = name + specifier
    return sorted(found.values())


def install(pip: list[object], release: str) -> str:
    """Installs a release with what it needs; returns its whole version."""
    run(*pip, "--no-deps", f"vllm=={release}.*" if release else "vllm")
    version, *requirements = run(pip[0], "-c", ASKED).splitlines()
    bare = ranges(requirements, BARE)
    bare += [name for name in BARE if not any(each.startswith(name) for each in bare)]
    run(*pip, "--no-deps", *bare)
    run(*pip, *ranges(requirements, NEEDED), *ALSO)
    return version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--package", type=Path, help="a wheel of sparse_mla")
    parser.add_argument("--torch", default=os.environ.get("TORCH") or "torch==2.13.0")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        directory = (arguments.keep or Path(scratch)).resolve()
        python = directory / "bin" / "python"
        if not python.exists():
            run(sys.executable, "-m", "venv", directory)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        pip += ["--no-compile", "--no-cache-dir"]
        run(*pip, arguments.torch, "pytest", "numpy", "ml_dtypes")
        if arguments.package:
            run(*pip, "--no-deps", "--force-reinstall", arguments.package)
        lines = []
        for release in arguments.releases or [""]:
            start = time.monotonic()
            version = install(pip, release)
            installed = time.monotonic()
            tests = [
                python,
                "-m",
                "pytest",
                "-q",
                "-o",
                "filterwarnings=",
                "-p",
                "no:cacheprovider",
            ]
            result = subprocess.run(
                [*map(str, tests), "tests/engines/test_vllm.py"],
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
            )
            print(result.stdout, flush=True)
            lines.append(
                (
                    result.returncode,
                    f"vLLM {version}: {result.stdout.splitlines()[-1]} "
                    f"(installed in {installed - start:.0f} s)",
                )
            )
        print(*(line for _, line in lines), sep="\n")
        return int(any(status for status, _ in lines))


if __name__ == "__main__":
    sys.exit(main())
