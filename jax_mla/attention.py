"""Attention with d_qk != d_v: what MLA's heads need."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_mla import (
    attention_cudnn,
    attention_mxfp8,
    attention_rows,
    attention_triton,
    blockwise,
    checks,
    dispatch,
    fp8,
    operands,
    recipes,
    segments,
    sharding,
)
from jax_mla.coded import Coded
from jax_mla.fp8_tensor import FP8Tensor
from jax_mla.mxfp8_bits import BLOCK
from jax_mla.mxfp8_tensor import MXFP8Tensor
from jax_mla.operands import Operand
from jax_mla.recipes import FP8Recipe, Recipe

CAUSAL = (False, True, "bottom_right")


def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scale: float | None = None,
    causal: bool | str = True,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    last_key: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    grad_dtype=None,
    out: Recipe = None,
    implementation: dispatch.Choice = None,
) -> Operand | tuple[Operand, ...]:
    """o = softmax(scale q k^T + mask) v, head by head, without a T x S matrix.

    q: floating [B, T, H, D]; k: [B, S, H, D]; v: [B, S, H, V], all of one dtype. scale: Python float, None is D^-0.5
    (an explicit 0.0 is honoured). All three may be an `MXFP8Tensor`, token_axis -3; both passes compute with the values
    of the copies whose blocks run along what the forward pass contracts: q and k row-wise (D), v column-wise (S).
    (On a B200 "cudnn" by name multiplies codes in the forward pass, where NVIDIA's kernel fits them, and rounds
    probabilities to E4M3: docs/blackwell.md. Not run on one.)
    Or an `FP8Tensor`, token_axis -3, row-wise: both passes compute with its values, in its logical dtype.
    causal: True lets query i see keys j <= i (top-left, as `jax.nn`); "bottom_right" keys j <= i + S - T; False all.
    segment_ids: integers [B, T], one id a token: queries see keys of their own id only; 0 is padding, whose rows give 0
    and whose values (NaN too) reach nothing. kv_segment_ids [B, S]: the keys' ids, by default segment_ids, which then
    wants S = T. With kv_segment_ids given, causal is counted within each segment (a segment being one run of its id).
    last_key: instead of `causal`, integers [T] or [B, T]: query i sees keys j <= last_key[i] (none where that is below
    0), with ids given those of its own id. Queries may then lie in any order, and under a mesh be spread over devices,
    each of which has all keys; dk and dv are summed over those. Fastest where last_key does not fall from one query to
    the next. Not cuDNN's.
    Padding in an MXFP8Tensor has already set the scales of blocks it shares with tokens: it must have been finite and
    small when it was quantised (`mla` makes it 0).
    cu_seqlens: instead of ids, the boundaries of the packed sequences: integers [B, n + 1], or [n + 1] with packed
    tokens (thd) q, k [T, H, D] and v [T, H, V], whose results have no batch dim either. `segment_ids_from_cu_seqlens`
    says what they mean. With MXFP8, sequences start at multiples of 32, so that no block of v mixes two: checked where
    the values are known at trace time, else the caller's promise.
    out: None, or "fp8" (an `FP8Recipe`): o is an `FP8Tensor` with both copies, token_axis -3, quantised from q's dtype,
    and what is kept of it for the backward pass are its column-wise codes. Not of packed tokens [T, H, V].
    grad_dtype: the floating dtype that the backward pass multiplies in; None is q's. (Its sums are float32, and dq, dk,
    dv have q's dtype.)

    Returns o [B, T, H, V] in q's dtype; then, as asked, lse [B, T, H] (natural log, float32, differentiable) and
    max_logit [H] (float32, the largest scaled logit that was not masked, over batch and tokens; no gradient).
    A query that sees no key gives o = 0, lse = -inf and no gradient.
    Logits, softmax and sums are float32 (float64 for float64 q). Saved: q, k, v (of tensors the codes read), o and lse;
    the backward pass recomputes the probabilities block by block (FlashAttention-2, arXiv:2307.08691).

    implementation: on an NVIDIA GPU None is, for bfloat16 and float16, "cudnn", or "triton" for packed sequences,
    largest logits and the backward pass of rows of 128 to 1,024 tokens (2,048 where not causal); both round
    probabilities to the dtype of q. Rows that packed sequences of one length fill are a batch to these two (by
    `cu_seqlens`; where only the running program knows them, of at least 128 tokens). Where one packed sequence holds
    NaN, its neighbours may get some with these, not with "xla".

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    # numpy's float64 is float32 to JAX out of x64 mode.
    q, k, v = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    sequences, alike = None, False
    quantized, blocks = isinstance(q, Coded), isinstance(q, MXFP8Tensor)
    if cu_seqlens is not None:
        if blocks:
            segments.check_starts("cu_seqlens", cu_seqlens, BLOCK)
        segment_ids = _packed_ids(q, k, cu_seqlens, segment_ids, kv_segment_ids)
        sequences = cu_seqlens.shape[-1] - 1
        alike = attention_rows.alike(cu_seqlens, segment_ids.shape[-1])
        one_row = segment_ids.ndim == 1
        if one_row:
            if isinstance(q, FP8Tensor):
                raise checks.found("q", q, "an array or an MXFP8Tensor of packed tokens [T, H, D]")
            if out is not None:
                raise checks.found("out", out, "None for packed tokens [T, H, D]")
            checks.dims("v", operands.shaped(v), "S H V")
            q, k, v, segment_ids = jax.tree.map(lambda a: a[None], (q, k, v, segment_ids))
    for argument, array in (("k", k), ("v", v)):
        if isinstance(array, Coded) != quantized or (quantized and type(array) is not type(q)):
            wanted = "wanted q, k and v all arrays or all tensors of one kind"
            raise TypeError(f"{argument}: found {checks.show(array)}, {wanted}")
    out = recipes.check(out)
    if out is not None and not isinstance(out, FP8Recipe):
        raise checks.found("out", out, "None, 'fp8' or an FP8Recipe")
    # Which asks for the copies that are read.
    recipe = FP8Recipe() if isinstance(q, FP8Tensor) else "mxfp8" if quantized else None
    read = _READ if blocks or not quantized else ("rowwise",) * 3
    sizes = operands.check("q", q, "B T H D", recipe, -3, read[0])
    sizes = operands.check("k", k, "B S H D", recipe, -3, read[1], **{name: sizes[name] for name in "BHD"}) | sizes
    sizes = operands.check("v", v, "B S H V", recipe, -3, read[2], **{n: sizes[n] for n in "BSH"}) | sizes
    for argument, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(f"{argument}: found dtype {array.dtype}, wanted q's, which is {q.dtype}")
    for argument, array, letter in (("q", q, "D"), ("v", v, "V")):
        if not sizes[letter]:  # of no dims there would still be a softmax
            raise checks.found(argument, operands.shaped(array), f"heads of at least one dim {letter}")
    scale = max(sizes["D"], 1) ** -0.5 if scale is None else checks.static_float("scale", scale)
    if not isinstance(causal, bool | str) or causal not in CAUSAL:
        raise checks.found("causal", causal, "True, False or 'bottom_right'")
    if last_key is not None:
        last_key = _check_last_key(last_key, causal, cu_seqlens, sizes)
    return_lse = checks.static_bool("return_lse", return_lse)
    return_max_logit = checks.static_bool("return_max_logit", return_max_logit)
    q_ids, k_ids = segments.check(segment_ids, kv_segment_ids, **sizes)
    if blocks:
        segments.check_blocks("segment_ids", segment_ids, BLOCK)
        segments.check_blocks("kv_segment_ids", kv_segment_ids, BLOCK)
    static = Static(
        kinds=tuple(map(operands.kind, (q, k, v))),
        read=read,
        out=out,
        scale=scale,
        causal=causal,
        own_order=kv_segment_ids is not None and last_key is None,
        ordered=last_key is not None,
        sequences=sequences,
        alike=alike,
        lse=return_lse,
        max_logit=return_max_logit,
        dtype=jnp.dtype(operands.products(q.dtype) if blocks else q.dtype),
        grad_dtype=_grad_dtype(grad_dtype),
        implementation=dispatch.check(implementation),
    )
    o, lse, max_logits = _attention(static, q, k, v, q_ids, k_ids, last_key)
    outputs = (o,)
    if return_lse:
        outputs += (lse,)
    if cu_seqlens is not None and one_row:
        outputs = tuple(a[0] for a in outputs)
    if return_max_logit:
        outputs += (jnp.max(max_logits, axis=(0, 1), initial=-jnp.inf),)
    return outputs if len(outputs) > 1 else outputs[0]


_READ = ("rowwise", "rowwise", "columnwise")  # the copies of q, k and v


def _grad_dtype(grad_dtype):
    if grad_dtype is None:
        return None
    grad_dtype = checks.dtype("grad_dtype", grad_dtype)
    checks.floating("grad_dtype", jax.ShapeDtypeStruct((), grad_dtype))
    return grad_dtype


def _check_last_key(last_key, causal, cu_seqlens, sizes: dict[str, int]) -> jax.Array:
    """[B, T], or an error that names it."""
    if causal is not True or cu_seqlens is not None:
        raise ValueError(
            f"last_key: found it besides {'cu_seqlens' if causal is True else f'causal={causal!r}'}, wanted it to say "
            "alone what of its segment a query sees"
        )
    last_key = checks.integers("last_key", last_key)
    batch, length = sizes["B"], sizes["T"]
    if last_key.shape not in ((length,), (batch, length)):
        raise checks.found("last_key", last_key, f"shape [{length}] or [{batch}, {length}]")
    return last_key if last_key.ndim == 2 else jnp.broadcast_to(last_key, (batch, length))


def _packed_ids(q, k, cu_seqlens, segment_ids, kv_segment_ids) -> jax.Array:
    """cu_seqlens as ids: [T] for packed tokens without a batch dim, [B, T] for rows of them."""
    if segment_ids is not None or kv_segment_ids is not None:
        raise ValueError("cu_seqlens: found segment ids besides, wanted one of the two")
    if getattr(cu_seqlens, "ndim", None) not in (1, 2):
        segments.segment_ids_from_cu_seqlens(cu_seqlens, 0)  # says what is wrong
    one_row = cu_seqlens.ndim == 1
    q, k = operands.shaped(q), operands.shaped(k)
    sizes = checks.dims("q", q, "T H D" if one_row else "B T H D")
    if checks.dims("k", k, "S H D" if one_row else "B S H D")["S"] != sizes["T"]:
        raise checks.found("k", k, f"as many keys as queries, {sizes['T']}, where cu_seqlens are given")
    ids = segments.segment_ids_from_cu_seqlens(cu_seqlens, sizes["T"])
    if not one_row and ids.shape[0] != sizes["B"]:
        raise checks.found("cu_seqlens", cu_seqlens, f"a row for each of q's, [B={sizes['B']}, n + 1]")
    return ids


@dataclasses.dataclass(frozen=True)
class Static:
    kinds: tuple[operands.Kind, ...]  # of q, k, v
    read: tuple[str, ...]  # the copies of them, of tensors
    out: FP8Recipe | None
    scale: float
    causal: bool | str
    own_order: bool  # causal is counted within each segment, whose queries and keys lie at different indices
    ordered: bool  # every query says which key is the last that it sees
    sequences: int | None  # at most so many in a row, one after another, padding last; None where that is not known
    alike: bool | None  # these are of one length, and fill the rows; None if only the running program knows
    lse: bool  # is returned, and may have a gradient
    max_logit: bool  # is returned
    dtype: jnp.dtype  # what is multiplied in
    grad_dtype: jnp.dtype | None  # in the backward pass, where it is not `dtype`
    implementation: dispatch.Choice


IMPLEMENTATIONS = {
    "cudnn": dispatch.Implementation(
        attention_cudnn.forward, attention_cudnn.backward, attention_cudnn.supports, opaque=True
    ),
    "triton": dispatch.Implementation(
        attention_triton.forward, attention_triton.backward, attention_triton.supports, opaque=True
    ),
    "xla": dispatch.Implementation(forward=blockwise.forward, backward=blockwise.backward),
}
# The order for packed sequences, and that of the backward pass of rows of so many tokens, causal or not, for which
# cuDNN's is slower: docs/performance.md has the times.
_PACKED = ("triton", "cudnn", "xla")
_SHORT = {True: range(128, 1025), False: range(128, 2049)}

# Sequences are whole on every device, but for queries that say what they see: context parallelism.
_FORWARD = "b T h D, b S h D, b S h V, b T, b S -> b T h V, b T h, b T h"
_BACKWARD = "b T h D, b S h D, b S h V, b T, b S, b T h V, b T h, b T h V, b T h -> b T h D, b S h D, b S h V"
_ORDERED_FORWARD = "b t h D, b S h D, b S h V, b t, b S, b t -> b t h V, b t h, b t h"
_ORDERED_BACKWARD = (
    "b t h D, b S h D, b S h V, b t, b S, b t h V, b t h, b t h V, b t h, b t -> b t h D, b S h D, b S h V"
)
_RULES = {
    ("forward", False): _FORWARD,
    ("backward", False): _BACKWARD,
    ("forward", True): _ORDERED_FORWARD,
    ("backward", True): _ORDERED_BACKWARD,
}


def _run(direction: str, static: Static, dtype, last_key, q, k, v, *arrays):
    """One pass on the values of q, k and v in `dtype`; the forward one on codes where a kernel reads them."""
    if direction == "forward" and attention_mxfp8.supports(static, q, k, v, arrays[0]) is None:
        return attention_mxfp8.forward(static, q, k, v)
    q, k, v = (operands.read(x, dtype, usage) for x, usage in zip((q, k, v), static.read, strict=True))
    chosen = _choose(direction, static, q, k, v, *arrays[:2])
    function = functools.partial(getattr(chosen, direction), static)
    if chosen.opaque and static.alike is not False:
        count = static.sequences
        rows = (jax.ShapeDtypeStruct(attention_rows.cut(x.shape, count), x.dtype) for x in (q, k, v))
        batch = getattr(_choose(direction, static, *rows, None, None), direction)
        batch = attention_rows.as_batch(functools.partial(batch, static), count)
        function = batch if static.alike else attention_rows.where_alike(batch, function, count, 3 + len(arrays))
    arrays = (q, k, v, *arrays, *((last_key,) if static.ordered else ()))
    # Left to itself XLA would gather queries for the loop over their blocks.
    opaque = chosen.opaque or static.ordered
    return sharding.local("attention", _RULES[direction, static.ordered], function, *arrays, opaque=opaque)


def _choose(direction: str, static: Static, q, k, v, q_ids, k_ids) -> dispatch.Implementation:
    choice = static.implementation
    if choice is None:
        short = direction == "backward" and max(q.shape[1], k.shape[1]) in _SHORT[bool(static.causal)]
        choice = _PACKED if q_ids is not None or short else None
    return dispatch.choose("attention", IMPLEMENTATIONS, choice, static, q, k, v, q_ids, k_ids)


def _check_backward(static: Static, *arrays) -> None:
    """Before the forward pass is launched: that something can run the backward pass in its own dtype."""
    if static.grad_dtype in (None, static.dtype):
        return
    *qkv, q_ids, k_ids = arrays
    try:
        _choose("backward", static, *(jax.ShapeDtypeStruct(x.shape, static.grad_dtype) for x in qkv), q_ids, k_ids)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error} (of the backward pass, by grad_dtype={static.grad_dtype})") from None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, q, k, v, q_ids, k_ids, last_key):
    """o, lse, and every row's largest logit [B, T, H]."""
    o, lse, max_logits = _run("forward", static, static.dtype, last_key, q, k, v, q_ids, k_ids)
    return _output(static, o.astype(q.dtype)), lse, max_logits


def _output(static: Static, o: jax.Array) -> Operand:
    if static.out is None:
        return o
    # Kernels of attention alone may have been named.
    return fp8.raw_quantize(fp8.Static("both", -3, "e4m3", static.out.power_of_two, o.dtype, None), o).bytes()


class Residuals(NamedTuple):
    q: Operand
    k: Operand
    v: Operand
    q_ids: jax.Array | None
    k_ids: jax.Array | None
    o: Operand
    lse: jax.Array
    last_key: jax.Array | None


def _attention_fwd(static: Static, q, k, v, q_ids, k_ids, last_key):
    _check_backward(static, q, k, v, q_ids, k_ids)
    o, lse, max_logits = _run("forward", static, static.dtype, last_key, q, k, v, q_ids, k_ids)
    # Named here, since here they are residuals: a policy that keeps both does not run the forward pass again.
    o = operands.named(_output(static, o.astype(q.dtype)), "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    kept = (operands.keep(x, usage) for x, usage in zip((q, k, v), static.read, strict=True))
    # Of a tensor the copy that the output projection keeps too.
    kept_o = o if static.out is None else operands.keep(o, "columnwise")
    return (o, lse, max_logits), Residuals(*kept, q_ids, k_ids, kept_o, lse, last_key)


def _attention_bwd(static: Static, saved: Residuals, cotangents):
    do, dlse, _ = cotangents  # max_logit is documented as not differentiable
    if static.out is not None:
        do, saved = do.proxy, saved._replace(o=operands.read(saved.o, static.dtype))
    dtype = static.dtype if static.grad_dtype is None else static.grad_dtype
    gradients = _run("backward", static, dtype, saved.last_key, *saved[:-1], do.astype(dtype), dlse)
    given = zip(static.kinds, saved[:3], gradients, strict=True)
    return *(_give(kind, kept, gradient) for kind, kept, gradient in given), None, None, None


def _give(kind: operands.Kind, kept: Operand, gradient: jax.Array) -> Operand:
    if kind.shell is None:
        return sharding.cotangent(gradient, kept)
    return operands.give(kind, None if kind.frozen else sharding.cotangent(gradient, operands.like(kept)))


_attention.defvjp(_attention_fwd, _attention_bwd)
