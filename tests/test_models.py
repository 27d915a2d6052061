"""The main job on real model code: the attention of GLM-5 and DeepSeek-V3.2, layer by layer.

Small random models (models.py) prefill three requests, one padded on the left and one on the right,
and decode a few tokens. What their layers computed is computed again from a paged latent cache:
`append` writes the new tokens into shuffled blocks, `attend` reads the model's own top-k, and the
value half of kv_b_proj follows. Unused slots hold NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the models are PyTorch's")
transformers = pytest.importorskip("transformers", reason="the models are in transformers")
np = pytest.importorskip("numpy", reason="the reference is NumPy")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="the reference reads bfloat16 by ml_dtypes")
if not (hasattr(transformers, "GlmMoeDsaModel") and hasattr(transformers, "DeepseekV32Model")):
    pytest.skip(
        f"transformers {transformers.__version__} has no glm_moe_dsa or no deepseek_v32",
        allow_module_level=True,
    )

import models  # noqa: E402
import sparse_mla  # noqa: E402
from sparse_mla import reference  # noqa: E402

LAYERS = 3
TOPK = 32
COLUMNS = 100
DECODE_STEPS = 3


@dataclass
class Run:
    """A model, its recorded calls (prefill, then decode steps) and the mask over all columns."""

    model: torch.nn.Module
    calls: list[list[models.Step]]
    mask: torch.Tensor

    def attention(self, layer: int) -> torch.nn.Module:
        return self.model.layers[layer].self_attn


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with models.one_thread():
        yield


@pytest.fixture(scope="module", params=[("glm_moe_dsa", "sdpa"), ("deepseek_v32", "eager")])
def run(request: pytest.FixtureRequest) -> Run:
    name, attn_implementation = request.param
    model = models.build(
        name, layers=LAYERS, index_topk=TOPK, attn_implementation=attn_implementation
    )
    mask = torch.ones(3, COLUMNS, dtype=torch.long)
    mask[1, :29] = 0
    mask[2, 55:] = 0
    calls, mask = models.run(model, mask, DECODE_STEPS)
    return Run(model, calls, mask)


@dataclass
class Result:
    """One attend call and the step of the model that it repeats; tensors are flat over rows."""

    out: torch.Tensor  # (rows, heads, 512)
    lse: torch.Tensor  # (rows, heads)
    real: torch.Tensor  # (rows,): not padding
    output: torch.Tensor  # (rows, heads, v), the model's
    projected: torch.Tensor  # (rows, hidden), the model's
    visible: torch.Tensor  # (rows,): how many keys the model's mask shows
    arguments: dict[str, Any]  # as attend got them

    def values(self, attention: torch.nn.Module) -> torch.Tensor:
        return models.expand(self.out.float(), attention)


def attend_layer(
    run: Run,
    layer: int,
    *,
    form: str = "positions",
    dtype: torch.dtype = torch.float32,
    cache_format: str = "dense",
    block_size: int = 64,
    **changed: Any,
) -> Iterator[Result]:
    """Repeats every call of a layer: appends its tokens to the cache, then attends.

    `form` "positions" gives int32 positions with a block table; decode steps are (batch, 1, …) then
    and leave request_ids out. "slots" gives int64 slots and q as a pair of strided parts.
    """
    attention = run.attention(layer)
    position = models.positions(run.mask)
    table, num_blocks = models.block_tables(run.mask.sum(-1), block_size)
    row = sparse_mla.cache_formats()[cache_format]["row_bytes"]
    width = row or (models.LATENT + models.ROPE) * dtype.itemsize
    cache = torch.full((num_blocks, block_size, width), 0xFF, dtype=torch.uint8)
    if not row:
        cache = cache.view(dtype)
    scale = None
    if cache_format == "fp8_tensor":
        steps = [call[layer] for call in run.calls]
        scale = max(max(s.latent.abs().max(), s.rope.abs().max()).item() for s in steps) / 448

    for call in run.calls:
        step = call[layer]
        batch, tokens, columns = step.visible.shape
        where = models.query_positions(step, position)
        sparse_mla.append(
            cache,
            models.slots_of(where, table, block_size).flatten(),  # -1 for padding
            step.latent.flatten(0, 1).to(dtype),
            step.rope.flatten(0, 1).to(dtype),
            cache_format=cache_format,
            cache_scale=scale,
        )
        q = (models.absorb(step.q_nope, attention).to(dtype), step.q_rope.to(dtype))
        indices = models.visible_topk(step, position)
        arguments: dict[str, Any] = {
            "kv_cache": cache,
            "cache_format": cache_format,
            "softmax_scale": attention.scaling,
        }
        if scale is not None:
            arguments["cache_scale"] = scale
        if form == "slots":
            arguments["q"] = q
            arguments["indices"] = models.slots_of(indices, table, block_size)
        else:
            arguments["q"] = torch.cat(q, dim=-1)
            arguments["indices"] = indices.int()
            arguments["block_table"] = table.int()
            arguments["seq_lens"] = run.mask[:, :columns].sum(-1).int()
            arguments["query_positions"] = where.int()
            if tokens > 1:  # flat rows, as engines batch a prefill
                request = torch.arange(batch)[:, None].expand(batch, tokens)
                arguments["request_ids"] = torch.where(where >= 0, request, -1).int().flatten()
                for name in ("q", "indices", "query_positions"):
                    arguments[name] = arguments[name].flatten(0, 1)
        arguments |= changed
        out, lse = sparse_mla.attend(**arguments)
        yield Result(
            out=out.reshape(batch * tokens, *out.shape[-2:]),
            lse=lse.reshape(batch * tokens, -1),
            real=(where >= 0).flatten(),
            output=step.output.flatten(0, 1),
            projected=step.projected.flatten(0, 1),
            visible=step.visible.sum(-1).flatten(),
            arguments=arguments,
        )


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference over the largest |truth|."""
    return ((result - truth).abs().max() / truth.abs().max()).item()


def exact(result: Result) -> reference.Attention:
    """Float64 over the bytes that the call read."""

    def as_numpy(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(as_numpy(part) for part in value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()

    return reference.attention(**{name: as_numpy(v) for name, v in result.arguments.items()})


def largest_weights(prefill: models.Step, attention: torch.nn.Module) -> torch.Tensor:
    """The largest attention weight of every row and head of a prefill, (batch, tokens, heads)."""
    chosen = torch.zeros_like(prefill.visible).scatter(-1, prefill.topk, True) & prefill.visible
    score = torch.einsum("bthl,bcl->bthc", models.absorb(prefill.q_nope, attention), prefill.latent)
    score += torch.einsum("bthr,bcr->bthc", prefill.q_rope, prefill.rope)
    score = (score * attention.scaling).masked_fill(~chosen.unsqueeze(2), -torch.inf)
    return score.softmax(-1).amax(-1)


def test_the_input_is_hard(run: Run) -> None:
    """The top-k bites and names hidden tokens, scores are peaked, layers share their top-k."""
    for layer in range(LAYERS):
        attention = run.attention(layer)
        prefill = run.calls[0][layer]
        real = models.query_positions(prefill, models.positions(run.mask)) >= 0
        assert prefill.topk.shape[-1] == TOPK
        visible = prefill.visible.sum(-1)[real]
        assert (visible > TOPK).float().mean() > 0.4
        assert (visible < TOPK).any()
        assert (~prefill.visible.gather(-1, prefill.topk))[real].any()
        assert all((call[layer].visible.sum(-1) > TOPK).all() for call in run.calls[1:])

        largest = largest_weights(prefill, attention)[real]
        assert 0.4 < largest.mean() < 0.95, f"mean of the largest weights {largest.mean():.2f}"

    shared = [run.attention(layer).indexer is None for layer in range(LAYERS)]
    if run.model.config.model_type == "glm_moe_dsa":
        assert shared == [False, True, False]
        assert torch.equal(run.calls[0][0].topk, run.calls[0][1].topk)
    else:
        assert not any(shared)
        assert run.attention(0).scaling > 1.8 * 192**-0.5  # the YaRN factor squared


@pytest.mark.parametrize(("form", "block_size"), [("positions", 64), ("slots", 48)])
def test_float32_is_the_models_own_attention(run: Run, form: str, block_size: int) -> None:
    for layer in range(LAYERS):
        attention = run.attention(layer)
        calls = 0
        for result in attend_layer(run, layer, form=form, block_size=block_size):
            values = result.values(attention)
            real = result.real
            assert relative_error(values[real], result.output[real]) < 1e-4
            projected = attention.o_proj(values.flatten(1))
            assert relative_error(projected[real], result.projected[real]) < 1e-4
            if form == "positions":  # padding rows have request -1
                assert (result.out[~real] == 0).all()
                assert (result.lse[~real] == -torch.inf).all()
            calls += 1
        assert calls == 1 + DECODE_STEPS


@pytest.mark.parametrize(
    ("cache_format", "dtype", "loss"),
    [
        ("dense", torch.float32, 1e-5),
        ("dense", torch.float16, 2e-3),
        ("dense", torch.bfloat16, 1.5e-2),
        ("fp8_ds_mla", torch.bfloat16, 0.15),
        ("fp8_tensor", torch.bfloat16, 0.15),
    ],
)
def test_every_cache_is_right_about_its_own_bytes(
    run: Run, cache_format: str, dtype: torch.dtype, loss: float
) -> None:
    """Against float64 within the bound of the contract; against the model within what the cache
    loses, for peaked scores magnify the rounding of keys: mean |error| over mean |output|."""
    for layer in range(LAYERS):
        for result in attend_layer(run, layer, dtype=dtype, cache_format=cache_format):
            assert result.out.dtype == dtype
            truth = exact(result)
            out, lse = result.out.double().numpy(), result.lse.double().numpy()
            ref, ref_lse = truth.out.reshape(out.shape), truth.lse.reshape(lse.shape)
            assert (np.abs(out - ref) <= truth.bound_out.reshape(out.shape)).all()
            some = result.real.numpy()
            assert np.isfinite(ref_lse[some]).all()
            difference = np.abs(lse[some] - ref_lse[some])
            assert (difference <= truth.bound_lse.reshape(lse.shape)[some]).all()
            cosine = (out * ref).sum() / np.linalg.norm(out) / np.linalg.norm(ref)
            assert 1 - cosine < 5e-6

            values, output = result.values(run.attention(layer)), result.output
            error = (values - output)[result.real].abs().mean() / output[result.real].abs().mean()
            assert error < loss


def test_the_indexers_future_entries_change_nothing(run: Run) -> None:
    """query_positions masks the later tokens that a short row's top-k names; they are no fault."""
    position = models.positions(run.mask)
    for layer in range(LAYERS):
        prefill = run.calls[0][layer]
        named = models.named_topk(prefill, position).flatten(0, 1).int()
        where = models.query_positions(prefill, position).flatten()
        assert (named[where >= 0] > where[where >= 0, None]).any()
        hidden = next(attend_layer(run, layer))
        masked = next(attend_layer(run, layer, indices=named, validate="raise"))
        assert torch.equal(masked.out, hidden.out)
        assert torch.equal(masked.lse, hidden.lse)


def test_a_wrong_softmax_scale_shows(run: Run) -> None:
    """The scale that the absorbed width suggests is not the model's."""
    for layer in range(LAYERS):
        for result in attend_layer(run, layer, softmax_scale=576**-0.5):
            values = result.values(run.attention(layer))
            assert relative_error(values[result.real], result.output[result.real]) > 0.05


def test_all_positions_serve_short_rows_and_only_those(run: Run) -> None:
    """indices=None is what a model does while a row sees no more keys than its top-k holds."""
    for layer in range(LAYERS):
        for result in attend_layer(run, layer, indices=None):
            values = result.values(run.attention(layer))
            short = result.real & (result.visible <= TOPK)
            long = result.real & ~short
            if short.any():
                assert relative_error(values[short], result.output[short]) < 1e-4
            assert relative_error(values[long], result.output[long]) > 0.05


def test_a_top_k_of_other_rows_shows(run: Run) -> None:
    """The comparison would notice an index array that is one row off."""
    good = next(attend_layer(run, 0))
    indices = good.arguments["indices"].roll(1, dims=0)
    bad = next(attend_layer(run, 0, indices=indices))
    values = bad.values(run.attention(0))
    assert relative_error(values[bad.real], bad.output[bad.real]) > 0.05
