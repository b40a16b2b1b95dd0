"""`attention` by cuDNN: NVIDIA's fused kernels, forward and backward, unpadded where values are narrower than keys.

- Packed sequences: tokens are put in the order of their segments, where they do not lie so already, and cuDNN is given
  a fixed number of slots, each one segment's first token and length; a loop goes on until every segment had its slot.
  Values are padded to the width of keys for that.
- The gradient of lse: cuDNN computes rowsum(do * o) itself and knows no more. Where lse was returned, v gets columns of
  zeros, o such of ones and do such of -dlse: the sum is rowsum(do * o) - dlse, and do v^T stays what it was.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_mla import launches
from jax_mla.ffi import cudnn_attention
from jax_mla.ffi.cudnn_attention import Slots
from jax_mla.ffi.varying import vary_like

SLOTS = 16  # segments of a row in one launch: cuDNN writes an lse of T numbers for each, and starts as many blocks
LSE = 3  # columns that a float32 is split over: 24 bits, 8 of bfloat16 each
MOST = 2**31  # offsets are int32


def supports(static=None, *args) -> str | None:
    if static is None:
        return cudnn_attention.unavailable()
    return _misfit(static, *args) or cudnn_attention.unavailable() or _too_wide(static, *args)


def _misfit(static, q, k, v, q_ids, k_ids) -> str | None:
    """Why no cuDNN could run these arguments of `attention`, or would be wrong, or None."""
    (_, length, heads, width), keys = q.shape, k.shape[1]
    if q.dtype not in cudnn_attention.DTYPES:
        return f"found operands in {q.dtype}, wants bfloat16 or float16"
    if static.max_logit:
        return "found return_max_logit=True: cuDNN keeps no largest logits"
    if static.ordered:
        return "found last_key: cuDNN is causal by index alone"
    if static.own_order:
        return "found kv_segment_ids: queries and keys of a segment that lie at different indices"
    if static.causal == "bottom_right" and length != keys:
        return f"found causal='bottom_right' for {length} queries and {keys} keys, wants as many"
    if not static.scale > 0:
        return f"found scale={static.scale}, wants one above 0: masked logits are scaled too"
    if 0 in (*q.shape, *v.shape) or min(length, keys) < 2:
        return f"found {length} queries and {keys} keys in q {list(q.shape)}, wants at least 2 each and no empty dim"
    if width % 8 or v.shape[3] % 8:
        return f"found heads of {width} and {v.shape[3]} dims, wants multiples of 8"
    if q_ids is not None and length * heads * max(_widths(static, q, v, q_ids)) >= MOST:
        return f"found packed rows of {length} tokens of {heads} heads, wants fewer than 2^31 numbers a row"
    return None


def _too_wide(static, q, k, v, q_ids, k_ids) -> str | None:
    return cudnn_attention.supports(*_widths(static, q, v, q_ids))


def _widths(static, q, v, q_ids) -> tuple[int, int]:
    """What heads are padded to, in the pass that wants the widest."""
    return cudnn_attention.widths(q.shape[-1], v.shape[-1], q_ids is not None, 8 if static.lse else 0)


def forward(static, q, k, v, q_ids, k_ids) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o, lse, and, where the largest logits belong, lse again: nobody asks for them."""
    o, lse = _forward(static, q, k, v) if q_ids is None else _forward_packed(static, q, k, v, q_ids)
    return o, lse, lse


def backward(static, q, k, v, q_ids, k_ids, o, lse, do, dlse) -> tuple[jax.Array, jax.Array, jax.Array]:
    # What forward computed in may be another dtype than the products of this pass.
    arrays = (q, k, v, o.astype(q.dtype), lse, do, dlse)
    return _backward(static, *arrays) if q_ids is None else _backward_packed(static, *arrays, q_ids)


def _settings(static) -> dict:
    # "bottom_right" for as many queries as keys is the same; False is False.
    return dict(scale=static.scale, causal=bool(static.causal))


def _pad(width: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [..., D] with zeros up to [..., width]."""
    padding = ([(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])] for x in arrays)
    return tuple(jnp.pad(x, p) if p[-1][1] else x for x, p in zip(arrays, padding, strict=True))


def _flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [..., T, H, D] as [B, T, H, D]."""
    return tuple(launches.flat(x, 3) for x in arrays)


@launches.batched("data", "data", "data")
def _forward(static, q, k, v):
    lead, width = q.shape[:-1], v.shape[-1]
    qk, value = cudnn_attention.widths(q.shape[-1], width)
    o, lse = cudnn_attention.forward(*_flat(*_pad(qk, q, k), *_pad(value, v)), **_settings(static))
    return o[..., :width].reshape(*lead, width), jnp.swapaxes(lse, 1, 2).reshape(lead)


@launches.batched(*["data"] * 7)
def _backward(static, q, k, v, o, lse, do, dlse):
    shapes, lse = [x.shape for x in (q, k, v)], jnp.swapaxes(launches.flat(lse, 2), 1, 2)
    q, k, v, o, do = _flat(*_widened(static, q, k, v, o, do, dlse))
    gradients = cudnn_attention.backward(q, k, v, o, lse, do, **_settings(static))
    return tuple(g[..., : shape[-1]].reshape(shape) for g, shape in zip(gradients, shapes, strict=True))


def _widened(static, q, k, v, o, do, dlse, packed: bool = False):
    """What the backward pass reads, as wide as it is to be, dlse in it."""
    qk, value = cudnn_attention.widths(q.shape[-1], v.shape[-1], packed, 8 if static.lse else 0)
    if static.lse:
        parts, rest = [], -dlse.astype(jnp.float32)
        for _ in range(LSE):
            # XLA may take a cast down and up again for excess precision, and the rest for 0; not this operation.
            found = jnp.finfo(do.dtype)
            part = jax.lax.reduce_precision(rest, found.nexp, found.nmant)
            parts.append(part.astype(do.dtype))
            rest = rest - part
        do = jnp.concatenate([do, jnp.stack(parts, axis=-1)], axis=-1)
        o = jnp.concatenate([o, jnp.ones((*o.shape[:-1], LSE), o.dtype)], axis=-1)
    return *_pad(qk, q, k), *_pad(value, v, o, do)


class _Plan(NamedTuple):
    """The segments of flat tokens [B * T], in the order in which they get a slot."""

    order: jax.Array | None  # which token is where; None where every one stays
    live: jax.Array  # bool: no padding. As all that follows, of tokens in that order
    number: jax.Array  # which segment, of all rows', a token is of
    starts: jax.Array  # int32 [segments and more]: their first tokens, past the last the number of tokens
    lengths: jax.Array  # int32, as many
    slots: int  # of one launch
    once: bool  # known to be enough

    @classmethod
    def of(cls, static, ids: jax.Array) -> "_Plan":
        rows, length = ids.shape
        tokens, order = rows * length, None
        most = length if static.sequences is None else static.sequences  # segments of a row
        if static.sequences is None:
            order = jnp.lexsort((ids, ids == 0), axis=-1).astype(jnp.int32)
            ids = jnp.take_along_axis(ids, order, axis=1)
            order = (order + length * jnp.arange(rows, dtype=jnp.int32)[:, None]).reshape(-1)
        differs = ids[:, 1:] != ids[:, :-1]
        edge, live = jnp.ones_like(differs, shape=(rows, 1)), ids != 0
        first = (live & jnp.concatenate([edge, differs], axis=1)).reshape(-1)
        last = (live & jnp.concatenate([differs, edge], axis=1)).reshape(-1)
        slots = rows * max(2, min(most, SLOTS))
        size = rows * most + slots  # so that no launch's slots reach past the end
        starts = jnp.nonzero(first, size=size, fill_value=tokens)[0].astype(jnp.int32)
        ends = jnp.nonzero(last, size=size, fill_value=tokens - 1)[0].astype(jnp.int32) + 1
        number = jnp.cumsum(first, dtype=jnp.int32) - 1
        return cls(order, live.reshape(-1), number, starts, ends - starts, slots, rows * most <= slots)

    def sort(self, x: jax.Array) -> jax.Array:
        """x [B, T, ...] in order, padding's rows 0."""
        flat = x.reshape(-1, *x.shape[2:])
        flat = flat if self.order is None else jnp.take(flat, self.order, axis=0, mode="clip")
        return self.keep(self.live, flat.reshape(x.shape), 0.0)

    def unsort(self, x: jax.Array) -> jax.Array:
        if self.order is None:
            return x
        place = jnp.zeros_like(self.order).at[self.order].set(jnp.arange(self.order.size, dtype=jnp.int32))
        return jnp.take(x.reshape(-1, *x.shape[2:]), place, axis=0, mode="clip").reshape(x.shape)

    @staticmethod
    def keep(rows: jax.Array, x: jax.Array, other: float | jax.Array) -> jax.Array:
        """x [B, T, ...] where `rows` [B * T] say so."""
        return jnp.where(rows.reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), x, jnp.asarray(other, x.dtype))

    def run(self, launch, fills: tuple[float, ...], *like: jax.Array) -> tuple[jax.Array, ...]:
        """What `launch(Slots, the first one's segment)` gives the tokens [B, T, ...] of its slots, of all segments.
        Like what it is given, it may hold anything in the other rows. fills: what padding gets."""

        def turn(i, results):
            at = i * self.slots
            slots = Slots(*(jax.lax.dynamic_slice_in_dim(x, at, self.slots) for x in (self.starts, self.lengths)))
            mine = self.live & (self.number // self.slots == i)
            return tuple(self.keep(mine, *pair) for pair in zip(launch(slots, at), results, strict=True))

        if self.once:
            return turn(0, fills)
        slots = Slots(self.starts[: self.slots], self.lengths[: self.slots])
        shapes = jax.eval_shape(lambda slots: launch(slots, 0), slots)
        start = tuple(jnp.full(s.shape, fill, s.dtype) for s, fill in zip(shapes, fills, strict=True))
        start = tuple(vary_like(x, self.live, *like) for x in start)
        return jax.lax.fori_loop(jnp.int32(0), self.number[-1] // self.slots + 1, turn, start)


def _in_parts(function):
    """`function(static, *arrays)` of packed rows: fewer at a time, where offsets would pass int32."""

    @functools.wraps(function)
    def run(static, *arrays):
        lead = arrays[0].shape[:-3]
        arrays = [x.reshape(-1, *x.shape[len(lead) :]) for x in arrays]
        most = max(_widths(static, arrays[0], arrays[2], True)) * math.prod(arrays[0].shape[1:3])
        rows = max((MOST - 1) // most, 1)
        parts = [function(static, *(x[i : i + rows] for x in arrays)) for i in range(0, arrays[0].shape[0], rows)]
        results = (jnp.concatenate(r) if len(parts) > 1 else r[0] for r in zip(*parts, strict=True))
        return tuple(r.reshape(*lead, *r.shape[1:]) for r in results)

    return run


@launches.batched(*["data"] * 4)
@_in_parts
def _forward_packed(static, q, k, v, ids):
    plan, (_, length, heads, width) = _Plan.of(static, ids), v.shape
    wide, _ = cudnn_attention.widths(q.shape[-1], width, packed=True)
    q, k, v = _pad(wide, *map(plan.sort, (q, k, v)))

    def launch(slots, at):
        o, lse = cudnn_attention.forward(q, k, v, **_settings(static), slots=slots)
        # By heads and slots, to be read token after token.
        index = (plan.number - at) * length + jnp.arange(plan.number.size, dtype=jnp.int32)
        index = index - jnp.take(plan.starts, plan.number, mode="clip")
        lse = jnp.take(jnp.swapaxes(lse, 0, 1).reshape(heads, -1), index, axis=1, mode="clip")
        return o[..., :width], lse.T.reshape(q.shape[:3])

    return tuple(map(plan.unsort, plan.run(launch, (0.0, -jnp.inf), q, k, v, ids)))


@launches.batched(*["data"] * 8)
@_in_parts
def _backward_packed(static, q, k, v, o, lse, do, dlse, ids):
    plan, (rows, length, heads, _) = _Plan.of(static, ids), q.shape
    given = [x.shape[-1] for x in (q, k, v)]
    q, k, v, o, lse, do, dlse = map(plan.sort, (q, k, v, o, lse, do, dlse))
    q, k, v, o, do = _widened(static, q, k, v, o, do, dlse, packed=True)
    lse = lse.reshape(rows * length, heads).T

    def launch(slots, at):
        within = jnp.arange(length, dtype=jnp.int32)
        of_slots = jnp.take(lse, slots.starts[:, None] + within, axis=1, mode="clip")  # [H, slots, T]
        of_slots = jnp.where(within < slots.lengths[:, None], of_slots, jnp.zeros((), lse.dtype))
        of_slots = jnp.swapaxes(of_slots, 0, 1)
        gradients = cudnn_attention.backward(q, k, v, o, of_slots, do, **_settings(static), slots=slots)
        return tuple(g[..., :width] for g, width in zip(gradients, given, strict=True))

    return tuple(map(plan.unsort, plan.run(launch, (0.0,) * 3, q, k, v, o, do, lse)))
