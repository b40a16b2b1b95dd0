"""Rotary position embedding: cos/sin tables with YaRN, and their application to the trailing dims of each head."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, dispatch, launches, sharding
from jax_mla.config import RopeConfig

LAYOUTS = ("pairs", "halves")


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> np.ndarray:
    """Radians a token, float32 [P/2]: theta^(-2i/P), ramped to that divided by `factor` where YaRN says so.

    YaRN (arXiv:2309.00071, section 3.2): dim i keeps its frequency below the dim that turns beta_fast times over the
    original context, is divided by `factor` above the one that turns beta_slow times, linear between.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = rope.theta**-exponents
    yarn = rope.scaling
    if yarn is not None:

        def dim_that_turns(rotations):
            turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
            return rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

        low, high = dim_that_turns(yarn.beta_fast), dim_that_turns(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low if high != low else 0.001  # as published: a step, without dividing by zero
        ramp = np.clip((np.arange(rotary_dim // 2) - low) / width, 0.0, 1.0)
        frequencies = frequencies / yarn.factor * ramp + frequencies * (1.0 - ramp)
    return frequencies.astype(np.float32)


def rope_tables(
    positions: jax.Array, rope: RopeConfig, rotary_dim: int, dtype=jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [..., P/2] of every token's angles, P = rotary_dim.

    positions: integers [...], absolute positions in tokens. rope: base and YaRN scaling; its `table_factor` multiplies
    both tables. The angles are float32(position) * float32 frequency, then cos and sin in float32, rounded once to
    `dtype`: computed per token, so nothing is ever indexed past the end of a table.

    Raises TypeError for positions that are not integers or a rope that is not a RopeConfig; ValueError for a rotary_dim
    that is not positive and even.
    """
    if not isinstance(rope, RopeConfig):
        raise TypeError(f"rope: found {checks.show(rope)}, wanted a RopeConfig")
    if checks.static_int("rotary_dim", rotary_dim, 2) % 2:
        raise checks.found("rotary_dim", rotary_dim, "an even number (RoPE rotates pairs)")
    positions = checks.integers("positions", positions)
    dtype = checks.dtype("dtype", dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype: found {dtype}, wanted a floating dtype")
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies(rope, rotary_dim)
    factor = np.float32(rope.scaling.table_factor if rope.scaling is not None else 1.0)
    return (jnp.cos(angles) * factor).astype(dtype), (jnp.sin(angles) * factor).astype(dtype)


def apply_rope(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    rotary_dim: int | None = None,
    input_layout: str = "pairs",
    output_layout: str = "halves",
    inverse: bool = False,
    implementation: dispatch.Choice = None,
) -> jax.Array:
    """Rotates the trailing P = rotary_dim dims of every head by the angles of its token.

      left = x1 cos - x2 sin,  right = x2 cos + x1 sin      (RoFormer, arXiv:2104.09864, equation 34)

    in float32 (float64 for float64 x), rounded once to x's dtype; the leading D - P dims are x's, bit for bit.

    x: floating [..., T, H, D]. cos, sin: floating, width P/2 (or P, of which the first half is read), leading dims
    equal to x.shape[:-2] or 1, aligned at the right: [T, P/2], [B, T, P/2], [S, 1, P/2] for x [S, B, H, D].
    rotary_dim: even, at most D; None is the whole head.
    input_layout: where x1, x2 of pair i lie in x: "pairs" (2i, 2i + 1, as DeepSeek's checkpoints) or "halves"
    (i, P/2 + i, as Hugging Face, Megatron-Core and cuDNN compute). output_layout: where left and right are written.
    inverse: the adjoint of the same call without it: reads output_layout, writes input_layout, rotates back (the true
    inverse where cos^2 + sin^2 = 1).

    Returns an array like x. Differentiable in x, cos and sin; saves the tables for it, and x only if a table is
    differentiated. Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    checks.dims("x", x, "... H D")
    checks.floating("x", x)
    rotary = check_rotary_dim(rotary_dim, x.shape[-1])
    check_layouts(input_layout, output_layout)
    inverse = checks.static_bool("inverse", inverse)
    cos, sin = check_tables(cos, sin, x.shape[:-2], rotary)
    static = RopeStatic(rotary, input_layout, output_layout, inverse, dispatch.check(implementation))
    return _rope(static, x, cos, sin)


@dataclasses.dataclass(frozen=True)
class RopeStatic:
    rotary_dim: int
    input_layout: str
    output_layout: str
    inverse: bool
    implementation: dispatch.Choice

    def adjoint(self) -> "RopeStatic":
        return dataclasses.replace(self, inverse=not self.inverse)


def check_layouts(input_layout: str, output_layout: str) -> None:
    checks.choice("input_layout", input_layout, LAYOUTS)
    checks.choice("output_layout", output_layout, LAYOUTS)


def check_rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    rotary = head_dim if rotary_dim is None else checks.static_int("rotary_dim", rotary_dim, 2)
    if rotary % 2 or rotary > head_dim:
        raise checks.found("rotary_dim", rotary, f"an even number of at most the head dim, which is {head_dim}")
    return rotary


def check_tables(
    cos: jax.Array, sin: jax.Array, leading: tuple[int, ...], rotary_dim: int
) -> tuple[jax.Array, jax.Array]:
    """cos and sin with width P/2 and as many dims as `leading` has, plus one."""
    return _check_table("cos", cos, leading, rotary_dim), _check_table("sin", sin, leading, rotary_dim)


def _check_table(argument: str, table: jax.Array, leading: tuple[int, ...], rotary_dim: int) -> jax.Array:
    wanted = f"{rotary_dim // 2} or {rotary_dim} columns and leading dims that are 1 or equal {list(leading)}"
    if not hasattr(table, "shape"):
        raise TypeError(f"{argument}: found {type(table).__name__}, wanted an array with {wanted}")
    checks.floating(argument, table)
    fits = 1 <= table.ndim <= len(leading) + 1 and table.shape[-1] in (rotary_dim // 2, rotary_dim)
    given = table.shape[:-1]
    if not fits or any(n not in (1, m) for n, m in zip(given, leading[len(leading) - len(given) :], strict=True)):
        raise checks.found(argument, table, wanted)
    table = jnp.asarray(table)[..., : rotary_dim // 2]
    return jnp.expand_dims(table, tuple(range(len(leading) - len(given))))


def split(x: jax.Array, layout: str) -> tuple[jax.Array, jax.Array]:
    """x1, x2 [..., P/2] of x [..., P]."""
    half = x.shape[-1] // 2
    if layout == "halves":
        return x[..., :half], x[..., half:]
    pairs = x.reshape(*x.shape[:-1], half, 2)
    return pairs[..., 0], pairs[..., 1]


def join(left: jax.Array, right: jax.Array, layout: str) -> jax.Array:
    """The inverse of `split`."""
    if layout == "halves":
        return jnp.concatenate([left, right], axis=-1)
    return jnp.stack([left, right], axis=-1).reshape(*left.shape[:-1], 2 * left.shape[-1])


def wide(x: jax.Array) -> jax.Array:
    """x in the dtype that arithmetic is done in: float32, or float64 if it is that."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rotate(static: RopeStatic, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Every dim of x [..., H, P] rotated, in `wide` precision; cos, sin [..., P/2]."""
    cos, sin = wide(cos)[..., None, :], wide(sin)[..., None, :]
    read, write = static.input_layout, static.output_layout
    if static.inverse:
        read, write, sin = write, read, -sin
    x1, x2 = split(wide(x), read)
    return join(x1 * cos - x2 * sin, x2 * cos + x1 * sin, write)


def _xla(static: RopeStatic, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    kept = x.shape[-1] - static.rotary_dim
    rotated = rotate(static, x[..., kept:], cos, sin).astype(x.dtype)
    return jnp.concatenate([x[..., :kept], rotated], axis=-1) if kept else rotated


@launches.batched("data", "table", "table")
def _triton(static: RopeStatic, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    from jax_mla.ffi import triton
    from jax_mla.kernels import rope as kernels

    if x.size == 0:
        return x
    cos, sin, table = launches.tables(cos, sin, x.shape[:-2])
    layouts = (static.input_layout, static.output_layout)[:: -1 if static.inverse else 1]
    flat = launches.flat(x, 2)
    # In a program XLA gives the kernel x's buffer, or a copy where x is read again; nobody gives one up outside.
    copy = not isinstance(x, jax.core.Tracer)
    settings = static.rotary_dim, table, *layouts, static.inverse, x.dtype.name, copy
    launch = kernels.rope(*flat.shape, *settings, arch=triton.compute_capability())
    return triton.call(launch, flat, cos, sin)[0].reshape(x.shape)


def _triton_supports(static: RopeStatic | None = None, *arrays: jax.Array) -> str | None:
    return launches.supports(*arrays)


# The backward pass is a forward one with `inverse` turned round.
IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(forward=_triton, backward=_triton, supports=_triton_supports, opaque=True),
    "xla": dispatch.Implementation(forward=_xla, backward=_xla),
}


def raw(static: RopeStatic, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """apply_rope without checks and without a derivative of its own: what forward and backward rules call."""
    chosen = dispatch.choose("apply_rope", IMPLEMENTATIONS, static.implementation, static, x, cos, sin)
    tokens = " ".join(f"t{i}" for i in range(x.ndim - 2))
    rule = f"{tokens} h D, {tokens} P, {tokens} P -> {tokens} h D"
    forward = functools.partial(chosen.forward, static)
    return sharding.local("apply_rope", rule, forward, x, cos, sin, opaque=chosen.opaque)


def table_cotangents(static: RopeStatic, x: jax.Array, dy: jax.Array, cos: jax.Array, sin: jax.Array):
    """Cotangents of cos and sin, from the rotation's input and its output's cotangent (both [..., H, D])."""

    read, write = static.input_layout, static.output_layout
    if static.inverse:
        read, write = write, read

    def sums(x, dy, cos, sin):
        x1, x2 = split(wide(x[..., x.shape[-1] - static.rotary_dim :]), read)
        left, right = split(wide(dy[..., dy.shape[-1] - static.rotary_dim :]), write)
        dcos, dsin = x1 * left + x2 * right, x1 * right - x2 * left
        if static.inverse:
            dsin = -dsin

        def reduce(d, table):
            axes = tuple(i for i in range(table.ndim - 1) if table.shape[i] == 1)
            return jnp.sum(jnp.sum(d, axis=-2), axis=axes, keepdims=True)

        return reduce(dcos, cos), reduce(dsin, sin)

    tokens = [f"t{i}" for i in range(x.ndim - 2)]
    # A dim over which the table broadcasts is summed here: the result's dim has size 1 and shares no name with x's.
    out = " ".join("one" if cos.shape[i] == 1 else name for i, name in enumerate(tokens))
    out_sin = " ".join("one" if sin.shape[i] == 1 else name for i, name in enumerate(tokens))
    tokens = " ".join(tokens)
    rule = f"{tokens} h D, {tokens} h D, {tokens} P, {tokens} P -> {out} P, {out_sin} P"
    dcos, dsin = sharding.local("apply_rope", rule, sums, x, dy, cos, sin)
    return sharding.cotangent(dcos, cos), sharding.cotangent(dsin, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rope(static: RopeStatic, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return raw(static, x, cos, sin)


class _Residuals(NamedTuple):
    like: jax.Array  # x[..., :0]: no numbers, but x's dtype and how it is spread over a mesh
    cos: jax.Array
    sin: jax.Array
    x: jax.Array | None  # only when a table is differentiated


def _rope_fwd(static: RopeStatic, x, cos, sin):
    tables = cos.perturbed or sin.perturbed
    x, cos, sin = x.value, cos.value, sin.value
    return raw(static, x, cos, sin), _Residuals(x[..., :0], cos, sin, x if tables else None)


def _rope_bwd(static: RopeStatic, saved: _Residuals, dy):
    dy = sharding.dense(dy)
    dx = sharding.cotangent(raw(static.adjoint(), dy, saved.cos, saved.sin), saved.like)
    if saved.x is None:
        return dx, None, None
    return dx, *table_cotangents(static, saved.x, dy, saved.cos, saved.sin)


_rope.defvjp(_rope_fwd, _rope_bwd, symbolic_zeros=True)
