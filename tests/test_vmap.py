"""vmap of what launches kernels: one launch with one more leading dim, whose values are those of a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, assert_same, draw

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    dequantize,
    launches,
    quantize_mxfp8,
    rms_norm,
    rms_norm_quantize,
    rope_tables,
    swizzle_scales,
)


@jax.custom_batching.sequential_vmap
def _launch(x, table, weight):
    """As a launch: it knows no vmap, which would make it a loop."""
    return x * table + weight, x * table


@launches.batched("data", "table", "weight")
def scaled(offset, x, table, weight):
    """x [..., T, K], table [..., T or 1, 1], weight [K] -> like x; the sum of an entry of the batch, [K]."""
    assert table.ndim == x.ndim and all(n in (1, m) for n, m in zip(table.shape, x.shape, strict=True))
    batch = x.shape[: weight.ndim - 1]
    assert weight.shape[:-1] == (1,) * len(batch)
    y, z = _launch(x, jnp.broadcast_to(table, x.shape), weight.reshape(-1))
    return y + offset, jnp.sum(z.reshape(*batch, -1, x.shape[-1]), axis=-2)


def arguments(*lead):
    rng = np.random.default_rng(0)
    return draw(rng, *lead, 2, 3, 4), draw(rng, *lead, 1, 3, 1), draw(rng, *lead, 4)


def call(*args):
    return scaled(0.5, *args)


def loop(function, axes, *args):
    """`jax.vmap(function, axes)(*args)`, one entry after another."""
    size = next(a.shape[0] for a, axis in zip(args, axes, strict=True) if axis == 0)
    entries = [function(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))) for i in range(size)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries)


X, TABLE, BOTH, WEIGHT = (0, None, None), (None, 0, None), (0, 0, None), (None, None, 0)
ALL = (0, 0, 0)
TWO = [(BOTH, BOTH), (X, TABLE), (TABLE, X), (TABLE, TABLE), (X, WEIGHT), (WEIGHT, BOTH), (ALL, WEIGHT)]


@pytest.mark.parametrize("axes", [*((axes,) for axes in (BOTH, X, TABLE, WEIGHT)), *TWO])
def test_batched_is_a_loop(axes):
    """Every argument batched or not, once or twice; a loop is left only where a weight is batched."""
    args, function, wanted = arguments(), call, call
    for level, size in zip(axes, (2, 3), strict=False):
        args = [
            a if axis is None else jnp.stack([a * i for i in range(size)]) for a, axis in zip(args, level, strict=True)
        ]
        function, wanted = jax.vmap(function, level), functools.partial(loop, wanted, level)
    run = function if len(axes) == 1 else jax.jit(function)
    assert_close(run(*args), wanted(*args))
    assert ("scan[" in str(jax.make_jaxpr(function)(*args))) == any(level[2] == 0 for level in axes)


def test_batched_inside_programs_scans_and_remat():
    """Under a derivative of its own, as in every op: vmap of grad, grad of vmap, in jit, scan and remat."""

    @jax.custom_vjp
    def op(x, table, weight):
        return call(x, table, weight)[0]

    def backward(saved, dy):
        x, table = saved
        dx, _ = scaled(0.0, dy, table, jnp.zeros(4))
        _, dweight = scaled(0.0, dy, jnp.ones_like(table), jnp.zeros(4))
        return dx, jnp.sum(dy * x, (0, 2), keepdims=True), dweight

    op.defvjp(lambda *args: (op(*args), args[:2]), backward)

    def loss(x, table, weight):
        body = jax.checkpoint(lambda carry, _: (jnp.sin(op(carry, table, weight)), None))
        return jnp.sum(jax.lax.scan(body, x, length=2)[0])

    def plain(x, table, weight):
        for _ in range(2):
            x = jnp.sin(x * table + weight + 0.5)
        return jnp.sum(x)

    args, axes = arguments(5), BOTH
    args = (*args[:2], args[2][0])
    step = jax.grad(loss, argnums=(0, 1, 2))
    wanted = loop(jax.jit(jax.grad(plain, argnums=(0, 1, 2))), axes, *args)
    assert_close(jax.jit(jax.vmap(step, axes))(*args), wanted, 1e-5)
    of_sum = jax.grad(lambda *a: jnp.sum(jax.vmap(jax.checkpoint(loss), axes)(*a)), argnums=(0, 1, 2))
    assert_close(jax.jit(of_sum)(*args), (*wanted[:2], jnp.sum(wanted[2], 0)), 1e-5)


def test_a_batch_spread_over_devices_stays_so():
    """Nothing is gathered: each device launches on its own part of the batch, whichever arguments have it."""
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    spread = lambda x: jax.device_put(x, NamedSharding(mesh, P("b")))  # noqa: E731
    for axes in (BOTH, X, TABLE):
        args = [a if axis == 0 else a[0] for a, axis in zip(arguments(8), axes, strict=True)]
        run = jax.jit(jax.vmap(call, axes))
        placed = [spread(a) if axis == 0 else a for a, axis in zip(args, axes, strict=True)]
        found = run(*placed)
        assert_close(found, loop(call, axes, *args))
        assert found[0].sharding.spec[0] == "b" and "all-gather" not in run.lower(*placed).compile().as_text()


@pytest.mark.parametrize("cos,sin", [((5, 1, 3), (5, 1, 3)), ((1, 2, 3), (5, 1, 1)), ((1, 1, 1), (1, 2, 1)),
                                     ((5, 2, 1), (5, 1, 1)), ((1, 1, 3), (1, 2, 3))])  # fmt: skip
def test_every_token_reads_its_row_of_the_tables(cos, sin):
    leading = (5, 2, 3)
    rng = np.random.default_rng(0)
    given = draw(rng, *cos, 4), draw(rng, *sin, 4)
    *flat, (n1, s0, s1) = launches.tables(*given, leading)
    tokens = np.arange(30)
    for table, wanted in zip(flat, given, strict=True):
        found = table[tokens // n1 * s0 + tokens % n1 * s1]
        assert_same(found, jnp.broadcast_to(wanted, (*leading, 4)).reshape(-1, 4))


# op: (function of the implementation and arrays, shapes of an example, axes of two vmaps)
COS, SIN = rope_tables(jnp.arange(4), MLAConfig.tiny().rope, 4)


def both(name, t):
    return [dequantize(t.only(usage), implementation=name) for usage in ("rowwise", "columnwise")]


OPS = {
    "apply_rope": (
        lambda name, x, c, s: apply_rope(x, c, s, rotary_dim=4, implementation=name),
        [(2, 4, 3, 6), (4, 2), (4, 2)],
        [(0, None, None), (None, 0, 0)],
    ),
    "apply_rope_kv": (
        lambda name, kv, k_pe, c, s: apply_rope_kv(kv, k_pe, c, s, nope_dim=2, implementation=name),
        [(1, 4, 3, 5), (1, 4, 4), (4, 2), (4, 2)],
        [(0, 0, None, None), (None, 0, 0, 0)],
    ),
    "rms_norm": (
        lambda name, x, s: rms_norm(x, s, 1e-2, implementation=name),
        [(2, 3, 8), (8,)],
        [(0, None), (0, None)],
    ),
    "rms_norm, weights": (
        lambda name, x, s: rms_norm(x, s, 1e-2, implementation=name),
        [(2, 3, 8), (8,)],
        [(None, 0), (0, None)],
    ),
    "quantize_mxfp8, dequantize": (
        lambda name, x: both(name, quantize_mxfp8(x, usage="both", token_axis=-3, implementation=name)),
        [(32, 1, 32)],
        [(0,), (0,)],
    ),
    "swizzle_scales": (
        lambda name, x: swizzle_scales((64 * x).astype(jnp.uint8), token_axis=-3, implementation=name),
        [(5, 2, 6)],
        [(0,), (0,)],
    ),
    "rms_norm_quantize": (
        lambda name, x, s: both("xla", rms_norm_quantize(x, s, 1e-2, usage="both", implementation=name)),
        [(32, 32), (32,)],
        [(0, None), (0, None)],
    ),
}


@pytest.fixture
def interpreted(monkeypatch):
    """The Triton kernels in Triton's interpreter, inside JAX. A vmap that reaches a launch is an error."""
    pytest.importorskip("torch", reason="needs torch (extra `golden`): kernels run on torch tensors here")
    import torch_launch

    pytest.importorskip("triton", reason="needs triton (extra `test`)")
    from jax_mla.ffi import triton

    def launch(launch, *arrays):
        def host(*arrays):
            tensors = (torch_launch.torch.tensor(np.asarray(a)) for a in arrays)
            return tuple(map(torch_launch.to_numpy, torch_launch.run(launch, *tensors)))

        return tuple(jax.pure_callback(host, [jax.ShapeDtypeStruct(*output) for output in launch.outputs], *arrays))

    monkeypatch.setattr(triton, "call", launch)
    monkeypatch.setattr(triton, "unavailable", lambda: None)


@pytest.mark.golden
@pytest.mark.parametrize("name", OPS)
def test_kernels_under_two_vmaps(name, interpreted):
    """Values and gradients of each entry, against the pure-jnp op's."""
    function, shapes, (inner, outer) = OPS[name]
    rng = np.random.default_rng(0)
    lead = [(2,) * (o == 0) + (2,) * (i == 0) for i, o in zip(inner, outer, strict=True)]
    args = [draw(rng, *n, *s) for n, s in zip(lead, shapes, strict=True)]

    def run(implementation):
        def step(*a):
            outputs, pullback = jax.vjp(lambda *a: function(implementation, *a), *a)
            return outputs, pullback(jax.tree.map(jnp.cos, outputs)) if name != "swizzle_scales" else None

        return jax.jit(jax.vmap(jax.vmap(step, inner), outer))(*args)

    assert_close(run("triton"), run("xla"), 1e-5)
