"""GLM-5 and DeepSeek-V3.2 models of the transformers package with `attend` as their attention.

Small random models (models.py) with the real head dimensions generate from three prompts, two of
them padded on the left and one of those shorter than the top-k. What they give is compared with
what the same models give by their own eager attention, and what does not fit has to be refused.
"""

from __future__ import annotations

import copy
import functools
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the models are PyTorch's")
transformers = pytest.importorskip("transformers", reason="the models are in transformers")
if not (hasattr(transformers, "GlmMoeDsaModel") and hasattr(transformers, "DeepseekV32Model")):
    pytest.skip(
        f"transformers {transformers.__version__} has no glm_moe_dsa or no deepseek_v32",
        allow_module_level=True,
    )

import models  # noqa: E402
import sparse_mla  # noqa: E402
import sparse_mla.transformers as adapter  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = 3
TOPK = 24
COLUMNS = 60
NEW_TOKENS = 24
# With this seed the scores of the last token that an indexer selects and of the next one differ by
# 6e-5 or more, or not at all, in every row, and are 0.5 in the mean: rounding selects no others.
SEED = 7
ROW = models.LATENT + models.ROPE

# Ours are errors; torch.compile and transformers have some of their own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with models.one_thread():
        yield


@pytest.fixture(params=models.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def build(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "eager",
) -> torch.nn.Module:
    """A small model with its language-model head."""
    decoder = models.build(
        name,
        layers=LAYERS,
        index_topk=TOPK,
        attn_implementation=attn_implementation,
        seed=SEED,
    )
    kind = {
        "glm_moe_dsa": transformers.GlmMoeDsaForCausalLM,
        "deepseek_v32": transformers.DeepseekV32ForCausalLM,
    }[name]
    decoder.set_experts_implementation("eager")  # others want wider experts on GPUs
    torch.manual_seed(SEED)
    model = kind(decoder.config)
    model.model = decoder
    return model.eval().requires_grad_(False).to(device=device, dtype=dtype)


def prompts(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 60, 43 and 19 tokens, padded on the left, and their mask."""
    ids = torch.randint(2, 128, (3, COLUMNS), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    mask[2, :41] = 0
    return ids.to(device), mask.to(device)


def generate(model: torch.nn.Module, **changed: Any) -> Any:
    ids, mask = prompts(model.device)
    arguments = {
        "attention_mask": mask,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
        "disable_compile": True,
    }
    model.generation_config.eos_token_id = None
    return model.generate(ids, **arguments | changed)


def cache_of(result: Any) -> Any:
    """The cache that a model returned, under the name that the release has for it."""
    return result["cache" if "cache" in result else "past_key_values"]


def cache_bytes(cache: Any) -> int:
    """What the layers hold for attention; the indexer's keys stand apart and do not change."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference over the largest |want|."""
    return ((got - want).abs().max() / want.abs().max()).item()


def step_by_step(
    model: torch.nn.Module, steps: int = 4, cache: Any = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Prefills the prompts and decodes given tokens. Returns the logits (rows, vocabulary) of all
    tokens but padding in float32, and the same of each layer's values before o_proj."""
    ids, mask = prompts(model.device)
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    generator = torch.Generator().manual_seed(5)
    logits: list[torch.Tensor] = []
    values: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    real = mask.bool()
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, kept=kept: kept.append(args[0][real].float())
        )
        for layer, kept in zip(model.model.layers, values, strict=True)
    ]
    for _ in range(1 + steps):
        real = mask[:, -ids.shape[1] :].bool()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            hidden = model.model(ids, mask, positions, cache, use_cache=True).last_hidden_state
            logits.append(model.lm_head(hidden)[real].float())
        ids = torch.randint(2, 128, (3, 1), generator=generator).to(model.device)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    for handle in handles:
        handle.remove()
    return torch.cat(logits), [torch.cat(kept) for kept in values]


# ------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_tokens_are_the_eager_models(name: str, device: str, cache: str | None) -> None:
    model = build(name, device)
    own = generate(model, cache_implementation=cache)
    vars(model).pop("_cache", None)  # where releases before 5.15 keep a static cache
    with adapter.enabled(model):
        ours = generate(model, cache_implementation=cache)
    assert torch.equal(ours.sequences, own.sequences)
    assert own.sequences.shape[1] == COLUMNS + NEW_TOKENS
    assert own.sequences[:, COLUMNS:].unique().numel() > 20
    assert error(torch.stack(ours.logits), torch.stack(own.logits)) < 1e-4
    assert cache_of(ours).layers[0].keys.shape[1::2] == (1, ROW)


def test_greedy_tokens_under_sdpa(name: str, device: str) -> None:
    """The mask is bool there. The model's own sdpa was wrong about it in releases before 5.17, so
    the eager model is what counts."""
    own = generate(build(name, device))
    model = build(name, device, attn_implementation="sdpa")
    with adapter.enabled(model):
        ours = generate(model)
    assert torch.equal(ours.sequences, own.sequences)


def test_greedy_tokens_of_prompts_without_padding(name: str) -> None:
    """Releases before 5.17 make no mask for these under sdpa."""
    own = generate(build(name), attention_mask=None, max_new_tokens=6)
    model = build(name, attn_implementation="sdpa")
    with adapter.enabled(model):
        ours = generate(model, attention_mask=None, max_new_tokens=6)
    assert torch.equal(ours.sequences, own.sequences)


def test_beams_reorder_the_cache(name: str) -> None:
    model = build(name)
    own = generate(model, num_beams=3, max_new_tokens=8)
    with adapter.enabled(model):
        ours = generate(model, num_beams=3, max_new_tokens=8)
    assert torch.equal(ours.sequences, own.sequences)


def test_every_layers_output_in_float32(name: str, device: str) -> None:
    model = build(name, device)
    logits, values = step_by_step(model)
    with adapter.enabled(model):
        our_logits, our_values = step_by_step(model)
    assert len(values) == LAYERS
    for got, want in zip(our_values, values, strict=True):
        assert error(got, want) < 1e-4
    assert error(our_logits, logits) < 1e-4


def test_logits_without_a_cache(name: str) -> None:
    model = build(name)
    ids, mask = prompts()
    with torch.no_grad():
        own = model(ids, mask, use_cache=False).logits
        with adapter.enabled(model):
            ours = model(ids, mask, use_cache=False).logits
    assert error(ours[mask.bool()], own[mask.bool()]) < 1e-4


class Selections:
    """Within the context the indexers of a model select what those of another one selected."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def of(self, model: torch.nn.Module, keep: bool = False) -> list[Any]:
        given = iter(self.kept)
        return [
            layer.self_attn.indexer.register_forward_hook(
                lambda module, args, topk: self.kept.append(topk) if keep else next(given)
            )
            for layer in model.model.layers
            if layer.self_attn.indexer is not None
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_the_models_own(
    name: str, device: str, dtype: torch.dtype
) -> None:
    """Mean |error| of the logits against a float32 model of the same rounded weights.

    All select the same tokens, since one entry that rounding moves over the edge of the top-k
    changes more than attention loses. Over six seeds of both models the model's own loss is 0.022
    to 0.051 of the mean |logit| in bfloat16 and 0.0027 to 0.0062 in float16, and ours is 0.70 to
    0.97 and 0.87 to 1.22 times that: queries are rounded once more, behind W_UK, but keys and
    values are not.
    """
    half = build(name, device, dtype)
    exact = build(name, device)
    exact.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    selections = Selections()
    losses = []
    for model, ours in ((exact, False), (half, False), (half, True)):
        handles = selections.of(model, keep=model is exact)
        if ours:
            adapter.enable(model)
        logits, _ = step_by_step(model)
        for handle in handles:
            handle.remove()
        if model is exact:
            truth = logits
        else:
            losses.append(((logits - truth).abs().mean() / truth.abs().mean()).item())
    own, loss = losses
    assert own < (0.08 if dtype == torch.bfloat16 else 0.01)
    assert loss < 1.5 * own


# ----------------------------------------------------------------------------------------- caches


def test_the_caches_memory(name: str) -> None:
    """576 numbers a token and layer, whatever the release caches by itself: the same, or keys and
    values of every head. 656 bytes where packed."""
    model = build(name)
    tokens = 3 * (COLUMNS + 3) * LAYERS
    before = cache_of(generate(model, max_new_tokens=4))
    attention = model.model.layers[0].self_attn
    heads = attention.num_heads
    expanded = heads * (attention.qk_head_dim + attention.v_head_dim)
    latent = before.layers[0].keys.shape[1] == 1
    assert cache_bytes(before) == tokens * (ROW if latent else expanded) * 4
    sizes = {}
    for cache_format in ("dense", "fp8_ds_mla"):
        with adapter.enabled(model, cache_format=cache_format):
            cache = cache_of(generate(model, max_new_tokens=4))
        sizes[cache_format] = cache_bytes(cache)
        for layer, other in zip(cache.layers, before.layers, strict=True):
            assert (layer.indexer_keys is None) == (other.indexer_keys is None)
            if layer.indexer_keys is not None:
                assert layer.indexer_keys.shape == other.indexer_keys.shape
    assert sizes == {"dense": tokens * ROW * 4, "fp8_ds_mla": tokens * 656}


def new_cache(model: torch.nn.Module, static: bool) -> Any:
    if static:
        return transformers.StaticCache(config=model.config, max_cache_len=4 * COLUMNS)
    return transformers.DynamicCache(config=model.config)


def rounding(cache: Any) -> Any:
    """The cache with dense rows rounded to what their packed form would hold."""
    update = cache.update

    def rounded(rows: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        packed = sparse_mla.pack(rows.flatten(0, 2), cache_format="fp8_ds_mla", block_size=1)
        dense = sparse_mla.unpack(packed, cache_format="fp8_ds_mla")
        return update(dense.view(rows.shape), *arguments, **keywords)

    cache.update = rounded
    return cache


@pytest.mark.parametrize("static", [False, True])
def test_a_packed_cache_is_right_about_its_own_bytes(name: str, device: str, static: bool) -> None:
    model = build(name, device)
    rounded, packed = rounding(new_cache(model, static)), new_cache(model, static)
    with adapter.enabled(model):
        logits, values = step_by_step(model, cache=rounded)
    with adapter.enabled(model, cache_format="fp8_ds_mla"):
        our_logits, our_values = step_by_step(model, cache=packed)
    assert packed.layers[0].keys.dtype == torch.uint8
    rows, dense = (cache.layers[0].keys.flatten(0, 2) for cache in (packed, rounded))
    unpacked = sparse_mla.unpack(rows.unsqueeze(1), cache_format="fp8_ds_mla")
    assert torch.equal(unpacked, dense)  # of the first layer, whose input is the same
    for got, want in zip(our_values, values, strict=True):
        assert error(got, want) < 1e-4
    assert error(our_logits, logits) < 1e-4


@pytest.mark.parametrize("static", [False, True])
def test_caches_of_two_layouts_do_not_mix(name: str, static: bool) -> None:
    model = build(name)
    ids, _ = prompts()

    def call(cache: Any) -> None:
        columns = int(cache.get_seq_length()) + COLUMNS
        positions = torch.arange(columns - COLUMNS, columns)[None]
        with torch.no_grad():
            model.model(ids, torch.ones(3, columns), positions, cache, use_cache=True)

    own, dense = new_cache(model, static), new_cache(model, static)
    call(own)
    with adapter.enabled(model):
        call(dense)
        call(dense)
        with pytest.raises(ValueError, match=r"cache: expected rows of 576 float32 numbers in lay"):
            call(own)
    with (
        adapter.enabled(model, cache_format="fp8_ds_mla"),
        pytest.raises(ValueError, match=r"expected rows of 656 uint8 .* got 576 float32"),
    ):
        call(dense)
    with pytest.raises(RuntimeError):
        call(dense)


def test_a_cache_of_another_kind_is_refused() -> None:
    model = build("glm_moe_dsa")
    layer = model.model.layers[1].self_attn
    keywords = {"position_embeddings": (torch.ones(1, 1, 64), torch.zeros(1, 1, 64))}
    mask, topk = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int32)
    keywords |= {"attention_mask": mask, "prev_topk_indices": topk}
    with (
        adapter.enabled(model),
        torch.no_grad(),
        pytest.raises(TypeError, match=r"^cache: expected a transformers\.Cache, got object"),
    ):
        layer(torch.zeros(1, 1, 64), cache=object(), **keywords)


def test_the_example(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[1] / "examples" / "transformers_generate.py"
    options = f"--device {device} --heads 2 --topk 8 --prompt 24 --new-tokens 3"
    monkeypatch.setattr(sys, "argv", [path.name, *options.split()])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "new tokens equal: 6 of 6" in printed
    assert ("peak memory" in printed) == (device == "cuda")


# ----------------------------------------------------------------------------------- there and back


def test_disabled_the_model_is_its_own_bit_for_bit(name: str) -> None:
    model = build(name)
    parameters = dict(model.named_parameters())
    before, values = step_by_step(model)
    with pytest.raises(RuntimeError, match="inside"), adapter.enabled(model):
        ours, _ = step_by_step(model)
        raise RuntimeError("inside")
    after, values_after = step_by_step(model)
    assert not torch.equal(ours, before)
    assert torch.equal(after, before)
    assert all(map(torch.equal, values_after, values))
    for layer in model.model.layers:
        assert "forward" not in vars(layer.self_attn)
        assert "_sparse_mla" not in vars(layer.self_attn)
    assert all(value is parameters[key] for key, value in model.named_parameters())
    adapter.enable(model)
    again, _ = step_by_step(model)
    assert torch.equal(again, ours)
    adapter.disable(model)


def test_only_this_instance_changes(name: str) -> None:
    model = build(name)
    other = copy.deepcopy(model)
    before, _ = step_by_step(model)
    adapter.enable(model.model)
    ours, _ = step_by_step(model)
    assert torch.equal(step_by_step(other)[0], before)

    enabled_copy = copy.deepcopy(model)
    adapter.disable(model)
    with torch.no_grad():
        enabled_copy.model.layers[0].self_attn.o_proj.weight.zero_()
    changed, _ = step_by_step(enabled_copy)
    assert not torch.equal(changed, ours)  # its layers read their own weights
    assert torch.equal(step_by_step(model)[0], before)


def test_a_hook_around_the_forward_stays(name: str) -> None:
    """As the package accelerate puts one there to move inputs between devices."""
    model = build(name)
    before, _ = step_by_step(model)
    calls = []

    def hooked(module: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        calls.append(module)
        return module._old_forward(*arguments, **keywords)

    for layer in model.model.layers:
        attention = layer.self_attn
        attention._hf_hook = object()
        attention._old_forward = attention.forward
        attention.forward = functools.partial(hooked, attention)
    with adapter.enabled(model):
        ours, _ = step_by_step(model)
    assert len(calls) == LAYERS * 5
    assert not torch.equal(ours, before)
    assert error(ours, before) < 1e-4
    assert torch.equal(step_by_step(model)[0], before)
    assert len(calls) == LAYERS * 10


def test_a_compiled_step_is_one_graph() -> None:
    """GLM's layers, with and without an indexer, over a static cache."""
    model = build("glm_moe_dsa", attn_implementation="sdpa")
    ids, mask = prompts()
    logits = []
    for compiled in (False, True):
        cache = transformers.StaticCache(config=model.config, max_cache_len=COLUMNS + 1)
        layers = [layer.self_attn for layer in model.model.layers]
        with adapter.enabled(model), torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            model.model(ids, mask, positions, cache, use_cache=True)
            if compiled:
                torch._dynamo.reset()
                for layer in layers:
                    layer.compile(fullgraph=True, backend="eager")
            longer = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
            step = model.model(ids[:, :1], longer, positions[:, -1:] + 1, cache, use_cache=True)
            logits.append(model.lm_head(step.last_hidden_state))
    torch._dynamo.reset()
    assert torch.equal(logits[0], logits[1])


# --------------------------------------------------------------------------------------- refusals


class Fp8Linear(torch.nn.Linear):
    """What a quantisation puts in the place of a layer."""


def quantised(attention: torch.nn.Module) -> None:
    layer = Fp8Linear(4, 4, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), False)
    attention.kv_b_proj = layer


def in_int8(attention: torch.nn.Module) -> None:
    attention.kv_b_proj.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), False)


def offloaded(attention: torch.nn.Module) -> None:
    attention.kv_b_proj.to("meta")


def biased(attention: torch.nn.Module) -> None:
    attention.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(4))


def weightless(attention: torch.nn.Module) -> None:
    attention.kv_b_proj = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (quantised, r"got Fp8Linear with a Tensor of float8_e4m3fn on cpu; load"),
        (in_int8, r"got Linear with a Tensor of int8 on cpu; load"),
        (offloaded, r"got Linear with a Tensor of float32 on meta; load"),
        (biased, r"got Linear with a Tensor of float32 on cpu and a bias; load"),
        (weightless, r"got Identity; load"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(change: Any, message: str) -> None:
    model = build("deepseek_v32")
    change(model.model.layers[1].self_attn)
    name = r"model\.layers\.1\.self_attn\.kv_b_proj: expected a plain torch\.nn\.Linear .*"
    with pytest.raises(TypeError, match=name + message):
        adapter.enable(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_models_are_refused() -> None:
    class Attention(type(build("deepseek_v32").model.layers[0].self_attn)):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"DeepseekV32Attention or GlmMoeDsaAttention, got Sequen"):
        adapter.enable(model)
    with pytest.raises(TypeError, match="model: expected a model with layers of"):
        adapter.disable(model)
    model = build("deepseek_v32").model.layers[0]
    model.self_attn.__class__ = Attention
    with pytest.raises(TypeError, match="got DeepseekV32DecoderLayer"):
        adapter.enable(model)


def test_releases_that_do_not_fit_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    attention = type(model.model.layers[0].self_attn)
    with monkeypatch.context() as patch:
        patch.delattr(transformers.Cache, "update_indexer")
        with pytest.raises(sparse_mla.UnsupportedError, match=r"has no Cache\.update_indexer; rel"):
            adapter.enable(model)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "forward", lambda self, hidden_states, attention_mask: None)
        with pytest.raises(
            sparse_mla.UnsupportedError,
            match=rf"^model\.layers\.0\.self_attn: {attention.__name__} of transformers "
            r"[0-9.]+ does not fit: it has no forward\(position_embeddings\), "
            r"forward\(position_ids\), forward\(cache\); ",
        ):
            adapter.enable(model)
    del model.model.layers[0].self_attn.q_a_proj
    with pytest.raises(sparse_mla.UnsupportedError, match="it has no q_a_proj; "):
        adapter.enable(model)


def test_enabling_twice_and_disabling_twice_are_refused() -> None:
    model = build("deepseek_v32")
    adapter.enable(model)
    with pytest.raises(ValueError, match="expected a model that is not enabled"):
        adapter.enable(model, cache_format="fp8_ds_mla")
    adapter.disable(model)
    with pytest.raises(ValueError, match="expected a model that is enabled"):
        adapter.disable(model)


@pytest.mark.parametrize("cache_format", ["fp8_tensor", "fp8_ds_mla_norope", "fp8", None])
def test_other_cache_formats_are_refused(cache_format: Any) -> None:
    model = build("deepseek_v32")
    with pytest.raises(ValueError, match=rf"cache_format: .* got {cache_format!r} for rows of 512"):
        adapter.enable(model, cache_format=cache_format)


def test_a_forward_of_somebody_else_is_refused() -> None:
    model = build("deepseek_v32")
    attention = model.model.layers[2].self_attn
    attention.forward = functools.partial(type(attention).forward, attention)
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.forward: expected DeepseekV32At"):
        adapter.enable(model)
    assert not any(hasattr(module, "_sparse_mla") for module in model.modules())


@pytest.mark.parametrize("implementation", ["flash_attention_2", "kernels-community/flash-mla"])
def test_other_implementations_are_refused(implementation: str) -> None:
    model = build("deepseek_v32")
    model.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match=rf"attn_implementation: .* got '{implementation}'"):
        adapter.enable(model)
    model.config._attn_implementation_internal = "eager"
    with adapter.enabled(model):
        model.config._attn_implementation_internal = "paged|sdpa"
        keywords = {"position_embeddings": (), "attention_mask": None}
        with pytest.raises(ValueError, match=r"attn_implementation: .* got 'paged\|sdpa'"):
            model.model.layers[0].self_attn(torch.zeros(1, 1, 64), **keywords)


def test_attention_weights_are_refused(name: str) -> None:
    model = build(name)
    ids, mask = prompts()
    with adapter.enabled(model):
        with torch.no_grad(), pytest.raises(ValueError, match=r"^output_attentions: "):
            model(ids, mask, output_attentions=True)
        with pytest.raises(ValueError, match=r"^output_attentions: "):
            generate(model, output_attentions=True)
        with torch.no_grad():
            assert len(model(ids, mask, output_hidden_states=True).hidden_states) == LAYERS + 1
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"^config\.output_attentions: expected False, got True"):
        adapter.enable(model)


def test_training_is_refused() -> None:
    model = build("glm_moe_dsa")
    ids, mask = prompts()
    with adapter.enabled(model):
        model.requires_grad_(True)
        with pytest.raises(ValueError, match=r"expected a call under torch\.no_grad\(\)"):
            model(ids, mask)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with torch.no_grad():
            model(ids, mask)
            model.train()
            with pytest.raises(ValueError, match=r"attention_dropout: .* got 0\.1; call"):
                model(ids, mask)


def test_a_shared_layer_alone_is_refused() -> None:
    model = build("glm_moe_dsa")
    layer = model.model.layers[1].self_attn
    assert layer.indexer is None
    hidden = torch.zeros(1, 1, 64)
    embeddings = (torch.ones(1, 1, 64), torch.zeros(1, 1, 64))
    with adapter.enabled(model), torch.no_grad():
        with pytest.raises(ValueError, match="prev_topk_indices: expected the selection"):
            layer(hidden, position_embeddings=embeddings, attention_mask=torch.zeros(1, 1, 1, 1))
        for shape in ((1, 1), (1, 4, 1, 1)):  # two dimensions, and a mask for each head
            with pytest.raises(ValueError, match=r"attention_mask: expected .* got shape \(1, "):
                layer(hidden, position_embeddings=embeddings, attention_mask=torch.zeros(shape))


def test_without_a_mask_columns_are_positions() -> None:
    """As older releases call a layer that sees no padding."""
    model = build("glm_moe_dsa")
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(5)[None]
    keywords = {
        "hidden_states": hidden,
        "position_embeddings": model.model.rotary_emb(hidden, positions),
        "position_ids": positions,
        "prev_topk_indices": torch.arange(5, dtype=torch.int32).expand(2, 5, 5),
    }
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    layer = model.model.layers[1].self_attn
    with adapter.enabled(model), torch.no_grad():
        masked, weights, topk = layer(attention_mask=causal, **keywords)
        free, _, _ = layer(attention_mask=causal | True, **keywords)
        own, _, _ = layer(attention_mask=None, **keywords)
    assert torch.equal(own, masked)
    assert not torch.equal(own, free)
    assert weights is None
    assert topk is keywords["prev_topk_indices"]
