"""`python -m sparse_mla demo`: the recorded cases, how they are completed, what main reports."""

from __future__ import annotations

import hashlib
import runpy
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

np = pytest.importorskip("numpy", reason="the recorded cases are NumPy files")
pytest.importorskip("ml_dtypes", reason="the demo rounds to bfloat16 by ml_dtypes")

from sparse_mla import demo  # noqa: E402


def test_it_passes_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--repeat", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for model in demo.MODELS:
        assert sum(line.startswith(model) for line in lines) == 1
    for name in ("dense float32", "dense bfloat16", "fp8_ds_mla", "fp8_tensor"):
        of_cache = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(of_cache) == len(demo.MODELS)
        assert all("us" in line and "KiB" in line for line in of_cache)
    assert sum("different tokens" in line for line in lines) == len(demo.MODELS)
    assert "FAILED" not in "".join(lines)


@pytest.mark.parametrize("spoil", ["output", "nan", "indices", "scale"])
def test_an_error_past_its_bound_fails(
    spoil: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = demo.load

    def spoilt(model: str) -> dict[str, np.ndarray]:
        case = load(model)
        if spoil == "output":
            case["output"] = case["output"] * np.float32(1.001)
        elif spoil == "nan":
            case["output"][0, 0, 0] = np.nan
        elif spoil == "indices":
            case["indices"] = np.roll(case["indices"], 1, axis=0)
        else:
            case["softmax_scale"] = 576**-0.5
        return case

    monkeypatch.setattr(demo, "load", spoilt)
    assert demo.main(["--repeat", "1"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("model", demo.MODELS)
def test_a_recorded_case_is_what_its_description_says(model: str) -> None:
    case = demo.load(model)
    assert str(case["model"]) == model
    rows, heads, nope = case["q_nope"].shape
    tokens = int(case["seq_lens"].sum())
    assert (nope, case["output"].shape[-1]) == ((192, 256) if "glm" in model else (128, 128))
    assert case["q_rope"].shape == (rows, heads, demo.ROPE)
    assert case["output"].shape[:2] == (rows, heads)
    assert case["latent"].shape == (tokens, demo.LATENT)
    assert case["rope"].shape == (tokens, demo.ROPE)

    slots = demo.token_slots(case)
    assert len(np.unique(slots)) == tokens
    assert slots.min() >= 0
    assert (np.diff(case["block_table"]) < 0).any()

    # A prefill row with few visible keys, full prefill rows and decode rows; no hidden entry.
    indices, last = case["indices"], case["query_positions"]
    assert (indices <= last[:, None]).all()
    counts = (indices >= 0).sum(-1)
    assert (counts == np.minimum(last + 1, indices.shape[1])).all()
    assert (counts < indices.shape[1]).any()
    assert (last + 1 > indices.shape[1]).any()
    assert (last + 1 == case["seq_lens"][case["request_ids"]]).any()


def test_the_files_are_small() -> None:
    data = resources.files("sparse_mla") / "data"
    sizes = [len(data.joinpath(f"{model}.npz").read_bytes()) for model in demo.MODELS]
    assert sum(sizes) < 400_000


def test_a_draw_is_the_same_everywhere() -> None:
    numbers = demo.draw(20, (1000, 30), 0.12)
    assert numbers.dtype == np.float32
    assert hashlib.sha256(numbers.astype("<f4").tobytes()).hexdigest() == DIGEST
    assert numbers.std() == pytest.approx(0.12, rel=0.01)
    assert numbers.mean() == pytest.approx(0, abs=0.002)
    assert np.array_equal(demo.draw(20, (30,), 0.12), numbers[0])


DIGEST = "bfcaec6844ff6983f8f000b1089af6a6a35a22675c8ff79b26e5ff65422090bc"


@pytest.mark.parametrize("missing", [("numpy", "ml_dtypes"), ("ml_dtypes",)])
def test_it_names_the_extra_where_numpy_is_missing(missing: tuple[str, ...]) -> None:
    program = (
        f"import sys; sys.modules |= dict.fromkeys({missing!r}); "
        "from sparse_mla import demo; sys.exit(demo.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("The demo needs NumPy and ml_dtypes (")
    assert "sparse-mla[numpy]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_repeat_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--repeat", "0"])
    assert "--repeat" in capsys.readouterr().err


def test_the_tool_records_such_a_case(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the models are PyTorch's")
    pytest.importorskip("transformers", reason="the models are in transformers")
    tool = Path(__file__).resolve().parent.parent / "tools" / "record_case.py"
    assert runpy.run_path(str(tool))["main"]([str(tmp_path)]) == 0
    for model in demo.MODELS:
        with np.load(tmp_path / f"{model}.npz") as file:
            new = {name: file[name].shape for name in file.files}
        with resources.files("sparse_mla").joinpath("data", f"{model}.npz").open("rb") as file:
            assert new == {name: array.shape for name, array in np.load(file).items()}
