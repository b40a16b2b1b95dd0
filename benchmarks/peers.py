"""The ops as JAX users write them: what ours are measured against. It shares no code with the library."""

import functools

import jax
import jax.numpy as jnp

# --- Ops. "usual": as they are written by hand; "best": the fastest jnp we can write ---------------------------------

f32 = jnp.float32


def _turn(first, second, cos, sin):
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, P/2], the same for every head
    first, second = first.astype(f32), second.astype(f32)
    return first * cos - second * sin, second * cos + first * sin


def rope_usual(x, cos, sin, nope):
    """Rotary pairs by strided slices, as most people write it; the result has halves. x [B, T, H, D]."""
    turned = _turn(x[..., nope::2], x[..., nope + 1 :: 2], cos, sin)
    return jnp.concatenate([x[..., :nope], jnp.concatenate(turned, axis=-1).astype(x.dtype)], axis=-1)


def rope_halves_usual(x, cos, sin, nope):
    """Halves, as Hugging Face writes it: x cos + rotate_half(x) sin."""
    cos, sin = (jnp.concatenate([t, t], axis=-1)[:, None] for t in (cos, sin))
    rotary = x[..., nope:].astype(f32)
    first, second = jnp.split(rotary, 2, axis=-1)
    turned = rotary * cos + jnp.concatenate([-second, first], axis=-1) * sin
    return jnp.concatenate([x[..., :nope], turned.astype(x.dtype)], axis=-1)


def _rotary(x, cos, sin, read, write):
    """Every dim of x [..., P], in float32."""
    half = x.shape[-1] // 2
    if read == "halves":
        first, second = x[..., :half], x[..., half:]
    else:
        pairs = x.reshape(*x.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    turned = _turn(first, second, cos, sin)
    return jnp.concatenate(turned, -1) if write == "halves" else jnp.stack(turned, -1).reshape(x.shape)


def rope_reshaped(x, cos, sin, nope):
    """Pairs by a reshape, nothing strided; for a result that is read on at once, in the same program."""
    return jnp.concatenate([x[..., :nope], _rotary(x[..., nope:], cos, sin, "pairs", "halves").astype(x.dtype)], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def rope_best(x, cos, sin, nope, read="pairs", write="halves"):
    """The rotary dims alone, put back in place where x's buffer is free; backward the same with -sin. The barrier keeps
    XLA from fusing the rotation into the update, which could then not be in place."""
    turned = jax.lax.optimization_barrier(_rotary(x[..., nope:], cos, sin, read, write).astype(x.dtype))
    return jax.lax.dynamic_update_slice_in_dim(x, turned, nope, axis=-1)


def _rope_best_fwd(x, cos, sin, nope, read, write):
    return rope_best(x, cos, sin, nope, read, write), (cos, sin)


def _rope_best_bwd(nope, read, write, tables, dy):
    cos, sin = tables
    return rope_best(dy, cos, -sin, nope, write, read), None, None


rope_best.defvjp(_rope_best_fwd, _rope_best_bwd)


def split_usual(kv, k_pe, cos, sin, nope):
    """k and v of kv [B, T, H, N + V] and the shared k_pe [B, T, P]."""
    shared = rope_usual(k_pe[:, :, None], cos, sin, 0)
    shared = jnp.broadcast_to(shared, (*kv.shape[:-1], k_pe.shape[-1]))
    return jnp.concatenate([kv[..., :nope], shared], axis=-1), kv[..., nope:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def split_best(kv, k_pe, cos, sin, nope):
    """The shared key is rotated once, not once a head; backward it is summed in float32 and then rotated."""
    shared = jax.lax.optimization_barrier(_rotary(k_pe[:, :, None], cos, sin, "pairs", "halves").astype(kv.dtype))
    shared = jnp.broadcast_to(shared, (*kv.shape[:-1], k_pe.shape[-1]))
    return jnp.concatenate([kv[..., :nope], shared], axis=-1), kv[..., nope:]


def _split_best_fwd(kv, k_pe, cos, sin, nope):
    return split_best(kv, k_pe, cos, sin, nope), (cos, sin, k_pe[..., :0])


def _split_best_bwd(nope, saved, cotangents):
    cos, sin, like = saved
    dk, dv = cotangents
    summed = jnp.sum(dk[..., nope:].astype(f32), axis=2, keepdims=True)
    dk_pe = _rotary(summed, cos, -sin, "halves", "pairs")[:, :, 0].astype(like.dtype)
    return jnp.concatenate([dk[..., :nope], dv], axis=-1), dk_pe, None, None


split_best.defvjp(_split_best_fwd, _split_best_bwd)


def norm_usual(x, scale, eps):
    """RMSNorm in float32, left in it."""
    wide = x.astype(f32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * scale


def norm_best(x, scale, eps):
    """The barrier keeps XLA from writing the float32 result, which is cheaper made again from x by each of its readers
    than read."""
    wide = x.astype(f32)
    rstd = jax.lax.optimization_barrier(jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps))
    return wide * rstd * scale


# --- MXFP8: codes and scales, uint8, in blocks of 32 along each of some axes ------------------------------------------


def _blocks(x, axis):
    """x with an axis of 32 behind `axis`, and that axis's index."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], x.shape[axis] // 32, 32, *x.shape[axis + 1 :]), axis + 1


def quantize_usual(x, *axes):
    """By log2 and exp2 (which are not exact)."""
    results = ()
    for axis in axes:
        blocks, inner = _blocks(x.astype(f32), axis)
        amax = jnp.max(jnp.abs(blocks), axis=inner, keepdims=True)
        exponent = jnp.clip(jnp.ceil(jnp.log2(amax / 448.0)), -127, 127)
        codes = jnp.clip(blocks * jnp.exp2(-exponent), -448, 448).astype(jnp.float8_e4m3fn).reshape(x.shape)
        scales = (exponent + 127).astype(jnp.uint8).squeeze(inner)
        results += (jax.lax.bitcast_convert_type(codes, jnp.uint8), scales)
    return results


def quantize_best(x, *axes):
    """By bits: the exponent is amax's own less 448's, 2^-e a float32 without a mantissa. (Finite, normal x only.)"""
    results = ()
    for axis in axes:
        blocks, inner = _blocks(x.astype(f32), axis)
        amax = jnp.max(jnp.abs(blocks), axis=inner, keepdims=True)
        bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
        scales = jnp.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000), 0)  # 448 is 1.75 * 2^8
        factor = jax.lax.bitcast_convert_type((254 - scales) << 23, f32)
        codes = jax.lax.bitcast_convert_type((blocks * factor).astype(jnp.float8_e4m3fn), jnp.uint8)
        results += (codes.reshape(x.shape), scales.astype(jnp.uint8).squeeze(inner))
    return results


def dequantize_usual(codes, scales, axis, dtype):
    factor = jnp.repeat(jnp.exp2(scales.astype(f32) - 127), 32, axis=axis)
    return (_values(codes) * factor).astype(dtype)


def dequantize_best(codes, scales, axis, dtype):
    """The scale is float32's exponent as it stands. (Normal values only.)"""
    blocks, inner = _blocks(_values(codes), axis)
    factor = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, f32)
    return (blocks * jnp.expand_dims(factor, inner)).astype(dtype).reshape(codes.shape)


def _values(codes):
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(f32)


QUANTIZE = {"jnp_usual": quantize_usual, "jnp_best": quantize_best}
DEQUANTIZE = {"jnp_usual": dequantize_usual, "jnp_best": dequantize_best}


def _mxfp8_product(quantize, dequantize):
    """x [B, T, R] . w [R, H, D] in float32, straight through, where every GEMM of both passes multiplies what is left
    of its operands in MXFP8, blocks along what is contracted, in w's dtype. The barrier is what makes it so: on a GPU
    XLA takes a cast to fp8 and back for excess precision, and drops it."""

    def product(equation, dtype, *operands):
        codes = (jax.lax.optimization_barrier(quantize(x, axis)) for x, axis in operands)
        rounded = (dequantize(*c, axis, dtype) for c, (_, axis) in zip(codes, operands, strict=True))
        return jnp.einsum(equation, *rounded, preferred_element_type=f32)

    @jax.custom_vjp
    def multiply(x, w):
        return product("btr,rhd->bthd", w.dtype, (x, -1), (w, 0))

    def backward(saved, dy):
        x, w = saved
        dx = product("bthd,rhd->btr", w.dtype, (dy, -1), (w, -1))
        return dx.astype(x.dtype), product("btr,bthd->rhd", w.dtype, (x, 1), (dy, 1)).astype(w.dtype)

    multiply.defvjp(lambda x, w: (multiply(x, w), (x, w)), backward)
    return multiply


MULTIPLY = {name: _mxfp8_product(QUANTIZE[name], DEQUANTIZE[name]) for name in QUANTIZE}


# --- Up-projections of a latent x [B, T, R] and a norm's scale; under MXFP8 in float32, for codes to be made of -------


def q_up_usual(x, w, scale, cos, sin, nope):
    normalised = norm_usual(x, scale, 1e-6).astype(x.dtype)
    return rope_usual(jnp.einsum("btr,rhd->bthd", normalised, w), cos, sin, nope)


def q_up_best(x, w, scale, cos, sin, nope):
    """The weight's rotary columns in the order of halves, so that nothing long is strided."""
    kept, rotary = w[..., :nope], w[..., nope:]
    w = jnp.concatenate([kept, rotary[..., 0::2], rotary[..., 1::2]], axis=-1)
    normalised = norm_usual(x, scale, 1e-6).astype(x.dtype)
    return rope_best(jnp.einsum("btr,rhd->bthd", normalised, w), cos, sin, nope, "halves")


def q_up_mxfp8_usual(x, w, scale, cos, sin, nope):
    return rope_usual(MULTIPLY["jnp_usual"](norm_usual(x, scale, 1e-6), w), cos, sin, nope)


def q_up_mxfp8_best(x, w, scale, cos, sin, nope):
    return rope_best(MULTIPLY["jnp_best"](norm_best(x, scale, 1e-6), w), cos, sin, nope)


def kv_up_usual(x, w, scale, k_pe, cos, sin, nope):
    normalised = norm_usual(x, scale, 1e-6).astype(x.dtype)
    return split_usual(jnp.einsum("btr,rhd->bthd", normalised, w), k_pe, cos, sin, nope)


def kv_up_best(x, w, scale, k_pe, cos, sin, nope):
    normalised = norm_usual(x, scale, 1e-6).astype(x.dtype)
    return split_best(jnp.einsum("btr,rhd->bthd", normalised, w), k_pe, cos, sin, nope)


def kv_up_mxfp8_usual(x, w, scale, k_pe, cos, sin, nope):
    return split_usual(MULTIPLY["jnp_usual"](norm_usual(x, scale, 1e-6), w), k_pe.astype(f32), cos, sin, nope)


def kv_up_mxfp8_best(x, w, scale, k_pe, cos, sin, nope):
    return split_best(MULTIPLY["jnp_best"](norm_best(x, scale, 1e-6), w), k_pe.astype(f32), cos, sin, nope)


# --- Attention --------------------------------------------------------------------------------------------------------


def attention_usual(q, k, v, at=None, implementation="xla"):
    """Causal, within packed sequences of boundaries `at` [B, n + 1] if there are any; by the public function, which
    wants v as wide as q and k."""
    width = v.shape[-1]
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - width)])
    ids = None if at is None else packed_ids(at, q.shape[1])
    mask = None if ids is None else ids[:, None, :, None] == ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)[..., :width]


def attention_best(q, k, v, at=None):
    """By cuDNN through JAX's private function, which takes v as it is. But not of packed sequences: where v is narrower
    it counts their offsets wrong. An end that is none is -1 there."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    scale, width = q.shape[-1] ** -0.5, v.shape[-1]
    if at is None:
        return private.dot_product_attention(q, k, v, scale=scale, mask_type=private.MaskType.CAUSAL)
    lengths = jnp.diff(at).astype(jnp.int32)
    lengths = jnp.where(lengths > 0, lengths, -1)
    offsets = jnp.where(lengths > 0, at[:, :-1].astype(jnp.int32), -1)
    offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - width)])
    packed = dict(q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets)
    mask = private.MaskType.PADDING_CAUSAL
    return private.dot_product_attention(q, k, v, scale=scale, mask_type=mask, **packed)[..., :width]


def largest_logits(q, k):
    """Of every head [H], causal; a head at a time."""
    visible = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))

    def head(pair):
        logits = jnp.einsum("btd,bsd->bts", *pair, preferred_element_type=f32) * q.shape[-1] ** -0.5
        return jnp.max(jnp.where(visible, logits, -jnp.inf))

    return jax.lax.map(head, tuple(jnp.moveaxis(x, 2, 0) for x in (q, k)))


def attentions(dtype):
    """By name, for arrays of that dtype here: on a GPU, but for float32, both are cuDNN's."""
    if jax.default_backend() != "gpu" or dtype == f32:
        return {"jnp_usual": attention_usual}
    return {"jnp_usual": functools.partial(attention_usual, implementation="cudnn"), "jnp_best": attention_best}


def packed_ids(at, length):
    """Which sequence each token is of, [B, T], from boundaries [B, n + 1]."""
    return jnp.sum(at[:, None, :] <= jnp.arange(length)[:, None], axis=-1)


def attention_exact(q, k, v, at=None):
    """The reference: softmax over the whole matrix, a head at a time, so that one head's logits are all there is."""
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    visible = jnp.tril(jnp.ones((length, length), bool))
    if at is not None:
        ids = packed_ids(at, length)
        visible = visible & (ids[:, :, None] == ids[:, None, :])

    @jax.checkpoint
    def head(arrays):
        q, k, v = (x.astype(f32) for x in arrays)
        logits = jnp.where(visible, jnp.einsum("btd,bsd->bts", q, k) * scale, -jnp.inf)
        return jnp.einsum("bts,bsv->btv", jax.nn.softmax(logits, axis=-1), v)

    heads_first = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v))
    return jnp.moveaxis(jax.lax.map(head, heads_first), 0, 2)


def fp8_usual(x, amax=None):
    """x to E4M3 with one scale, as it lies and with its last two dims in front; amax: float32's bits, where known."""
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x)) if amax is None else jax.lax.bitcast_convert_type(amax, jnp.float32)
    scale = 448.0 / amax
    codes = jnp.clip(x * scale, -448.0, 448.0).astype(jnp.float8_e4m3fn)
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    return codes, jnp.moveaxis(codes, (0, 1), (-2, -1)), 1.0 / scale


def fp8_best(x, amax=None):
    """The transposition of a matrix of bytes by itself, which XLA has a kernel for."""
    codes, _, inverse = fp8_usual(x, amax)
    matrix = jax.lax.optimization_barrier(codes).reshape(x.shape[0] * x.shape[1], -1)
    return codes, matrix.T.reshape(*x.shape[2:], *x.shape[:2]), inverse
