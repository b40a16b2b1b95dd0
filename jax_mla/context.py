"""Context parallelism: the tokens of a row spread over the devices of one mesh axis, in zig-zag order.

Of 2 cp equal chunks of a row device r holds the r-th and the r-th from the end: under a causal mask each device's
queries then see as many keys as any other's. Keys and values are not what travels, but the latents they are made of:
C + P numbers a token.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mla import checks, fp8_block_tensor, segments, sharding
from jax_mla.mxfp8_bits import BLOCK
from jax_mla.recipes import FP8BlockRecipe, Recipe


def zigzag(length: int, cp: int, *, inverse: bool = False) -> np.ndarray:
    """Which token is at each place, int32 [length], of a row in zig-zag order: `x[:, zigzag(T, cp)]` is what
    `mla(context_axis=...)` wants of x [B, T, ...] in natural order, spread over a mesh axis of cp devices.

    length: T, a multiple of 2 cp (of any length where cp is 1, and nothing moves). inverse: the way back,
    `y[:, zigzag(T, cp, inverse=True)]`.

    Raises ValueError or TypeError naming the argument.
    """
    length, cp = checks.static_int("length", length, 0), checks.static_int("cp", cp, 1)
    inverse = checks.static_bool("inverse", inverse)
    if cp == 1:
        return np.arange(length, dtype=np.int32)
    if length % (2 * cp):
        raise checks.found("length", length, f"a multiple of 2 * cp = {2 * cp}: every device holds two chunks")
    chunks = np.arange(length, dtype=np.int32).reshape(2 * cp, -1)
    order = np.stack([chunks[:cp], chunks[cp:][::-1]], axis=1).reshape(-1)
    return np.argsort(order).astype(np.int32) if inverse else order


class Context(NamedTuple):
    """A mesh axis that tokens are spread over, and how `run` has each device compute on its own: where the axis is
    Manual (as, within it, where it was Explicit), every array is one device's; where it is Auto, on which XLA alone
    knows how arrays are spread, devices are one more dim, for vmap."""

    axis: str
    size: int
    mesh: jax.sharding.AbstractMesh
    kind: AxisType

    def attend(self, heads: Callable, q, latent: jax.Array, keys: "Keys", segment_ids: jax.Array | None):
        """`heads(q, latents, last keys, segment_ids)` for each device's queries and the latents of all tokens, natural
        order: its results, the first as q's tokens lie, the others' largest over the devices."""
        if self.kind == AxisType.Manual:
            o, *largest = heads(q, self.whole(latent), keys.last, segment_ids)
            return o, *(jax.lax.pmax(jax.lax.stop_gradient(a), self.axis) for a in largest)
        copies = _copies(self, latent)
        q, ids = jax.tree.map(self._by_device, (q, segment_ids))
        last = jnp.asarray(zigzag(latent.shape[1], self.size).reshape(self.size, -1))
        o, *largest = jax.vmap(heads)(q, copies, self.constrain(last, 0), ids)
        o = jnp.moveaxis(self.constrain(o, 0), 0, 1)
        o = self.constrain(o.reshape(o.shape[0], -1, *o.shape[3:]), 1)
        return o, *(jnp.max(a, axis=0) for a in largest)

    def whole(self, x: jax.Array) -> jax.Array:
        """x [B, T, ...] of all devices, in natural order, on each of them."""
        if self.kind == AxisType.Manual:
            x = jax.lax.all_gather(x, self.axis, axis=1, tiled=True)
        else:
            x = self.constrain(x, None)
        return _natural(x, self.size)

    def own(self, x: jax.Array) -> jax.Array:
        """The inverse of `whole`: of x [B, T] what each device has."""
        at = jnp.asarray(zigzag(x.shape[1], self.size))
        if self.kind == AxisType.Manual:
            at = _share(at, self)
        return jnp.take(x, at, axis=1)

    def constrain(self, x: jax.Array, dim: int | None) -> jax.Array:
        """Under an Auto axis: x spread over it by that dim, or dim 1 gathered, the rest left to XLA."""
        spec = [P.UNCONSTRAINED] * x.ndim
        spec[1 if dim is None else dim] = None if dim is None else self.axis
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def _by_device(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [cp, B, T / cp, ...]."""
        x = x.reshape(x.shape[0], self.size, -1, *x.shape[2:])
        return self.constrain(jnp.moveaxis(x, 1, 0), 0)


class Keys(NamedTuple):
    """What there is of all tokens, in natural order, on every device."""

    positions: jax.Array  # [1 or B, T]
    segment_ids: jax.Array | None  # [B, T]
    last: jax.Array | None  # [T / cp], of a device's queries the last key that each sees; None where `attend` knows


def _share(x: jax.Array, context: Context) -> jax.Array:
    """A device's part of x [T]."""
    length = x.shape[0] // context.size
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(context.axis) * length, length)


def _natural(x: jax.Array, cp: int, axis: int = 1) -> jax.Array:
    """[..., T, ...] from zig-zag to natural order: by chunks, which is cheaper than by tokens."""
    lead, rest = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*lead, cp, 2, -1, *rest)
    halves = jnp.moveaxis(x, axis + 1, 0)
    return jnp.concatenate([halves[0], jnp.flip(halves[1], axis=axis)], axis=axis).reshape(*lead, -1, *rest)


def _zigzag(x: jax.Array, cp: int, axis: int) -> jax.Array:
    """The inverse of `_natural`."""
    lead, rest = x.shape[:axis], x.shape[axis + 1 :]
    first, second = jnp.split(x.reshape(*lead, 2 * cp, -1, *rest), 2, axis=axis)
    return jnp.stack([first, jnp.flip(second, axis=axis)], axis=axis + 1).reshape(*lead, -1, *rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copies(context: Context, x: jax.Array) -> jax.Array:
    """Latents [B, T, K] spread over an Auto axis -> [cp, B, T, K], each device's own copy of all, in natural order. The
    gradient is summed over devices, whose own terms meet nowhere before, and spread as x is."""
    x = context.whole(x)
    return context.constrain(jnp.broadcast_to(x, (context.size, *x.shape)), 0)


def _copies_fwd(context: Context, x: jax.Array):
    return _copies(context, x), None


def _copies_bwd(context: Context, _, dx: jax.Array):
    dx = context.constrain(_zigzag(context.constrain(dx, 0), context.size, 2), 0)
    return (context.constrain(jnp.sum(dx, axis=0), 1),)


_copies.defvjp(_copies_fwd, _copies_bwd)


def find(axis: str, *arrays: jax.Array) -> Context:
    """The axis among those of the mesh that is set, or that an array lies on."""
    if not isinstance(axis, str):
        raise TypeError(f"context_axis: found {axis!r}, wanted the name of a mesh axis")
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in jax.tree.leaves(arrays))]
    for mesh in meshes:
        if axis in mesh.axis_names:
            return Context(axis, mesh.shape[axis], mesh, _kinds(mesh)[axis])
    names = list(dict.fromkeys(name for mesh in meshes for name in mesh.axis_names))
    known = f"one of the mesh's, {names}" if names else "a mesh: `jax.set_mesh`, or x placed on one"
    raise ValueError(f"context_axis: found {axis!r}, wanted {known}")


def check(context: Context, x: jax.Array, recipe: Recipe) -> None:
    """ValueError unless x [B, T, M], or [B, T / cp, M] of one device, can be cut in chunks."""
    length, parts = x.shape[1] * (context.size if context.kind == AxisType.Manual else 1), 2 * context.size
    where = f"x: found T={length} over context_axis {context.axis!r} of {context.size} devices"
    if length % parts:
        raise ValueError(f"{where}, wanted a multiple of 2 * cp = {parts}: every device holds two chunks")
    if recipe == "mxfp8" and length % (BLOCK * parts):
        raise ValueError(f"{where}, wanted a multiple of {BLOCK} * 2 * cp = {BLOCK * parts}: no block of two chunks")
    whole = fp8_block_tensor.BLOCK * context.size
    if isinstance(recipe, FP8BlockRecipe) and length % whole:
        raise ValueError(f"{where}, wanted a multiple of 128 * cp = {whole}: whole blocks on every device")


def run(context: Context, flow: Callable, results: int, params: dict, x, positions, segment_ids) -> tuple:
    """`flow(context, params, x, positions, segment_ids, keys)`, of so many results: the first lies as x, the others are
    alike on all devices. positions may be None."""

    def on_tokens(context, params, x, positions, segment_ids):
        return flow(context, params, x, *_tokens(context, x, positions, segment_ids))

    arrays = params, x, positions, segment_ids
    if context.kind == AxisType.Manual:
        return on_tokens(context, *arrays)
    if context.kind == AxisType.Auto:  # outside jit a constraint may leave no dim open
        return jax.jit(functools.partial(on_tokens, context), inline=True)(*arrays)
    # As under an Auto mesh: in `shard_map` over some axes XLA gathers what others spread.
    dims = list(sharding.spec(x))
    dims[1] = (context.axis,)
    explicit = jax.typeof(x).sharding.mesh
    axes = tuple(n for n, kind in _kinds(explicit).items() if kind == AxisType.Explicit)
    specs = P(*(dim or None for dim in dims)), *[P()] * (results - 1)
    inside = context._replace(kind=AxisType.Auto, mesh=_auto(explicit))
    shardings = tuple(NamedSharding(explicit, s) for s in specs)
    body = jax.sharding.auto_axes(functools.partial(on_tokens, inside), axes=axes, out_sharding=shardings)
    return jax.jit(body, inline=True)(*arrays)


def _tokens(context: Context, x: jax.Array, positions, segment_ids) -> tuple:
    """Positions of a device's own tokens, their ids, and `Keys`."""
    length = x.shape[1] * (context.size if context.kind == AxisType.Manual else 1)
    ids = None if segment_ids is None else context.whole(segment_ids)
    if positions is not None:
        whole = context.whole(positions)
    else:
        whole = jnp.arange(length, dtype=jnp.int32)[None] if ids is None else segments.positions_within(ids)
        positions = context.own(whole)
    last = None
    if context.kind == AxisType.Manual:
        last = _share(jnp.asarray(zigzag(length, context.size)), context)
    return positions, segment_ids, Keys(whole, ids, last)


def _auto(mesh) -> jax.sharding.AbstractMesh:
    return mesh.update_axis_types({n: AxisType.Auto for n, kind in _kinds(mesh).items() if kind == AxisType.Explicit})


def _kinds(mesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
