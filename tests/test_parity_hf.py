"""The layer against Hugging Face's DeepseekV3Attention in torch on the CPU: forward and every gradient, float32.

The other parity tests run the golden and the layer through this file.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity_document as document

from jax_mla import MLAConfig, convert, mla

pytestmark = pytest.mark.golden

TOLERANCE = 1e-5  # of the largest golden number of each tensor
B, T = 3, 37
HF = dict(
    hidden_size=44,
    num_attention_heads=5,
    num_key_value_heads=5,
    kv_lora_rank=18,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=14,
    max_position_embeddings=10240,
    rms_norm_eps=1e-3,  # not of the latent norms
)
Q_RANK = 26
# The ramp runs through the 4 frequencies, and both of YaRN's factors differ from 1.
YARN = dict(
    rope_type="yarn", factor=40, original_max_position_embeddings=256, beta_fast=8, mscale=0.707, mscale_all_dim=1.1
)
CASES = {
    f"{'q LoRA' if rank else 'no q LoRA'}, {'bias, ' if bias else ''}{'pairs' if pairs else 'halves'}, YaRN": dict(
        q_lora_rank=rank, attention_bias=bias, rope_interleave=pairs, rope_parameters=YARN
    )
    for rank in (Q_RANK, None)
    for bias in (False, True)
    for pairs in (True, False)
}
CASES["q LoRA, bias, pairs, plain RoPE"] = dict(q_lora_rank=Q_RANK, attention_bias=True, rope_parameters=None)
CASES["no q LoRA, halves, theta 500"] = dict(
    q_lora_rank=None, rope_interleave=False, rope_parameters=dict(rope_type="default", rope_theta=500.0)
)
# Without mscale Hugging Face's factor of cos and sin is g(1), not DeepSeek's g(1)/g(mscale_all_dim).
CASES["q LoRA, pairs, YaRN without mscale"] = dict(
    q_lora_rank=Q_RANK, rope_parameters={key: value for key, value in YARN.items() if key != "mscale"}
)
MODULE_CASE = "q LoRA, bias, pairs, YaRN"  # what the Flax modules are checked on

TENSORS = [
    "hidden_states",
    *("q_proj.weight", "q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight", "q_b_proj.weight"),
    *("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_a_layernorm.weight", "kv_b_proj.weight"),
    *("o_proj.weight", "o_proj.bias"),
]

COLUMNS = ["forward", *TENSORS]

TITLE = "float32"
TEXT = f"""
Fails above {document.bound(TOLERANCE)}. Batch {B}, {T} tokens, causal, positions with offsets and gaps,
{HF["num_attention_heads"]} heads, head dims {HF["qk_nope_head_dim"]} + {HF["qk_rope_head_dim"]} and {HF["v_head_dim"]}.
`linen.MLA` and `nnx.MLA` are the Flax modules; the other rows are the function `mla`.
"""
ROWS = [*CASES, *(f"{name}.MLA: {MODULE_CASE}" for name in ("linen", "nnx"))]
SECTIONS = [document.Section(TITLE, TEXT, ROWS, COLUMNS)]


# --- The golden ---------------------------------------------------------------------------------------------------


def golden_config(case):
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**HF, **json.loads(json.dumps(CASES[case])), attn_implementation="eager")


def inputs(config, seed):
    """Positions that start anywhere and leave gaps (RoPE is relative: an offset alone would change nothing), x, and a
    cotangent without any symmetry."""
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 300, (B, 1)) + np.cumsum(rng.integers(1, 5, (B, T)), axis=1)
    x, cotangent = rng.normal(size=(2, B, T, config.hidden_size)).astype(np.float32)
    return positions, x, cotangent


def weights(module, seed):
    """Random numbers for every parameter: norms away from 1, biases away from 0."""
    rng = np.random.default_rng(seed)
    state = {}
    for key, value in module.state_dict().items():
        shape = tuple(value.shape)
        if key.endswith("layernorm.weight"):
            state[key] = rng.uniform(0.4, 1.6, shape) * rng.choice([-1, 1], shape)
        else:
            state[key] = rng.normal(size=shape) * (0.3 if key.endswith(".bias") else shape[-1] ** -0.5)
    return {key: value.astype(np.float32) for key, value in state.items()}


def run_golden(config, state, positions, x, cotangent, *, mask=None, dtype="float32", device="cpu"):
    """Output, and gradients by Hugging Face's names, all as float32. mask: additive [B, 1, T, T], by default causal."""
    import torch
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    torch.set_float32_matmul_precision("highest")
    module = DeepseekV3Attention(config, layer_idx=0).eval()
    module.load_state_dict({key: torch.tensor(value) for key, value in state.items()}, strict=True)
    dtype = getattr(torch, dtype)
    module.to(device, dtype)
    hidden = torch.tensor(x).to(device, dtype).requires_grad_()
    length = x.shape[1]
    mask = torch.full((length, length), -math.inf).triu(1)[None, None] if mask is None else torch.tensor(mask)
    tables = DeepseekV3RotaryEmbedding(config).to(device)(hidden, torch.tensor(positions).to(device))
    y, _ = module(hidden_states=hidden, position_embeddings=tables, attention_mask=mask.to(device, dtype))
    assert y.dtype == dtype
    y.backward(torch.tensor(cotangent).to(device, dtype))
    gradients = {"hidden_states": hidden.grad, **{name: p.grad for name, p in module.named_parameters()}}
    gradients = {name: gradient.float().cpu().numpy() for name, gradient in gradients.items()}
    return y.detach().float().cpu().numpy(), gradients


def parameters(config, seed=0):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    return weights(DeepseekV3Attention(config, layer_idx=0), seed)


# --- The comparison -----------------------------------------------------------------------------------------------


def differentiate(apply):
    """y, dparams, dx of `apply(params, x, positions)`: what `run_ours` runs, compiled once for all calls alike."""

    @jax.jit
    def run(params, x, positions, cotangent):
        y, pullback = jax.vjp(lambda params, x: apply(params, x, positions), params, x)
        return y, *pullback(cotangent)

    return run


def run_ours(run, config, state, positions, x, cotangent, *, dtype="float32", param_dtype=None):
    """The same of ours. positions: None for the layer's own."""
    params = convert.from_hf(state, config)
    params = {name: jnp.asarray(value, param_dtype or dtype) for name, value in params.items()}
    given = None if positions is None else jnp.asarray(positions)
    with jax.default_matmul_precision("highest"):
        y, dparams, dx = run(params, jnp.asarray(x, dtype), given, jnp.asarray(cotangent, dtype))
    assert y.dtype == dx.dtype == dtype and all(dparams[name].dtype == params[name].dtype for name in params)
    y, dparams, dx = jax.tree.map(lambda a: np.asarray(a.astype(jnp.float32)), (y, dparams, dx))
    return y, {"hidden_states": dx, **convert.to_hf(dparams, config)}


def relative_errors(ours, golden):
    (y, gradients), (golden_y, golden_gradients) = ours, golden
    assert gradients.keys() == golden_gradients.keys()
    pairs = {"forward": (y, golden_y), **{name: (gradients[name], golden_gradients[name]) for name in gradients}}
    errors = {}
    for name, (found, wanted) in pairs.items():
        assert found.shape == wanted.shape and found.dtype == wanted.dtype == np.float32, name
        assert np.abs(wanted).max() > 1e-2, f"the golden {name} is too small to tell anything"
        errors[name] = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return errors


def compare(case, apply, seed=0):
    theirs = golden_config(case)
    config = MLAConfig.from_hf(theirs.to_dict())
    state = parameters(theirs, seed)
    given = inputs(config, seed + 1)
    # to_hf's output is what the golden loads.
    loaded = convert.to_hf(convert.from_hf(state, config), config)
    run = differentiate(lambda params, x, positions: apply(params, x, config, positions))
    errors = relative_errors(run_ours(run, config, state, *given), run_golden(theirs, loaded, *given))
    assert_within(errors)
    return errors


def assert_within(errors, tolerance=TOLERANCE):
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong


@pytest.mark.parametrize("case", CASES)
def test_mla(case, tmp_path_factory):
    errors = compare(case, lambda params, x, config, positions: mla(params, x, config, positions=positions))
    document.report(tmp_path_factory, TITLE, case, errors)


def apply_linen(params, x, config, positions):
    from jax_mla import linen

    return linen.MLA(config).apply({"params": params}, x, positions=positions)


def apply_nnx(params, x, config, positions):
    from flax import nnx

    import jax_mla.nnx

    graph, state = nnx.split(jax_mla.nnx.MLA(config, rngs=nnx.Rngs(0)))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(x, positions=positions)


@pytest.mark.parametrize("apply", [apply_linen, apply_nnx])
def test_flax_modules(apply, tmp_path_factory):
    row = f"{apply.__name__.removeprefix('apply_')}.MLA: {MODULE_CASE}"
    document.report(tmp_path_factory, TITLE, row, compare(MODULE_CASE, apply, seed=7))


@pytest.mark.parametrize(
    "change",
    [
        dict(norm_eps=1e-3),
        dict(rope_interleave=False),
        dict(mscale=0.8),
        dict(mscale_all_dim=1.0),
        dict(rope_theta=11000.0),
        dict(original_max_position_embeddings=1024),
    ],
)
def test_the_comparison_sees_a_wrong_setting(change):
    """Each setting moves the output by far more than the tolerance."""
    import dataclasses

    theirs = golden_config(MODULE_CASE)
    settings = theirs.to_dict()
    config = MLAConfig.from_hf(settings)
    state = parameters(theirs)
    positions, x, _ = inputs(config, 1)
    if "norm_eps" in change:
        wrong = dataclasses.replace(config, **change)
    else:
        wrong = MLAConfig.from_hf({**settings, **change, "rope_parameters": {**settings["rope_parameters"], **change}})
    assert wrong != config
    params = convert.from_hf(state, config)
    run = jax.jit(mla, static_argnums=2)
    y, changed = (np.asarray(run(params, jnp.asarray(x), c, positions=jnp.asarray(positions))) for c in (config, wrong))
    assert np.abs(changed - y).max() / np.abs(y).max() > 20 * TOLERANCE
