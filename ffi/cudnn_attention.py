"""Launches cuDNN's fused attention from JAX, by the primitives behind `jax.nn.dot_product_attention`.

That function wants values as wide as keys, and asks for a GPU while a program is traced. Its primitives do neither, but
are private to JAX: this is the one file that knows them, and tells by signature what differs between jax 0.10.2 and
0.12. A call is opaque to vmap and to XLA's partitioner; derivatives are the op's own.
"""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax_mla.ffi import triton
from jax_mla.ffi.varying import vary_like

# The names of the custom calls in lowered text, forward and backward.
TARGETS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
LEAST = 90100  # the first cuDNN that is taken: 9.1
UNEQUAL, UNEQUAL_BLACKWELL = 91000, 91100  # from which it has kernels for keys wider than values
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


class Slots(NamedTuple):
    """Packed sequences of flat tokens: slot i, of as many as the leading dim of q times a whole number of at least 2,
    is the `lengths[i]` tokens from `starts[i]` on; those of no tokens come last."""

    starts: jax.Array  # int32 [slots]
    lengths: jax.Array  # int32 [slots]


@functools.cache
def _private():
    """JAX's module, or why it is not as this file knows it."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        for direction in ("fwd", "bwd"):
            getattr(module, f"_dot_product_attention_{direction}_p")
            unknown = _parameters(module, direction) - _settings(module, 1.0, False, False).keys() - {"is_training"}
            if unknown:
                raise ValueError(f"settings {sorted(unknown)}")
    except (ImportError, AttributeError, ValueError) as error:
        return f"needs jax 0.10.2 to 0.12, whose private attention it calls; jax {jax.__version__} has another: {error}"
    return module


def _parameters(module, direction: str) -> set[str]:
    """The settings of a primitive, which are those of its lowering that are no arrays."""
    lowering = getattr(module, f"_dot_product_attention_{direction}_cuda_lowering")
    names = list(inspect.signature(lowering).parameters)
    return set(names[names.index("scale") :])


def _settings(module, scale: float, causal: bool, packed: bool) -> dict:
    masks = module.MaskType
    return dict(
        scale=scale,
        seed=42,  # of dropout, of which there is none
        dropout_rate=0.0,
        variadic_args=(False, False),  # neither a bias nor its gradient
        mask_type=(masks.PADDING_CAUSAL if causal else masks.PADDING)
        if packed
        else (masks.CAUSAL if causal else masks.NO_MASK),
        layout=module.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        # Of jax 0.12: no function of the logits.
        score_mod_name=None,
        score_mod_jaxpr=None,
    )


def _version() -> int | None:
    """Of cuDNN, 9.19 as 91900, None where JAX finds none; a recent one for a GPU that is not here."""
    if jax.default_backend() != "gpu":
        return UNEQUAL_BLACKWELL
    try:
        return _private().check_cudnn_version()
    except RuntimeError:
        return None


def unavailable() -> str | None:
    """Why cuDNN's attention cannot be launched here, or None."""
    if isinstance(_private(), str):
        return _private()
    capability = triton.compute_capability()
    if capability is None or capability < 80:
        found = f"jax's default backend {jax.default_backend()}" if capability is None else capability / 10
        return f"needs an NVIDIA GPU of compute capability 8.0 or later; found {found}"
    version = _version()
    if version is None or version < LEAST:
        return f"needs cuDNN {LEAST // 10000}.{LEAST // 100 % 100} or later; found {version or 'none'}"
    return None


def _unequal(qk: int, v: int) -> bool:
    """Whether there are kernels for keys wider than values, as they are."""
    capability, version = triton.compute_capability() or 0, _version() or 0
    if capability == 90:
        return v < qk <= 256 and version >= UNEQUAL
    return (qk, v) == (192, 128) and 100 <= capability < 120 and version >= UNEQUAL_BLACKWELL


def widths(qk: int, v: int, packed: bool = False, spare: int = 0) -> tuple[int, int]:
    """The dims of a head that heads of `qk` and `v` dims are to be padded to, with at least `spare` more of values.

    Packed sequences want one width: JAX counts the offsets of all arrays in numbers of q's or k's.
    """
    if not packed and not spare and (qk == v or _unequal(qk, v)):
        return qk, v
    return (max(qk, v + spare),) * 2


def supports(qk: int, v: int) -> str | None:
    """Why cuDNN has no kernels, of both passes, for heads of these dims, or None."""
    most = 256 if triton.compute_capability() == 90 else 128
    if max(qk, v) > most and not _unequal(qk, v):
        return f"found heads of {qk} and {v} dims as cuDNN is given them, wants at most {most}"
    return None


def forward(q, k, v, *, scale: float, causal: bool, slots: Slots | None = None) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] in q's dtype and lse, natural, float32: [B, H, T], or [slots, H, T] by index in the slot.

    q [B, T, H, D], k [B, S, H, D], v [B, S, H, V] in bfloat16 or float16. causal: key j is seen by queries i >= j. With
    slots, which want S = T and D = V: what is of no slot is not written.
    """
    return _call("fwd", (q, k, v), (), scale, causal, slots, is_training=True)


def backward(q, k, v, o, lse, do, *, scale: float, causal: bool, slots: Slots | None = None) -> tuple[jax.Array, ...]:
    """dq, dk, dv, from what `forward` was given and returned, and o's cotangent. (rowsum(do * o) is computed in it.)"""
    return _call("bwd", (q, k, v), (lse, o, do), scale, causal, slots)


def _call(direction: str, qkv, saved, scale: float, causal: bool, slots: Slots | None, **more):
    module = _private()
    if isinstance(module, str):
        raise NotImplementedError(module)
    settings = _settings(module, scale, causal, slots is not None) | more
    settings = {name: value for name, value in settings.items() if name in _parameters(module, direction)}
    arrays = (*qkv, *saved, *(slots or ()))
    # Its primitives take arrays that vary alike, and so do what they return.
    qkv, saved, slots = jax.tree.map(lambda x: vary_like(x, *arrays), (qkv, saved, slots))
    unused = jnp.zeros(0, qkv[0].dtype)
    ragged = (unused,) * 4 if slots is None else _ragged(*qkv[:2], slots)
    primitive = getattr(module, f"_dot_product_attention_{direction}_p")
    # No bias; no tables of pages.
    return tuple(primitive.bind(*qkv, unused, *ragged, unused, unused, *saved, **settings))


def _ragged(q: jax.Array, k: jax.Array, slots: Slots) -> tuple[jax.Array, ...]:
    """Lengths of queries and keys [B, slots / B], and offsets of both [B, slots / B + 1], counted in numbers, the last
    ones the array's end. JAX reads from their shape how many slots there are."""
    rows, tokens = q.shape[0], q.shape[0] * q.shape[1]
    each = slots.starts.size // rows
    lengths = slots.lengths.reshape(rows, each)
    ends = jnp.full((rows * (each + 1) - slots.starts.size,), tokens, jnp.int32)
    ends = vary_like(ends, slots.starts)
    starts = jnp.concatenate([slots.starts, ends]).reshape(rows, each + 1)
    return lengths, lengths, *(starts * (x.shape[2] * x.shape[3]) for x in (q, k))
