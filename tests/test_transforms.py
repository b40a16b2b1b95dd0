"""Every public op under every transformation a training run puts round it, in one table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge import assert_close, assert_same, draw

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    attention,
    dequantize,
    init,
    kv_up_proj_rope,
    mla,
    q_up_proj_rope,
    quantize_mxfp8,
    rms_norm,
    rms_norm_quantize,
    rope_tables,
)

CONFIG = MLAConfig(16, 2, 12, 12, 6, 8, 10, norm_eps=1e-3, attention_bias=True)
B, T, H, N, PE, V, R = 2, 6, 2, 6, 8, 10, 12
IDS = jnp.asarray([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3]])
COS, SIN = rope_tables(jnp.arange(5, 5 + T), CONFIG.rope, PE)
NAMES = sorted(init(jax.random.key(0), CONFIG))
LAYER = [init(jax.random.key(0), CONFIG)[n].shape for n in NAMES]

# MXFP8: 32 tokens, one head, every blocked dim 32 or 64.
SMALL = MLAConfig(32, 1, 32, 32, 32, 32, 32, norm_eps=1e-3)
COS_32, SIN_32 = rope_tables(jnp.arange(5, 37), SMALL.rope, 32)
SMALL_NAMES = sorted(init(jax.random.key(0), SMALL))
SMALL_LAYER = [init(jax.random.key(0), SMALL)[n].shape for n in SMALL_NAMES]
UP = dict(nope_dim=32, recipe="mxfp8", out="mxfp8")


def tensor(x, token_axis=-3):
    return quantize_mxfp8(x, usage="both", token_axis=token_axis)


def both(t):
    """The values of both copies, each differentiable."""
    return dequantize(t.only("rowwise")), dequantize(t.only("columnwise"))


# op: (function, argument shapes). The first argument is batched where a transformation batches one alone.
OPS = {
    "apply_rope": (lambda x: apply_rope(x, COS, SIN, rotary_dim=PE), [(B, T, H, 14)]),
    "apply_rope, inverse": (lambda x: apply_rope(x, COS, SIN, rotary_dim=PE, inverse=True), [(B, T, H, 14)]),
    "apply_rope, tables": (lambda x, c, s: apply_rope(x, c, s, rotary_dim=PE), [(B, T, H, 14), (T, 4), (T, 4)]),
    "apply_rope_kv": (lambda kv, p: apply_rope_kv(kv, p, COS, SIN, nope_dim=N), [(B, T, H, N + V), (B, T, PE)]),
    "rms_norm": (lambda x, s: rms_norm(x, s, 1e-3), [(B, T, R), (R,)]),
    "q_up_proj_rope": (
        lambda x, w, s: q_up_proj_rope(x, w, COS, SIN, nope_dim=N, norm_scale=s),
        [(B, T, R), (R, H, N + PE), (R,)],
    ),
    "kv_up_proj_rope": (
        lambda x, w, p, s: kv_up_proj_rope(x, w, p, COS, SIN, nope_dim=N, norm_scale=s),
        [(B, T, R), (R, H, N + V), (B, T, PE), (R,)],
    ),
    "attention": (
        lambda q, k, v: attention(q, k, v, return_lse=True),
        [(B, T, H, 14), (B, T, H, 14), (B, T, H, V)],
    ),
    "attention, packed": (
        lambda q, k, v: attention(q, k, v, segment_ids=IDS),
        [(B, T, H, 14), (B, T, H, 14), (B, T, H, V)],
    ),
    "mla": (lambda x, *p: mla(dict(zip(NAMES, p, strict=True)), x, CONFIG), [(B, T, 16), *LAYER]),
    "mla, latents": (
        lambda x, *p: mla(dict(zip(NAMES, p, strict=True)), x, CONFIG, remat="latents", segment_ids=IDS),
        [(B, T, 16), *LAYER],
    ),
    "quantize_mxfp8, dequantize": (lambda x: both(tensor(x, -2)), [(1, 32, 64)]),
    "rms_norm_quantize": (lambda x, s: both(rms_norm_quantize(x, s, 1e-3, usage="both")), [(1, 32, 64), (64,)]),
    "q_up_proj_rope, mxfp8": (
        lambda x, w, s: both(q_up_proj_rope(x, w, COS_32, SIN_32, norm_scale=s, **UP)),
        [(1, 32, 32), (32, 1, 64), (32,)],
    ),
    "kv_up_proj_rope, mxfp8": (
        lambda x, w, p: [both(t) for t in kv_up_proj_rope(x, tensor(w), p, COS_32, SIN_32, **UP)],
        [(1, 32, 32), (32, 1, 64), (1, 32, 32)],
    ),
    "attention, mxfp8": (lambda q, k, v: attention(tensor(q), tensor(k), tensor(v)), [(1, 32, 1, 32)] * 3),
    "mla, mxfp8": (
        lambda x, *p: mla({n: 0.2 * a for n, a in zip(SMALL_NAMES, p, strict=True)}, x, SMALL, recipe="mxfp8"),
        [(1, 32, 32), *SMALL_LAYER],
    ),
}
MXFP8 = {name for name in OPS if "mxfp8" in name or "quantize" in name}


# What rematerialisation has to do with, a test says by the table itself.
@pytest.fixture(params=[name for name in OPS if name != "mla, latents"])
def op(request):
    return OPS[request.param]


def arrays(shapes, seed=0, lead=()):
    rng = np.random.default_rng(seed)
    return tuple(draw(rng, *lead, *s) for s in shapes)


def gradients(function, args, seed=1):
    """Outputs and gradients for a random cotangent; to be jitted by the caller."""
    rng = np.random.default_rng(seed)
    outputs, pullback = jax.vjp(function, *args)
    return outputs, pullback(jax.tree.map(lambda o: draw(rng, *o.shape, dtype=o.dtype), outputs))


@functools.cache
def program(function):
    """Compiled once for all tests of an op in one dtype."""
    return jax.jit(lambda *a: gradients(function, a))


def run(function, args):
    return program(function)(*args)


@pytest.mark.parametrize("name", [name for name in OPS if not name.startswith("mla") and name not in MXFP8])
def test_jit_is_eager(name):
    function, shapes = OPS[name]
    args = arrays(shapes)
    assert_close(run(function, args), gradients(function, args), 1e-5)


def test_vmap_is_a_loop(op):
    """Case 44 of public reports: all arguments batched, and the first alone."""
    function, shapes = op
    args = arrays(shapes, lead=(3,))

    def loss(*a):
        return sum(jnp.sum(jnp.where(jnp.isfinite(o), jnp.sin(o), 0.0)) for o in jax.tree.leaves(function(*a)))

    step = jax.value_and_grad(loss, argnums=tuple(range(len(shapes))))
    single = jax.jit(step)
    for axes in ((0,) * len(args), (0,) + (None,) * (len(args) - 1)):
        given = tuple(a if axis == 0 else a[0] for a, axis in zip(args, axes, strict=True))
        found = jax.jit(jax.vmap(step, in_axes=axes))(*given)
        for i in range(3):
            wanted = single(*(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)))
            assert_close(jax.tree.map(lambda f, i=i: f[i], found), wanted, 3e-5)


_every = jax.checkpoint_policies.everything_saveable


@pytest.mark.parametrize("name", OPS)
def test_scan_and_remat_change_nothing(name):
    """Cases 38 and F8: inside scan a cotangent of another dtype than its primal's fails; remat gives the same bits."""
    function, shapes = OPS[name]
    args = arrays(shapes)

    def once(scale, *rest):
        outputs = function(args[0] + scale * jnp.sin(3 * args[0]), *rest)
        return sum(jnp.sum(jnp.where(jnp.isfinite(o), jnp.cos(o), 0.0)) for o in jax.tree.leaves(outputs))

    def looped(body):
        def loss(scales, *rest):
            return jax.lax.scan(lambda total, s: (total + body(s, *rest), None), 0.0, scales)[0]

        return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args)))))

    scales = jnp.asarray([1.0, 0.5, 2.0])
    plain = looped(once)(scales, *args[1:])
    if name not in MXFP8:  # in which a sum in another order moves codes
        unrolled = jax.jit(
            jax.value_and_grad(lambda s, *rest: sum(once(x, *rest) for x in s), argnums=tuple(range(len(args))))
        )(scales, *args[1:])
        assert_close(plain, unrolled, 1e-4)
    # What a policy saves passes `reduce_precision`, which codes of E4M3 do not survive: they must be saved as bytes.
    for policy in (None, jax.checkpoint_policies.dots_saveable) if name not in MXFP8 else (_every,):
        assert_close(looped(jax.checkpoint(once, policy=policy))(scales, *args[1:]), plain, 1e-5)


def test_bfloat16_in_bfloat16_out(op):
    function, shapes = op
    args = tuple(a.astype(jnp.bfloat16) for a in arrays(shapes))
    outputs, grads = run(function, args)
    assert all(g.dtype == jnp.bfloat16 for g in grads)
    first = jax.tree.leaves(outputs)[0]
    assert first.dtype == jnp.bfloat16
    wide, _ = run(function, tuple(a.astype(jnp.float32) for a in args))
    assert_close(outputs, wide, 5e-2)


@pytest.mark.parametrize("name", OPS)
def test_float64_is_not_downcast(name, x64):
    function, shapes = OPS[name]
    if name in MXFP8:
        with pytest.raises(TypeError, match="found dtype float64, wanted bfloat16, float16 or float32"):
            jax.eval_shape(function, *(jax.ShapeDtypeStruct(s, jnp.float64) for s in shapes))
        return
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.normal(size=s)) for s in shapes)
    outputs, grads = run(function, args)
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves((outputs, grads)))
    with jax.enable_x64(False):
        narrow = run(function, tuple(jnp.asarray(np.asarray(a), jnp.float32) for a in args))
    gap = max(
        np.abs(np.asarray(w) - np.asarray(n)).max()
        for w, n in zip(jax.tree.leaves(grads), jax.tree.leaves(narrow[1]), strict=True)
    )
    assert 0 < gap < 1e-3  # computed in float64, not in float32 and widened


def test_x64_mode_changes_no_bits(op):
    """Case 46 of public reports: same dtypes and bits, and no float64 in the jaxpr."""
    function, shapes = op
    args = arrays(shapes)
    plain = run(function, args)
    with jax.enable_x64(True):
        assert_same(run(function, args), plain)
        assert "f64" not in str(jax.make_jaxpr(lambda *a: gradients(function, a))(*args))


def test_donation(op):
    """Case 52 of public reports: a donated argument's buffer may be reused, and nothing else changes."""
    function, shapes = op
    step = lambda *a: (tuple(x * 2 for x in a), gradients(function, a))  # noqa: E731
    wanted = jax.jit(step)(*arrays(shapes))
    found = jax.jit(step, donate_argnums=tuple(range(len(shapes))))(*arrays(shapes))
    assert_same(found, wanted)


def test_export(op):
    function, shapes = op
    args = arrays(shapes)
    exported = jax.export.export(jax.jit(lambda *a: gradients(function, a)))(*args)
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(*args), run(function, args), 1e-6)


def test_eval_shape_agrees(op):
    function, shapes = op
    args = arrays(shapes)
    shapes = jax.eval_shape(function, *args)
    found, _ = run(function, args)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), shapes) == jax.tree.map(lambda a: (a.shape, a.dtype), found)


def test_equal_configs_compile_once():
    """Case 47 of public reports."""
    params, (x,) = init(jax.random.key(0), CONFIG), arrays([(B, T, 16)])
    jitted = jax.jit(lambda params, x, config: mla(params, x, config), static_argnums=2)  # mla's own cache has others
    for eps in (1e-3, np.float64(1e-3), 0.001):
        jitted(params, x, MLAConfig(16, 2, 12, 12, 6, 8, 10, norm_eps=eps, attention_bias=True))
    assert jitted._cache_size() == 1
    packed = jax.jit(lambda x, ids: mla(params, x, CONFIG, segment_ids=ids))
    for ids in (IDS, IDS[::-1], jnp.zeros_like(IDS), jnp.ones_like(IDS)):
        packed(x, ids)
    assert packed._cache_size() == 1


def test_int64_positions_and_ids(x64):
    params, (x,) = init(jax.random.key(0), CONFIG), arrays([(B, T, 16)])

    def layer(dtype):
        positions, ids = jnp.arange(T, dtype=dtype), IDS.astype(dtype)
        assert positions.dtype == ids.dtype == dtype
        return jax.jit(lambda params, x: mla(params, x, CONFIG, positions=positions, segment_ids=ids))(params, x)

    assert_same(layer(jnp.int64), layer(jnp.int32))


def test_gradient_through_gradient_free_settings():
    """jax.jvp is refused by JAX for custom_vjp functions, with its own clear error: nothing here pretends otherwise."""
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: rms_norm(x, jnp.ones(4), 1e-6), (x,), (x,))
