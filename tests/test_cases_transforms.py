"""Public reports of transformations that broke a layer like this one, beyond the tables of `test_transforms.py`: what
is written in place, cotangents' dtypes, remat policies, a donating training step, recompiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import test_transforms
from judge import assert_close, assert_same, draw

from jax_mla import (
    MLAConfig,
    MXFP8Tensor,
    apply_rope,
    apply_rope_kv,
    attention,
    dequantize,
    init,
    kv_up_proj_rope,
    mla,
    q_up_proj_rope,
    quantize_mxfp8,
    quantize_params,
    rms_norm_quantize,
    rope_tables,
    segment_ids_from_cu_seqlens,
    swizzle_scales,
)

CONFIG = MLAConfig(32, 3, 32, 32, 32, 32, 32, norm_eps=1e-3, attention_bias=True)
B, T, H, N, P, V, R = 2, 64, 3, 32, 32, 32, 32
IDS = jnp.repeat(jnp.asarray([[1, 2], [3, 3]]), 32, axis=1).at[0, 50:].set(0)
COS, SIN = rope_tables(jnp.arange(5, 5 + T), CONFIG.rope, P)
NAMES = sorted(init(jax.random.key(0), CONFIG))
LAYER = [init(jax.random.key(0), CONFIG)[n].shape for n in NAMES]
RECIPES = (None, "mxfp8")


def values(outputs):
    """Arrays, of tensors what they stand for."""
    tensor = lambda t: isinstance(t, MXFP8Tensor)  # noqa: E731
    return jax.tree.map(lambda t: dequantize(t) if tensor(t) else t, outputs, is_leaf=tensor)


def ops(recipe):
    """op: (function, argument shapes)."""
    up = dict(nope_dim=N, norm_eps=1e-3, recipe=recipe, out=recipe)
    return {
        "q_up_proj_rope": (
            lambda x, w, s, b, c, t: values(q_up_proj_rope(x, w, c, t, norm_scale=s, bias=b, **up)),
            [(B, T, R), (R, H, N + P), (R,), (H, N + P), COS.shape, SIN.shape],
        ),
        "kv_up_proj_rope": (
            lambda x, w, k_pe, s, c, t: values(kv_up_proj_rope(x, w, k_pe, c, t, norm_scale=s, **up)),
            [(B, T, R), (R, H, N + V), (B, T, P), (R,), COS.shape, SIN.shape],
        ),
        "mla": (
            lambda x, *p: mla(dict(zip(NAMES, p, strict=True)), x, CONFIG, segment_ids=IDS, recipe=recipe),
            [(B, T, 32), *LAYER],
        ),
    }


OPS = {recipe: ops(recipe) for recipe in RECIPES}


def arrays(shapes):
    rng = np.random.default_rng(0)
    return tuple(draw(rng, *s) for s in shapes)


def gradients(function, *args):
    """Outputs and gradients for a random cotangent."""
    rng = np.random.default_rng(1)
    outputs, pullback = jax.vjp(function, *args)
    return outputs, pullback(jax.tree.map(lambda o: draw(rng, *o.shape, dtype=o.dtype), outputs))


@functools.cache
def step(name, recipe="mxfp8"):
    """One compilation for every test here."""
    return jax.jit(functools.partial(gradients, OPS[recipe][name][0]))


UP = ["q_up_proj_rope", "kv_up_proj_rope"]  # with tables, norms and biases; `test_recipe.py` has the others' gradients


@pytest.mark.parametrize("name", UP)
def test_no_float_input_quietly_gets_no_gradient(name):
    """Cases F11 and 23 of public reports: parameters, biases, norms and tables, with MXFP8 in the direction without."""
    args = arrays(OPS[None][name][1])
    (_, plain), (_, found) = step(name, None)(*args), step(name)(*args)
    for number, (g, wanted) in enumerate(zip(found, plain, strict=True)):
        g, wanted = reference.f64(g).ravel(), reference.f64(wanted).ravel()
        assert np.isfinite(g).all() and np.linalg.norm(g) > 0, number
        assert g @ wanted > 0.95 * np.linalg.norm(g) * np.linalg.norm(wanted), number


@pytest.mark.parametrize("name", UP)
def test_an_op_that_writes_in_place_corrupts_what_is_used_again(name):
    """Case 3 of public reports: an op's arguments are as before, after both passes."""
    args = arrays(OPS["mxfp8"][name][1])
    before = [np.array(a) for a in args]
    step(name)(*args)
    assert_same(args, before)


@pytest.mark.parametrize("remat", [False, True])
def test_rotation_in_place_corrupts_what_autodiff_saved(remat):
    """Case 3 of public reports: q shares memory with what dW or a recomputation reads; inside scan too."""
    x, w, c, d = arrays([(B, T, H, 64), (64, 64), (B, T, H, 64), (B, T, H, 64)])
    kv, k_pe = arrays([(B, T, H, N + V), (B, T, P)])

    def body(rotate, total, scale):
        q = (x * scale) @ w  # kept for dW of what follows, and rotated
        k, _ = rotate[1](kv * scale, k_pe)
        return total + jnp.sum(rotate[0](q) * c) + jnp.sum(q * q * d) + jnp.sum(k * jnp.sin(c)), q

    def loss(rotate, w, scales):
        turn = functools.partial(body, rotate)
        total, kept = jax.lax.scan(jax.checkpoint(turn) if remat else turn, 0.0, scales)
        return total + jnp.sum(kept * kept)

    def plain_rope(x):
        x1, x2 = x[..., N::2], x[..., N + 1 :: 2]
        cos, sin = COS[:, None], SIN[:, None]
        return jnp.concatenate([x[..., :N], x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    def plain_kv(kv, k_pe):
        shared = plain_rope(jnp.concatenate([jnp.zeros_like(k_pe), k_pe], -1)[:, :, None])[..., N:]
        return jnp.concatenate([kv[..., :N], jnp.repeat(shared, H, 2)], -1), kv[..., N:]

    ours = lambda x: apply_rope(x, COS, SIN, rotary_dim=P), lambda *a: apply_rope_kv(*a, COS, SIN, nope_dim=N)  # noqa: E731
    scales = jnp.asarray([1.0, 0.5])
    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2)), static_argnums=0)
    assert_close(run(ours, w, scales), run((plain_rope, plain_kv), w, scales), 2e-6)


NARROW = {"kv_up_proj_rope": (0, 2), "attention": (0, 1, 2), "apply_rope_kv": (0, 1)}  # activations share a dtype


SOME = [name for name in test_transforms.OPS if not name.endswith(("packed", "inverse", "latents"))]


@pytest.mark.parametrize("name,wide_parameters", [(n, w) for n in SOME for w in (True, False)])
def test_a_float32_cotangent_of_a_bfloat16_primal(name, wide_parameters):
    """Case F8 of public reports: grad alone hides it, inside scan it is an error, when it is traced."""
    function, shapes = test_transforms.OPS[name]
    narrow = NARROW.get(name.split(",")[0], (0,)) if wide_parameters else range(len(shapes))
    if wide_parameters and len(narrow) == len(shapes):
        narrow = ()  # no parameters: all float32, as a control
    args = [a.astype(jnp.bfloat16) if i in narrow else a for i, a in enumerate(arrays(shapes))]

    def loss(*args):
        def body(total, scale):
            first = args[0] * scale.astype(args[0].dtype)
            outputs = jax.tree.leaves(function(first, *args[1:]))
            return total + sum(jnp.sum(jnp.sin(o.astype(jnp.float32))) for o in outputs), None

        return jax.lax.scan(body, 0.0, jnp.ones(2))[0]

    found = jax.eval_shape(jax.grad(loss, argnums=tuple(range(len(args)))), *args)
    assert [g.dtype for g in found] == [a.dtype for a in args]


def test_x64_mode_widens_what_has_no_gradient(x64):
    """Case 46 of public reports: scale tilings, ids of boundaries, quantised parameters."""
    params = {n: jnp.asarray(np.ones(s), jnp.float32) for n, s in zip(NAMES, LAYER, strict=True)}
    scales = jnp.ones((40, 5), jnp.uint8)
    calls = (
        (lambda s: swizzle_scales(s), scales),
        (lambda b: segment_ids_from_cu_seqlens(b, 9), jnp.asarray([0, 3, 9])),
        (lambda p: quantize_params(p, CONFIG), params),
    )
    for call, argument in calls:
        assert "f64" not in str(jax.make_jaxpr(call)(argument))
    assert swizzle_scales(scales).dtype == jnp.uint8 and calls[1][1].dtype == jnp.int64
    assert segment_ids_from_cu_seqlens(calls[1][1], 9).dtype == jnp.int32


def block(recipe, x, w, s):
    """A residual block: a norm, a product, a rotation."""
    q = q_up_proj_rope(x, w, COS[:, :8], SIN[:, :8], nope_dim=16, norm_scale=s, norm_eps=1e-3, recipe=recipe)
    return jnp.tanh(x + jax.ad_checkpoint.checkpoint_name(q[:, :, 0], "query_proj"))


POLICIES = jax.checkpoint_policies
SAVED = {
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_saveable,
    "names": POLICIES.save_only_these_names("mla_q", "query_proj", "no_such_name"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_policy_changes_gradients(recipe):
    """Case 38 of public reports: bit for bit, inside scan, whatever is saved; names nobody knows do no harm."""
    args = arrays([(2, R, 1, R), (2, R), (B, T, R)])

    def loss(policy, *args):
        body = functools.partial(block, recipe)
        body = body if policy is None else jax.checkpoint(body, policy=SAVED[policy])
        return jnp.sum(jnp.sin(jax.lax.scan(lambda x, p: (body(x, *p), None), args[-1], args[:-1])[0]))

    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    plain = run(None, *args)
    assert all(np.any(g) for g in plain[1])
    for policy in SAVED if recipe is None else ("dots", "names"):
        assert_same(run(policy, *args), plain)


@pytest.mark.parametrize("recipe", RECIPES)
def test_named_residuals_are_hidden_from_policies(recipe, capsys):
    """Case 38 of public reports: what a policy names shows up among the residuals, as codes with MXFP8."""
    args = arrays(OPS[recipe]["mla"][1])
    names = ("query_wa_proj", "kv_wa_proj", "query_proj", "key_proj", "value_proj", "attention_out", "attention_lse")
    names += ("mla_q", "mla_kv") * (recipe is not None)  # without it the norm is recomputed, not kept
    policy = POLICIES.save_only_these_names(*names)
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(OPS[recipe]["mla"][0], policy=policy), *args)
    lines = capsys.readouterr().out.splitlines()
    for name in names:
        kept = [line for line in lines if f"named '{name}'" in line]
        assert kept, name
        coded = recipe is not None and name in ("query_proj", "key_proj", "value_proj", "mla_q", "mla_kv")
        assert all(line.startswith("u8[" if coded else "f32[") for line in kept), kept


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_cu_seqlens_compiles_anew(recipe):
    """Case 47 of public reports: five boundaries of one shape, some with empty sequences, compile once."""
    q, k, v = arrays([(T, H, 64), (T, H, 64), (T, H, V)])
    to_heads = lambda a: a if recipe is None else quantize_mxfp8(a, usage="both", token_axis=-3)  # noqa: E731
    run = jax.jit(jax.grad(lambda q, b: jnp.sum(jnp.sin(attention(*map(to_heads, (q, k, v)), cu_seqlens=b)))))
    found = [run(q, np.asarray(b)) for b in ([0, 32, 64], [0, 0, 64], [0, 64, 64], [0, 32, 50], [0, 7, 7])]
    assert run._cache_size() == 1
    assert len({np.asarray(g).tobytes() for g in found}) == 4  # [0, 0, 64] and [0, 64, 64] are one sequence


@pytest.mark.parametrize(
    "call",
    [
        lambda nope_dim: q_up_proj_rope(*X_W, COS, SIN, nope_dim=nope_dim, recipe="mxfp8"),
        lambda norm_eps: q_up_proj_rope(*X_W, COS, SIN, nope_dim=N, norm_eps=norm_eps),
        lambda eps: rms_norm_quantize(X_W[0], jnp.ones(R), eps),
        lambda rotary_dim: apply_rope(jnp.ones((T, H, 64)), COS, SIN, rotary_dim=rotary_dim),
        lambda length: segment_ids_from_cu_seqlens(jnp.zeros(3, jnp.int32), length),
    ],
    ids=lambda call: call.__code__.co_varnames[0],
)
def test_a_traced_value_where_a_constant_belongs(call):
    """Case 47 of public reports: TypeError by name, not a compilation for every value."""
    with pytest.raises(TypeError, match=f"{call.__code__.co_varnames[0]}: found a traced value"):
        jax.jit(call)(32)


X_W = jnp.ones((B, T, R)), jnp.ones((R, H, N + P))


def test_donated_parameters_are_read_after_their_buffer_is_reused():
    """Case 52 of public reports: a training step that donates parameters and momenta, results in both orders.
    (Donating to an op, with MXFP8 too: `test_transforms.py`.)"""
    shapes = dict(w=(R, 1, R), s=(R,))
    (x,) = arrays([(B, T, R)])
    make = lambda: tuple({n: a * scale for n, a in zip(shapes, arrays(shapes.values()))} for scale in (1, 3))  # noqa: E731, B905

    def train(state, order):
        params, momenta = state
        loss = lambda p: jnp.sum(jnp.sin(block(None, x, p["w"], p["s"])))  # noqa: E731
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss)(params))
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta)
        return (params, momenta) if order == "given" else (momenta, params)

    wanted = jax.jit(train, static_argnums=1)(make(), "given")
    for order in ("given", "swapped"):
        found = jax.jit(train, static_argnums=1, donate_argnums=0)(make(), order)
        assert_same(found if order == "given" else found[::-1], wanted)
