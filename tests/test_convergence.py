"""The same small language model trained in PyTorch (around Hugging Face's DeepseekV3Attention) and in JAX (around mla).

Same initial weights, same batches, same AdamW, float32: the loss stays the same at every step.
"""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity_document as document

from jax_mla import MLAConfig, convert, mla

STEPS, BATCH, T = 200, 4, 64
TOLERANCE = 1e-3  # of the loss, in nats a byte
VOCABULARY, LAYERS, MLP = 256, 2, 128
# Every dim is a multiple of 32, as MXFP8 blocks want.
SETTINGS = dict(
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    attention_bias=True,
    max_position_embeddings=640,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=1000.0,
        factor=10,
        original_max_position_embeddings=64,
        beta_fast=8,
        mscale=0.707,
        mscale_all_dim=1.1,
    ),
)
NORM_EPS, LATENT_EPS = 3e-5, 2e-5  # Hugging Face's latent norms take theirs from no config
CONFIG = dataclasses.replace(MLAConfig.from_hf(SETTINGS), norm_eps=LATENT_EPS)
# eps is far above the rounding errors of gradients near zero, which AdamW would else turn into whole steps; at twice
# this learning rate training is chaotic, and rounding grows until it shows.
ADAMW = dict(b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.05)
LEARNING_RATE = 2.5e-3
TITLE = f"Training, {STEPS} steps"


# --- What both train on -------------------------------------------------------------------------------------------


def batches(steps=STEPS):
    """Bytes [steps, BATCH, T + 1]: windows of the licence's text, which no edit and no Python version changes."""
    text = np.frombuffer((Path(__file__).parents[1] / "LICENSE").read_bytes(), np.uint8)
    starts = np.random.default_rng(5).integers(0, len(text) - T, (steps, BATCH, 1))
    return text[starts + np.arange(T + 1)].astype(np.int32)


def learning_rates():
    """[STEPS]: ten steps of warm-up, then a cosine down to a tenth."""
    step = np.arange(STEPS)
    return LEARNING_RATE * np.minimum((step + 1) / 10, 0.55 + 0.45 * np.cos(math.pi * step / STEPS))


def shapes():
    """Every parameter of the PyTorch model."""
    c = CONFIG
    found = {"embed.weight": (VOCABULARY, c.hidden_size), "head.weight": (VOCABULARY, c.hidden_size)}
    found["norm.weight"] = (c.hidden_size,)
    attention = {
        "q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
        "q_a_proj.bias": (c.q_lora_rank,),
        "q_a_layernorm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (c.num_heads * c.qk_head_dim, c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        "kv_a_proj_with_mqa.bias": (c.kv_lora_rank + c.qk_rope_head_dim,),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj.weight": (c.hidden_size, c.num_heads * c.v_head_dim),
        "o_proj.bias": (c.hidden_size,),
    }
    for layer in range(LAYERS):
        found |= {f"layers.{layer}.attention.{name}": shape for name, shape in attention.items()}
        found[f"layers.{layer}.up.weight"] = (MLP, c.hidden_size)
        found[f"layers.{layer}.down.weight"] = (c.hidden_size, MLP)
        found |= {f"layers.{layer}.{name}_norm.weight": (c.hidden_size,) for name in ("attention", "mlp")}
    return found


def initial():
    """By PyTorch's names: norms away from 1, biases away from 0, logits near 0."""
    rng = np.random.default_rng(3)
    state = {}
    for name, shape in shapes().items():
        if "norm" in name:
            value = rng.uniform(0.8, 1.2, shape)
        else:
            small = name == "head.weight" or name.endswith("bias")
            value = rng.normal(size=shape) * (0.02 if small else shape[-1] ** -0.5)
        state[name] = value.astype(np.float32)
    return state


# --- JAX ----------------------------------------------------------------------------------------------------------


def rms_norm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + NORM_EPS) * weight).astype(x.dtype)


def loss_of(params, tokens, attend, dtype):
    """Mean cross entropy of the next byte; the residual stream is in dtype, logits and loss in float32."""

    def linear(x, name):
        return x @ params[name].astype(x.dtype).T

    x = params["embed.weight"][tokens[:, :-1]].astype(dtype)
    for i in range(LAYERS):
        layer = f"layers.{i}"
        x = x + attend(params[f"{layer}.attention"], rms_norm(x, params[f"{layer}.attention_norm.weight"]))
        hidden = linear(rms_norm(x, params[f"{layer}.mlp_norm.weight"]), f"{layer}.up.weight")
        x = x + linear(jax.nn.silu(hidden), f"{layer}.down.weight")
    logits = linear(rms_norm(x, params["norm.weight"]), "head.weight").astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))


def jax_params():
    """The initial weights, each layer's attention under `mla`'s names."""
    params = initial()
    for layer in range(LAYERS):
        prefix = f"layers.{layer}.attention."
        own = {name: params.pop(name) for name in list(params) if name.startswith(prefix)}
        own = convert.from_hf({name.removeprefix(prefix): value for name, value in own.items()}, CONFIG)
        params[prefix.removesuffix(".")] = own
    return params


@functools.cache
def train_jax(recipe=None, dtype=jnp.float32, config=CONFIG, steps=STEPS):
    """The loss before each step [steps]. Parameters and AdamW are float32, what they multiply is `dtype`."""
    import optax

    options = {} if recipe is None else {"recipe": recipe}
    rates = jnp.asarray(learning_rates())
    optimiser = optax.adamw(lambda count: rates[count], **ADAMW)

    @jax.jit
    def train(params, tokens):
        def step(carry, tokens):
            params, state = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, tokens, attend, dtype)
            updates, state = optimiser.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

        def attend(params, x):
            return mla(params, x, config, **options)

        return jax.lax.scan(step, (params, optimiser.init(params)), tokens)[1]

    with jax.default_matmul_precision("highest"):
        return np.asarray(train(jax.tree.map(jnp.asarray, jax_params()), jnp.asarray(batches(steps))))


# --- PyTorch ------------------------------------------------------------------------------------------------------


def torch_model():
    import torch
    from torch import nn
    from torch.nn import functional as F
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    theirs = DeepseekV3Config(**SETTINGS, attn_implementation="eager")
    assert dataclasses.replace(MLAConfig.from_hf(theirs.to_dict()), norm_eps=LATENT_EPS) == CONFIG

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = DeepseekV3Attention(theirs, layer_idx=0)
            self.attention.q_a_layernorm.variance_epsilon = LATENT_EPS
            self.attention.kv_a_layernorm.variance_epsilon = LATENT_EPS
            self.attention_norm = nn.RMSNorm(theirs.hidden_size, eps=NORM_EPS)
            self.mlp_norm = nn.RMSNorm(theirs.hidden_size, eps=NORM_EPS)
            self.up = nn.Linear(theirs.hidden_size, MLP, bias=False)
            self.down = nn.Linear(MLP, theirs.hidden_size, bias=False)

        def forward(self, x, tables, mask):
            given = dict(position_embeddings=tables, attention_mask=mask)
            x = x + self.attention(hidden_states=self.attention_norm(x), **given)[0]
            return x + self.down(F.silu(self.up(self.mlp_norm(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, theirs.hidden_size)
            self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
            self.norm = nn.RMSNorm(theirs.hidden_size, eps=NORM_EPS)
            self.head = nn.Linear(theirs.hidden_size, VOCABULARY, bias=False)
            self.rotary = DeepseekV3RotaryEmbedding(theirs)

        def forward(self, tokens):
            x = self.embed(tokens)
            tables = self.rotary(x, torch.arange(T)[None])
            mask = torch.full((T, T), -math.inf).triu(1)[None, None]
            for layer in self.layers:
                x = layer(x, tables, mask)
            return self.head(self.norm(x))

    model = Model()
    model.load_state_dict({name: torch.tensor(value) for name, value in initial().items()}, strict=True)
    return model


def train_torch():
    import torch
    from torch.nn import functional as F

    torch.set_float32_matmul_precision("highest")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for such small arrays more only wait for each other, on a busy machine for minutes
    model = torch_model()
    betas = (ADAMW["b1"], ADAMW["b2"])
    rest = dict(eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=betas, **rest)
    losses = []
    for rate, tokens in zip(learning_rates(), torch.tensor(batches()).long(), strict=True):
        optimiser.param_groups[0]["lr"] = float(rate)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    torch.set_num_threads(threads)
    return np.asarray(losses)


# --- The comparison -----------------------------------------------------------------------------------------------


def cell(value, old=None):
    """A gap has a bound; a loss is to the hundredth, and stays while it is that."""
    if value < TOLERANCE:
        return document.bound(value, old)
    return old if old and abs(value - float(old)) <= 0.01 else f"{value:.2f}"


COLUMNS = [*(f"step {step}" for step in (0, 10, 50, 100, 150)), f"step {STEPS - 1}"]
ROWS = ["PyTorch", "jax_mla", "largest difference up to here"]
OTHER_ROWS = ["jax_mla, bfloat16", 'jax_mla, bfloat16, `recipe="mxfp8"`']
TEXT = f"""
A decoder of {LAYERS} layers (RMSNorm, attention, RMSNorm, MLP; hidden size {CONFIG.hidden_size}, YaRN, biases), once in
PyTorch around `DeepseekV3Attention` and once in JAX around `mla`: same weights, batches ({BATCH} x {T} bytes of text)
and AdamW, float32. The loss in nats a byte before each step. Fails where they differ by more than
{document.bound(TOLERANCE)} at any of the {STEPS} steps. Below: other dtypes from the same weights; over the last 20
steps bfloat16 is within 2 % of float32, and `recipe="mxfp8"` within 2 % of bfloat16.
"""
SECTIONS = [document.Section(TITLE, TEXT, ROWS + OTHER_ROWS, COLUMNS, cell)]


def final(losses):
    """The mean of the last 20: one batch is easier than another."""
    return losses[-20:].mean()


@pytest.mark.golden
def test_losses_are_pytorchs_at_every_step(tmp_path_factory):
    golden, ours = train_torch(), train_jax()
    assert golden.shape == ours.shape == (STEPS,)
    assert abs(golden[0] - math.log(VOCABULARY)) < 0.1 and final(golden) < 2.5, "nothing was learnt"
    gaps = np.abs(ours - golden)
    assert gaps.max() <= TOLERANCE, (gaps.argmax(), gaps.max())
    for row, curve in zip(ROWS, (golden, ours, np.maximum.accumulate(gaps)), strict=True):
        values = {column: float(curve[int(column.split()[1])]) for column in COLUMNS}
        document.report(tmp_path_factory, TITLE, row, values)


def test_a_wrong_setting_shows():
    """What the tolerance is for; half of the steps are enough."""
    steps = STEPS // 2
    scaling = dataclasses.replace(CONFIG.rope.scaling, mscale=1.0)
    for change in (dict(theta=1100.0), dict(scaling=scaling)):
        wrong = train_jax(
            config=dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, **change)), steps=steps
        )
        assert np.abs(wrong - train_jax()[:steps]).max() > 2 * TOLERANCE, change


@pytest.mark.golden  # for docs/parity.md, which the golden tests write together
def test_bfloat16_and_mxfp8_learn_as_much(tmp_path_factory):
    """Other numbers, the same way: MXFP8 ends within 2 % of bfloat16's loss, and that of float32's."""
    exact, rounded = train_jax(), train_jax(dtype=jnp.bfloat16)
    quantised = train_jax(recipe="mxfp8", dtype=jnp.bfloat16)
    assert final(rounded) == pytest.approx(final(exact), rel=0.02) and final(rounded) != final(exact)
    assert final(quantised) == pytest.approx(final(rounded), rel=0.02) and final(quantised) != final(rounded)
    for row, curve in zip(OTHER_ROWS, (rounded, quantised), strict=True):
        values = {column: float(curve[int(column.split()[1])]) for column in COLUMNS}
        document.report(tmp_path_factory, TITLE, row, values)
