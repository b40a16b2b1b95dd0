"""The layer against Hugging Face's DeepseekV3Attention in torch on the CPU: forward and every gradient, float32.

Each case checks itself and leaves its errors in the run's temporary folder; the case that completes the set writes
docs/parity.md (so this works under pytest-xdist too, and a partial or failing run leaves the file alone).
"""

import json
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def run_golden(config, state, positions, x, cotangent):
    """Output, and gradients by Hugging Face's names."""
    import torch
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    torch.set_float32_matmul_precision("highest")
    module = DeepseekV3Attention(config, layer_idx=0).eval()
    module.load_state_dict({key: torch.tensor(value) for key, value in state.items()}, strict=True)
    hidden = torch.tensor(x, requires_grad=True)
    mask = torch.full((T, T), -math.inf).triu(1)[None, None]
    tables = DeepseekV3RotaryEmbedding(config)(hidden, torch.tensor(positions))
    y, _ = module(hidden_states=hidden, position_embeddings=tables, attention_mask=mask)
    y.backward(torch.tensor(cotangent))
    gradients = {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}
    return y.detach().numpy(), {"hidden_states": hidden.grad.numpy(), **gradients}


def parameters(config, seed=0):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    return weights(DeepseekV3Attention(config, layer_idx=0), seed)


# --- The comparison -----------------------------------------------------------------------------------------------


def run_ours(apply, config, state, positions, x, cotangent):
    """The same of `apply(params, x, positions)`."""
    params = {name: jnp.asarray(value) for name, value in convert.from_hf(state, config).items()}

    @jax.jit
    def forward_and_gradients(params, x):
        y, pullback = jax.vjp(lambda params, x: apply(params, x, jnp.asarray(positions)), params, x)
        return y, *pullback(jnp.asarray(cotangent))

    with jax.default_matmul_precision("highest"):
        y, dparams, dx = forward_and_gradients(params, jnp.asarray(x))
    return np.asarray(y), {"hidden_states": np.asarray(dx), **convert.to_hf(dparams, config)}


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
    errors = relative_errors(
        run_ours(lambda params, x, positions: apply(params, x, config, positions), config, state, *given),
        run_golden(theirs, loaded, *given),
    )
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, wrong
    return errors


@pytest.mark.parametrize("case", CASES)
def test_mla(case, report):
    report(case, compare(case, lambda params, x, config, positions: mla(params, x, config, positions=positions)))


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
def test_flax_modules(apply, report):
    name = apply.__name__.removeprefix("apply_")
    report(f"{name}.MLA: {MODULE_CASE}", compare(MODULE_CASE, apply, seed=7))


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
    y, changed = (np.asarray(mla(params, jnp.asarray(x), c, positions=jnp.asarray(positions))) for c in (config, wrong))
    assert np.abs(changed - y).max() / np.abs(y).max() > 20 * TOLERANCE


# --- docs/parity.md -----------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[1] / "docs" / "parity.md"
ROWS = [*CASES, *(f"{name}.MLA: {MODULE_CASE}" for name in ("linen", "nnx"))]
COLUMNS = ["forward", *TENSORS]
HEADER = f"""\
# Parity with PyTorch

`jax_mla` against Hugging Face's `DeepseekV3Attention` (eager attention, causal mask) in torch on the CPU, all in
float32, with the same weights through `convert.from_hf` and `to_hf`: the output, then the gradient of every input and
parameter for a random cotangent. A number bounds max |ours - golden| / max |golden| of its tensor; the tests fail above
1e-5.

Batch {B}, {T} tokens, positions with offsets and gaps, {HF["num_attention_heads"]} heads, head dims \
{HF["qk_nope_head_dim"]} + {HF["qk_rope_head_dim"]} and {HF["v_head_dim"]}.
`linen.MLA` and `nnx.MLA` are the Flax modules; the other rows are the function `mla`.

Written by tests/test_parity_hf.py, with the versions installed where it ran. A bound stays while it holds and is within
ten times of what is measured, so that another machine does not change this file.
"""


@pytest.fixture
def report(tmp_path_factory):
    """Keeps a row; whoever completes the set writes the document."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the one that all workers share
    folder = folder / "parity"
    folder.mkdir(exist_ok=True)

    def keep(row, errors):
        replace(folder / f"{ROWS.index(row)}.json", json.dumps(errors))
        files = [folder / f"{number}.json" for number in range(len(ROWS))]
        if all(file.exists() for file in files):
            write_document({name: json.loads(file.read_text()) for name, file in zip(ROWS, files, strict=True)})

    return keep


def replace(path, text):
    """In one step, so that no other worker reads half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_document(measured):
    old = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    bounds = read_bounds(old)
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row, errors in measured.items():
        cells = [bound(errors[c], bounds.get((row, c))) if c in errors else "" for c in COLUMNS]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    text = HEADER + "\n" + "\n".join(lines) + "\n"
    if text != old:
        replace(DOCUMENT, text)


def read_bounds(text):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    if not rows:
        return {}
    return {(row[0], name): cell for row in rows[2:] for name, cell in zip(rows[0][1:], row[1:], strict=False)}


def bound(error, old):
    """`old` if it is still a fair bound, else the error rounded up to 1, 2 or 5 times a power of ten."""
    if old and error <= float(old) <= 10 * max(error, 1e-8):
        return old
    exponent = math.floor(math.log10(max(error, 1e-8)))
    digits = next(d for d in (1, 2, 5, 10) if error <= d * 10.0**exponent)
    return f"{digits * 10.0**exponent:.0e}".replace("e-0", "e-")


def test_bounds_round_up_and_stay():
    assert [bound(e, None) for e in (0.0, 1e-6, 1.01e-6, 2.3e-6, 6e-7)] == ["1e-8", "1e-6", "2e-6", "5e-6", "1e-6"]
    assert bound(9e-7, "5e-6") == "5e-6" and bound(4e-7, "5e-6") == "5e-7" and bound(6e-6, "5e-6") == "1e-5"
    assert bound(0.0, "1e-8") == "1e-8"
