"""Attention with d_qk != d_v: what MLA's heads need."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_mla import blockwise, checks, dispatch, segments, sharding

CAUSAL = (False, True, "bottom_right")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    causal: bool | str = True,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    implementation: dispatch.Choice = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """o = softmax(scale q k^T + mask) v, head by head, without a T x S matrix.

    q: floating [B, T, H, D]; k: [B, S, H, D]; v: [B, S, H, V], all of one dtype. scale: Python float, None is D^-0.5
    (an explicit 0.0 is honoured).
    causal: True lets query i see keys j <= i (top-left, as `jax.nn`); "bottom_right" keys j <= i + S - T; False all.
    segment_ids: integers [B, T], one id a token: queries see keys of their own id only; 0 is padding, whose rows give 0
    and whose values (NaN too) reach nothing. kv_segment_ids [B, S]: the keys' ids, by default segment_ids, which then
    wants S = T. With kv_segment_ids given, causal is counted within each segment (a segment being one run of its id).
    cu_seqlens: instead of ids, the boundaries of the packed sequences: integers [B, n + 1], or [n + 1] with packed
    tokens (thd) q, k [T, H, D] and v [T, H, V], whose results have no batch dim either. `segment_ids_from_cu_seqlens`
    says what they mean.

    Returns o [B, T, H, V] in q's dtype; then, as asked, lse [B, T, H] (natural log, float32, differentiable) and
    max_logit [H] (float32, the largest scaled logit that was not masked, over batch and tokens; no gradient).
    A query that sees no key gives o = 0, lse = -inf and no gradient.
    Logits, softmax and sums are float32 (float64 for float64 q). Saved: q, k, v, o and lse; the backward pass
    recomputes the probabilities block by block (FlashAttention-2, arXiv:2307.08691).

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    if cu_seqlens is not None:
        segment_ids = _packed_ids(q, k, cu_seqlens, segment_ids, kv_segment_ids)
        one_row = segment_ids.ndim == 1
        if one_row:
            checks.dims("v", v, "S H V")
            q, k, v, segment_ids = q[None], k[None], v[None], segment_ids[None]
        options = dict(return_lse=return_lse, return_max_logit=return_max_logit, implementation=implementation)
        outputs = attention(q, k, v, scale=scale, causal=causal, segment_ids=segment_ids, **options)
        # max_logit has no batch dim to take off.
        return jax.tree.map(lambda a: a[0] if one_row and a.ndim > 1 else a, outputs)
    sizes = checks.dims("q", q, "B T H D")
    checks.floating("q", q)
    sizes = checks.dims("k", k, "B S H D", **{name: sizes[name] for name in "BHD"}) | sizes
    sizes = checks.dims("v", v, "B S H V", **{name: sizes[name] for name in "BSH"}) | sizes
    for argument, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(f"{argument}: found dtype {array.dtype}, wanted q's, which is {q.dtype}")
    scale = max(sizes["D"], 1) ** -0.5 if scale is None else checks.static_float("scale", scale)
    if not isinstance(causal, bool | str) or causal not in CAUSAL:
        raise checks.found("causal", causal, "True, False or 'bottom_right'")
    return_lse = checks.static_bool("return_lse", return_lse)
    return_max_logit = checks.static_bool("return_max_logit", return_max_logit)
    q_ids, k_ids = segments.check(segment_ids, kv_segment_ids, **sizes)
    static = Static(
        scale=scale,
        causal=causal,
        own_order=kv_segment_ids is not None,
        implementation=dispatch.check(implementation),
    )
    o, lse, max_logits = _attention(static, q, k, v, q_ids, k_ids)
    outputs = (o,)
    if return_lse:
        outputs += (lse,)
    if return_max_logit:
        outputs += (jnp.max(max_logits, axis=(0, 1), initial=-jnp.inf),)
    return outputs if len(outputs) > 1 else o


def _packed_ids(q, k, cu_seqlens, segment_ids, kv_segment_ids) -> jax.Array:
    """cu_seqlens as ids: [T] for packed tokens without a batch dim, [B, T] for rows of them."""
    if segment_ids is not None or kv_segment_ids is not None:
        raise ValueError("cu_seqlens: found segment ids besides, wanted one of the two")
    one_row = getattr(cu_seqlens, "ndim", 2) == 1
    sizes = checks.dims("q", q, "T H D" if one_row else "B T H D")
    if checks.dims("k", k, "S H D" if one_row else "B S H D")["S"] != sizes["T"]:
        raise checks.found("k", k, f"as many keys as queries, {sizes['T']}, where cu_seqlens are given")
    ids = segments.segment_ids_from_cu_seqlens(cu_seqlens, sizes["T"])
    if not one_row and ids.shape[0] != sizes["B"]:
        raise checks.found("cu_seqlens", cu_seqlens, f"a row for each of q's, [B={sizes['B']}, n + 1]")
    return ids


@dataclasses.dataclass(frozen=True)
class Static:
    scale: float
    causal: bool | str
    own_order: bool  # causal is counted within each segment, whose queries and keys lie at different indices
    implementation: dispatch.Choice


IMPLEMENTATIONS = {"xla": dispatch.Implementation(forward=blockwise.forward, backward=blockwise.backward)}

# Sequences are whole on every device; sharding them is context parallelism, which is not an op's to decide.
_FORWARD = "b T h D, b S h D, b S h V, b T, b S -> b T h V, b T h, b T h"
_BACKWARD = "b T h D, b S h D, b S h V, b T, b S, b T h V, b T h, b T h V, b T h -> b T h D, b S h D, b S h V"


def _run(direction: str, static: Static, *arrays):
    chosen = dispatch.choose("attention", IMPLEMENTATIONS, static.implementation, static, *arrays[:5])
    rule = _FORWARD if direction == "forward" else _BACKWARD
    return sharding.local("attention", rule, functools.partial(getattr(chosen, direction), static), *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, q, k, v, q_ids, k_ids):
    """o, lse, and every row's largest logit [B, T, H]."""
    return _run("forward", static, q, k, v, q_ids, k_ids)


class Residuals(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_ids: jax.Array | None
    k_ids: jax.Array | None
    o: jax.Array
    lse: jax.Array


def _attention_fwd(static: Static, q, k, v, q_ids, k_ids):
    o, lse, max_logits = _run("forward", static, q, k, v, q_ids, k_ids)
    # Named here, since here they are residuals: a policy that keeps both does not run the forward pass again.
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse, max_logits), Residuals(q, k, v, q_ids, k_ids, o, lse)


def _attention_bwd(static: Static, saved: Residuals, cotangents):
    do, dlse, _ = cotangents  # max_logit is documented as not differentiable
    dq, dk, dv = _run("backward", static, *saved, do, dlse)
    q, k, v = saved[:3]
    return sharding.cotangent(dq, q), sharding.cotangent(dk, k), sharding.cotangent(dv, v), None, None


_attention.defvjp(_attention_fwd, _attention_bwd)
