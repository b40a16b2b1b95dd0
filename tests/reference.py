"""What every op should compute, in fp64 numpy: slow, obvious, and sharing no code with the library.

Written from the papers (RoFormer, YaRN arXiv:2309.00071, DeepSeek-V2 arXiv:2405.04434) and Hugging Face's documented
behaviour. Config objects are read as plain data (their fields only, none of their computed properties).
Letters: B batch, T query length, S key length, M hidden size, H heads, R and C latent ranks; N nope, P rope, V value
dims of a head.
"""

import math

import ml_dtypes
import numpy as np


def f64(x):
    return np.asarray(x).astype(np.float64)


# --- Rotary embedding ---------------------------------------------------------------------------------------------


def yarn_range(dim, theta, original, beta_fast, beta_slow, truncate=True):
    """First and last frequency index of YaRN's ramp (before clipping to the frequencies that exist)."""

    def index(rotations):  # the (real) index i at which theta^(-2i/dim) turns `rotations` times in `original` tokens
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)  # dim - 1, not dim / 2 - 1: what DeepSeek's and Hugging Face's code does


def inv_freq(rope, dim):
    """Inverse frequencies [dim / 2]."""
    plain = np.array([rope.theta ** (-2 * i / dim) for i in range(dim // 2)])
    yarn = rope.scaling
    if yarn is None:
        return plain
    low, high = yarn_range(
        dim, rope.theta, yarn.original_max_position_embeddings, yarn.beta_fast, yarn.beta_slow, yarn.truncate
    )
    if low == high:
        high += 0.001
    result = np.empty_like(plain)
    for i in range(dim // 2):
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)  # 0: kept as it is, 1: divided by factor
        result[i] = plain[i] * (1 - slowed) + plain[i] / yarn.factor * slowed
    return result


def mscale(factor, m):
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def table_factor(rope):
    """What YaRN multiplies cos and sin by."""
    yarn = rope.scaling
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config):
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    yarn = config.rope.scaling
    return scale if yarn is None else scale * mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def rope_tables(positions, rope, dim, frequencies=None):
    """cos, sin [..., dim / 2]. `frequencies` replaces the exact ones, to model fp32 frequencies at far positions."""
    frequencies = inv_freq(rope, dim) if frequencies is None else f64(frequencies)
    angles = f64(positions)[..., None] * frequencies
    return np.cos(angles) * table_factor(rope), np.sin(angles) * table_factor(rope)


def _pair(layout, i, half):
    """Where the two members of rotary pair i sit."""
    return {"pairs": (2 * i, 2 * i + 1), "halves": (i, i + half)}[layout]


def apply_rope(x, cos, sin, rotary_dim=None, input_layout="pairs", output_layout="halves", inverse=False):
    """x [..., H, D] with the last `rotary_dim` dims of each head rotated; cos, sin [..., rotary_dim / 2] broadcast
    against x without its head and dim axes. `inverse` reads output_layout, writes input_layout and turns back."""
    x = f64(x)
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    start, half = x.shape[-1] - rotary_dim, rotary_dim // 2
    cos, sin = f64(cos)[..., None, :], f64(sin)[..., None, :]  # the same angle for every head
    if inverse:
        input_layout, output_layout, sin = output_layout, input_layout, -sin
    out = x.copy()
    for i in range(half):
        a, b = _pair(input_layout, i, half)
        left, right = _pair(output_layout, i, half)
        x1, x2 = x[..., start + a], x[..., start + b]
        out[..., start + left] = x1 * cos[..., i] - x2 * sin[..., i]
        out[..., start + right] = x2 * cos[..., i] + x1 * sin[..., i]
    return out


def apply_rope_kv(kv, k_pe, cos, sin, nope_dim, input_layout="pairs"):
    """k [B,S,H,N+P], v [B,S,H,V] from kv [B,S,H,N+V] and the key part all heads share, k_pe [B,S,P]."""
    kv = f64(kv)
    shared = apply_rope(f64(k_pe)[..., None, :], cos, sin, input_layout=input_layout)
    heads = kv.shape[-2]
    k = np.concatenate([kv[..., :nope_dim], np.repeat(shared, heads, axis=-2)], axis=-1)
    return k, kv[..., nope_dim:]


# --- Norm and projections -----------------------------------------------------------------------------------------


def rms_norm(x, scale, eps, zero_centered=False):
    x, scale = f64(x), f64(scale)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + scale if zero_centered else scale)


def up_projection(x, w, norm_scale=None, norm_eps=1e-6, bias=None):
    """[B,T,R] through [R,H,E] to [B,T,H,E], normalised first where a norm_scale is given."""
    x = f64(x) if norm_scale is None else rms_norm(x, norm_scale, norm_eps)
    out = np.einsum("btr,rhe->bthe", x, f64(w))
    return out if bias is None else out + f64(bias)


def q_up_proj_rope(x, w, cos, sin, nope_dim, norm_scale=None, norm_eps=1e-6, bias=None, input_layout="pairs"):
    q = up_projection(x, w, norm_scale, norm_eps, bias)
    return apply_rope(q, cos, sin, q.shape[-1] - nope_dim, input_layout)


def kv_up_proj_rope(x, w, k_pe, cos, sin, nope_dim, norm_scale=None, norm_eps=1e-6, bias=None, input_layout="pairs"):
    kv = up_projection(x, w, norm_scale, norm_eps, bias)
    return apply_rope_kv(kv, k_pe, cos, sin, nope_dim, input_layout)


# --- Attention ----------------------------------------------------------------------------------------------------


def local_index(segments):
    """Each token's place within its own segment: how many earlier tokens of the row carry the same id."""
    return [segments[:i].count(segment) for i, segment in enumerate(segments)]


def segments_from(cu_seqlens, T):
    """Segment ids 1, 2, ... of one packed row [T] from its boundaries; tokens past the last one are padding, 0."""
    ids = np.zeros(T, int)
    for number, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True), 1):
        ids[start:end] = number
    return ids


def visible(T, S, causal=True, segments=None, kv_segments=None):
    """mask [T,S] of one row: which keys each query sees. Causal counts from the start of each segment ("top_left",
    True) or so that the segment's last query sees its last key ("bottom_right"); id 0 is padding and sees nothing."""
    assert causal in (True, False, "top_left", "bottom_right")
    queries = [1] * T if segments is None else [int(s) for s in segments]
    if kv_segments is None:
        keys = queries if segments is not None else [1] * S
    else:
        keys = [int(s) for s in kv_segments]
    q_at, k_at = local_index(queries), local_index(keys)
    mask = np.zeros((T, S), bool)
    for i in range(T):
        for j in range(S):
            if queries[i] != keys[j] or queries[i] == 0:
                continue
            shift = keys.count(keys[j]) - queries.count(queries[i]) if causal == "bottom_right" else 0
            mask[i, j] = causal is False or k_at[j] <= q_at[i] + shift
    return mask


def attention(q, k, v, scale=None, causal=True, segment_ids=None, kv_segment_ids=None):
    """o [B,T,H,V], lse [B,T,H], max_logit [H]: a query that sees no key gives o 0 and lse -inf. What a mask hides is
    never touched, so NaN there reaches nothing."""
    q, k, v = f64(q), f64(k), f64(v)
    (B, T, H, D), S = q.shape, k.shape[1]
    scale = 1 / math.sqrt(D) if scale is None else scale
    out, lse, max_logit = np.zeros((B, T, H, v.shape[-1])), np.full((B, T, H), -np.inf), np.full(H, -np.inf)
    for b in range(B):
        mask = visible(
            T,
            S,
            causal,
            None if segment_ids is None else np.asarray(segment_ids)[b],
            None if kv_segment_ids is None else np.asarray(kv_segment_ids)[b],
        )
        for t in range(T):
            seen = np.flatnonzero(mask[t])
            if len(seen) == 0:
                continue
            for h in range(H):
                logits = k[b, seen, h] @ q[b, t, h] * scale
                top = logits.max()
                weights = np.exp(logits - top)
                lse[b, t, h] = top + np.log(weights.sum())
                max_logit[h] = max(max_logit[h], top)
                out[b, t, h] = weights / weights.sum() @ v[b, seen, h]
    return out, lse, max_logit


# --- MXFP8 -----------------------------------------------------------------------------------------------------------

# The non-negative E4M3 numbers by code, and where the nearest one changes.
GRID = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
MIDDLES = (GRID[1:] + GRID[:-1]) / 2


def nearest_even(v):
    """E4M3 codes of float64 numbers, saturating (section 5.3.1; 6.3 for "clamp")."""
    magnitude = np.minimum(np.abs(v), 448.0)
    code = np.searchsorted(MIDDLES, magnitude, side="left")
    tie = magnitude == np.append(MIDDLES, np.inf)[code]
    return (code + (tie & (code % 2 == 1)) + 128 * np.signbit(v)).astype(np.uint8)


def mxfp8(x, axis, rounding="up"):
    """Codes and scales, uint8, in float64, in which every step here is exact.

    Section 6.3: X = 2^(floor(log2(amax)) - 8), or 2^ceil(log2(amax / 448)), clamped to E8M0; P_i = x_i / X, rounded to
    nearest even and clamped. Zero, infinite and NaN blocks by the rules of docs/mxfp8.md.
    """
    x = np.moveaxis(np.asarray(x).astype(np.float64), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    with np.errstate(invalid="ignore"):
        amax = np.abs(blocks).max(-1)  # a NaN stays
        exponent = np.frexp(amax)[1] - 1 - 8  # frexp's mantissa lies in [1/2, 1)
        if rounding == "up":
            exponent += np.ldexp(448.0, exponent) < amax
        exponent = np.where(amax == 0, -127, np.clip(exponent, -127, 127))
        exponent = np.where(np.isinf(amax), 127, exponent)
        codes = nearest_even(np.ldexp(blocks, -exponent[..., None]))
    codes = np.where(np.isnan(amax)[..., None], 0x7F, codes).astype(np.uint8)
    scales = np.where(np.isnan(amax), 255, exponent + 127).astype(np.uint8)
    return np.moveaxis(codes.reshape(x.shape), -1, axis), np.moveaxis(scales, -1, axis)


def decode(codes, scales, axis):
    """The values of codes and scales, uint8."""
    values = np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.ldexp(values, np.repeat(np.asarray(scales).astype(int) - 127, 32, axis))


def mxfp8_values(x, axis):
    """x after a round trip through MXFP8 in blocks along `axis`."""
    return decode(*mxfp8(x, axis), axis)


# --- The layer ----------------------------------------------------------------------------------------------------


def mla(params, x, config, positions=None, segment_ids=None):
    """One MLA layer, x [B,T,M] to y [B,T,M]. Rows of segment 0 are padding: they are read by nobody and are 0."""
    x = f64(x)
    p = {name: f64(value) for name, value in params.items()}
    B, T, _ = x.shape
    padding = np.zeros((B, T), bool) if segment_ids is None else np.asarray(segment_ids) == 0
    x = np.where(padding[..., None], 0.0, x)
    if positions is None:
        rows = np.ones((B, T), int) if segment_ids is None else np.asarray(segment_ids)
        positions = np.array([local_index(row.tolist()) for row in rows]).reshape(B, T)
    N, P, C = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    layout = "pairs" if config.rope.interleave else "halves"
    cos, sin = rope_tables(positions, config.rope, P)
    if config.q_lora_rank is None:
        q = q_up_proj_rope(x, p["wq"], cos, sin, N, input_layout=layout)
    else:
        latent = x @ p["wq_a"] + p.get("wq_a_bias", 0.0)
        q = q_up_proj_rope(latent, p["wq_b"], cos, sin, N, p["q_norm"], config.norm_eps, input_layout=layout)
    down = x @ p["wkv_a"] + p.get("wkv_a_bias", 0.0)
    k, v = kv_up_proj_rope(
        down[..., :C], p["wkv_b"], down[..., C:], cos, sin, N, p["kv_norm"], config.norm_eps, input_layout=layout
    )
    o, _, _ = attention(q, k, v, softmax_scale(config), True, segment_ids)
    y = np.einsum("bthv,hvm->btm", o, p["wo"]) + p.get("wo_bias", 0.0)
    return np.where(padding[..., None], 0.0, y)


# --- Gradients ----------------------------------------------------------------------------------------------------


def numeric_grad(f, args, directions, step=1e-5):
    """Directional derivatives of the scalar f(*args) in fp64, by central differences: one number per direction.

    A direction is a sequence like args, with None for an argument that stands still; its derivative is what
    sum(gradient * direction) over the arguments must equal. Tests draw directions at random, one argument at a time."""
    args = [f64(a) for a in args]
    derivatives = []
    for direction in directions:

        def moved(h, direction=direction):
            return f(*(a if d is None else a + h * f64(d) for a, d in zip(args, direction, strict=True)))

        derivatives.append(float(moved(step) - moved(-step)) / (2 * step))
    return derivatives


def one_at_a_time(rng, args):
    """A random direction for each argument, the others standing still."""
    return [[rng.normal(size=np.shape(a)) if i == j else None for j, a in enumerate(args)] for i in range(len(args))]
