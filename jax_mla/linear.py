"""[RMSNorm ->] GEMM [+ bias] with the gradients that mixed precision wants: a float32 weight gets a float32 gradient
that was never rounded to the activation's dtype. What recipes multiply is told in `operands.py`."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_mla import checks, dispatch, mxfp8, norm, norm_quantize, operands, recipes, rope, sharding
from jax_mla.norm import NormStatic
from jax_mla.operands import Operand, Scaled
from jax_mla.recipes import FP8BlockRecipe, FP8Recipe, Recipe
from jax_mla.rope import wide

Factor = jax.Array | Scaled  # of a product

_LETTERS = "abcdefgijklmnopqstuvwxyz"


def linear(
    x: Operand,
    w: Operand,
    bias: jax.Array | None = None,
    *,
    contract: int = 1,
    recipe: Recipe = None,
    implementation: dispatch.Choice = None,
) -> jax.Array:
    """y = x . w + bias, contracting the last `contract` dims of x with the first of w.

    x: floating [..., *C]; w: floating [*C, *O]; bias: floating [*O] or None. Computed in x's dtype (w is cast to it,
    accumulation is float32); returned in it, [..., *O]. dW and dbias come from float32 accumulators in their
    parameter's dtype. Under a mesh the bias is added after any sum over it.
    recipe: None; "mxfp8", "fp8" or "fp8_block" (or an `FP8Recipe`, `FP8BlockRecipe`): x, w and y's cotangent are
    multiplied as MXFP8, FP8, or FP8 in blocks. x and w may be an `MXFP8Tensor`, `FP8Tensor` or `FP8BlockTensor`, of
    token_axis -1 - contract and that of the last dim of w that is contracted. implementation: of what quantises (the
    GEMMs are XLA's, and so is what quantises in blocks of 128).

    Saved for the backward pass: x and w, of which a recipe keeps x's column-wise and w's row-wise codes.
    Raises ValueError or TypeError naming the argument.
    """
    known = dict.fromkeys(("x", "w"), ()) | {n: tuple(a.shape) for n, a in (("x", x), ("w", w)) if hasattr(a, "shape")}
    if len(known["w"]) <= contract or known["x"][-contract:] != known["w"][:contract]:
        raise checks.found("w", w, f"an array whose first {contract} dims are the last of x, which is {checks.show(x)}")
    recipe = recipes.check(recipe)
    how = dispatch.check(implementation)
    static = Static(operands.kind(x), operands.kind(w), contract, recipe, implementation=how)
    operands.check("x", x, "... K", recipe, static.x_axis, "rowwise")
    operands.check("w", w, "... K", recipe, static.w_axis(w.ndim), "columnwise")
    if bias is not None:
        checks.floating("bias", bias)
        if bias.shape != w.shape[contract:]:
            raise checks.found("bias", bias, f"shape {list(w.shape[contract:])}")
    return _linear(static, x, w, bias)


@dataclasses.dataclass(frozen=True)
class Static:
    x: operands.Kind
    w: operands.Kind
    contract: int = 1
    recipe: Recipe = None
    norm: NormStatic | None = None  # where there is a norm_scale
    name: str | None = None  # the checkpoint name of what the norm gives
    widen: bool = False  # the result stays float32, for an op that goes on with it
    halves: int = 0  # the trailing dims of w, pairs, that the result has as halves
    implementation: dispatch.Choice = None  # of the norm, and of what quantises and dequantises

    def using(self, implementation: dispatch.Choice) -> "Static":
        norm = None if self.norm is None else dataclasses.replace(self.norm, implementation=implementation)
        return dataclasses.replace(self, norm=norm, implementation=implementation)

    @property
    def x_axis(self) -> int:
        return -1 - self.contract

    @property
    def fp8(self) -> bool:
        return isinstance(self.recipe, FP8Recipe)

    @property
    def blocks(self) -> bool:
        return isinstance(self.recipe, FP8BlockRecipe)

    def w_axis(self, ndim: int) -> int:
        """Also that of y's cotangent, whose dims after the tokens are w's after those it contracts."""
        return operands.weight_axis(ndim, self.contract)


class Residuals(NamedTuple):
    latent: jax.Array | None  # x before its norm
    rstd: jax.Array | None
    norm_scale: jax.Array | None
    x: Operand | None  # as wgrad reads it; None where it is recomputed from the latent, or w is frozen
    w: Operand | None  # as dgrad reads it; None where x is frozen
    like_x: jax.Array | None  # under a recipe: their types
    like_w: jax.Array | None
    bias: jax.Array | None


def project(static: Static, x: Operand, w: Operand, norm_scale, bias, train: bool = False):
    """[RMSNorm ->] GEMM [+ bias] in x's dtype, and its residuals, for which nothing is made unless `train`."""
    dtype = x.dtype
    x, w, saved = factors(static, x, w, norm_scale, bias, train)
    x_read, w_read = values(static, dtype, x, w)
    y_dtype = jnp.promote_types(dtype, jnp.float32) if static.widen else dtype
    y = multiply(x_read, to_halves(w_read, static), static.contract, y_dtype)
    return add_bias(y, to_halves(bias, static)), saved


def factors(static: Static, x: Operand, w: Operand, norm_scale, bias, train: bool, codes: bool = False):
    """What the GEMM multiplies: x, normalised if it is to be, and w, under a recipe with the copies that it reads,
    which `values` gives, or as `codes` in tensors; and the residuals."""
    given, dtype, latent, rstd = x, x.dtype, None, None
    how = static.implementation
    like_x = like_w = None
    if norm_scale is not None:
        latent = x
    if static.recipe is None:
        if norm_scale is not None:
            x, rstd = norm.raw_forward(static.norm, x, norm_scale)
            x = checkpoint_name(x, static.name)
        kept_x, kept_w = None if norm_scale is not None else operands.keep(x), operands.keep(w)
    else:
        wants_x, wants_w = train and not static.x.frozen, train and not static.w.frozen
        if wants_w:
            operands.check_usages("x", given, static.recipe, static.x_axis, "columnwise")
        if wants_x:
            operands.check_usages("w", w, static.recipe, static.w_axis(w.ndim), "rowwise")
        like_x, like_w = operands.like(given), operands.like(w)
        x_usages, w_usages = ("rowwise",) + ("columnwise",) * wants_w, ("columnwise",) + ("rowwise",) * wants_x
        if norm_scale is not None and (static.fp8 or static.blocks):
            x, rstd = norm.raw_forward(static.norm, x, norm_scale)
        if static.fp8:
            x = operands.quantize_fp8(x, x_usages, static.x_axis, static.recipe, implementation=how)
            w = operands.quantize_fp8(w, w_usages, static.w_axis(w.ndim), static.recipe, implementation=how)
        elif static.blocks:
            x = operands.quantize_blocks(x, x_usages, static.x_axis, static.recipe)
            w = operands.quantize_blocks(w, w_usages, static.w_axis(w.ndim), static.recipe, "128x128")
        else:
            x_reads, w_reads = ((), ()) if codes else (("rowwise",), ("columnwise",))
            products = operands.products(dtype)
            if norm_scale is not None:
                quantization = operands.quantization(x_usages, static.x_axis, dtype, how, x_reads, products)
                x, rstd = norm_quantize.raw_forward(norm_quantize.Static(static.norm, quantization, how), x, norm_scale)
                x = x.detach()
            else:
                x = operands.quantize(x, x_usages, static.x_axis, dtype, how, x_reads, products)
            w = operands.quantize(w, w_usages, static.w_axis(w.ndim), w.dtype, how, w_reads, products)
        kept_x = operands.keep(x, "columnwise") if wants_w else None
        kept_w = operands.keep(w, "rowwise") if wants_x else None
        if static.name is not None:
            kept_x = checkpoint_name(kept_x, static.name)
    return x, w, Residuals(latent, rstd, norm_scale, kept_x, kept_w, like_x, like_w, bias) if train else None


def values(static: Static, dtype, x: Operand | mxfp8.Rounded, w: Operand | mxfp8.Rounded) -> tuple[Factor, Factor]:
    """What `factors` gives for an x of that dtype as what is multiplied."""
    how = static.implementation
    if static.recipe is None:
        return operands.read(x, dtype, None, how), operands.read(w, dtype, None, how)
    if static.fp8:
        return operands.scaled(x, "rowwise"), operands.scaled(w, "columnwise")
    products = operands.products(dtype)
    return operands.read(x, products, "rowwise", how), operands.read(w, products, "columnwise", how)


def project_backward(
    static: Static, saved: Residuals, dy: Operand | mxfp8.Rounded, summed: jax.Array | None = None
) -> tuple:
    """Cotangents of x, w, norm_scale and bias. dy may be wider than x, or under a recipe be quantised: then `summed` is
    what bias's cotangent, if there is a bias, is the sum of."""
    latent, rstd, norm_scale, x, w, like_x, like_w, bias = saved
    wants_x, wants_w = not static.x.frozen, not static.w.frozen
    how = static.implementation
    rows = columns = dy
    if static.recipe is None:
        if norm_scale is not None:
            x = norm.renormalize(static.norm, latent, rstd, norm_scale)
        like_x, like_w = (a if isinstance(a, jax.Array) else operands.like(a) for a in (x, w))
        x_read, w_read = operands.read(x, dy.dtype, None, how), operands.read(w, dy.dtype, None, how)
    elif wants_x or wants_w:
        usages, axis = ("rowwise",) * wants_x + ("columnwise",) * wants_w, static.w_axis(like_w.ndim)
        if static.fp8:
            read = operands.scaled
            t = operands.quantize_fp8(dy, usages, axis, static.recipe, static.recipe.grad_format, how)
        else:
            products = operands.products(like_x.dtype)
            if static.blocks:
                t = operands.quantize_blocks(dy, usages, axis, static.recipe)
            else:
                t = operands.quantize(dy, usages, axis, like_x.dtype, how, usages, products)
            read = functools.partial(_read, products, how)
        if wants_x:
            rows, w_read = (read(a, "rowwise") for a in (t, w))
        if wants_w:
            columns, x_read = (read(a, "columnwise") for a in (t, x))
    dx = dw = dscale = None
    if wants_x:
        dx = input_cotangent(rows, to_halves(w_read, static), like_x, static.contract)
    if wants_w:
        dw = from_halves(weight_cotangent(x_read, columns, like_w, static.contract), static)
    if norm_scale is not None:
        dx, dscale = norm.raw_backward(static.norm, latent, rstd, norm_scale, dx)
    dbias = None if bias is None else from_halves(bias_cotangent(dy if summed is None else summed, bias), static)
    return operands.give(static.x, dx), operands.give(static.w, dw), dscale, dbias


def _read(products: np.dtype, how: dispatch.Choice, x: Operand | mxfp8.Rounded, usage: str) -> jax.Array:
    return operands.read(x, products, usage, how)


def norm_row(scale_at: int, static, *args) -> int:
    """How long a row the norm of an up-projection has, 0 without one: of the op's arguments, x first and norm_scale at
    `scale_at`, or of what it saved."""
    latent = args[0].project.latent if len(args) == 1 else None if args[scale_at] is None else args[0]
    return 0 if latent is None else latent.shape[-1]


def multiply(x: Factor, w: Factor, contract: int = 1, dtype=None) -> jax.Array:
    """The product in `dtype`, by default x's, without a derivative of its own."""
    rows, inner, outer = _letters(x, w, contract)
    return _product((x, rows, inner), (w, inner, outer), rows + outer, x.dtype if dtype is None else dtype)


def input_cotangent(dy: Factor, w: Factor, x: jax.Array, contract: int = 1) -> jax.Array:
    """dx = dy . w^T, with the type of x."""
    inner, outer = _LETTERS[:contract], _LETTERS[contract : w.ndim]
    rows = _LETTERS[w.ndim : w.ndim + dy.ndim - len(outer)]
    # Codes give no dtype to sum in: x's, whose gradient it is.
    dtype = x.dtype if isinstance(dy, Scaled) else dy.dtype
    return sharding.cotangent(_product((dy, rows, outer), (w, inner, outer), rows + inner, dtype), x)


def weight_cotangent(x: Factor, dy: Factor, w: jax.Array, contract: int = 1) -> jax.Array:
    """dW = x^T . dy, with the type of w: from the float32 accumulator, summed once over devices that hold copies."""
    rows, inner, outer = _letters(x, w, contract)
    terms = (x, rows, inner), (dy, rows, outer)
    across = frozenset().union(*(sharding.varying(_array(a)) for a, _, _ in terms)) - sharding.varying(w)
    # Partial sums that are still to be added up stay in float32; else the GEMM writes w's dtype and nothing wider.
    narrow = w.dtype if isinstance(x, Scaled) else jnp.promote_types(x.dtype, w.dtype)
    dtype = jnp.promote_types(narrow, jnp.float32) if across else narrow
    return sharding.cotangent(_product(*terms, inner + outer, dtype, like=w), w)


def _product(x: tuple[Factor, str, str], w: tuple[Factor, str, str], result: str, dtype, like=None) -> jax.Array:
    """The sum of products of two factors, each with the letters of its dims in front and behind."""
    scales = None
    if isinstance(x[0], Scaled):
        scales = x[0].scale_inv, w[0].scale_inv
    else:
        w = (w[0].astype(x[0].dtype), *w[1:])
    (x, x_letters), (w, w_letters) = map(_term, (x, w))
    return sharding.einsum(f"{x_letters},{w_letters}->{result}", x, w, dtype, like=like, scales=scales)


def _term(term: tuple[Factor, str, str]) -> tuple[jax.Array, str]:
    factor, lead, trail = term
    if isinstance(factor, Scaled):
        return factor.codes, trail + lead if factor.transposed else lead + trail
    return factor, lead + trail


def _array(factor: Factor) -> jax.Array:
    return factor.codes if isinstance(factor, Scaled) else factor


def bias_cotangent(dy: jax.Array, bias: jax.Array) -> jax.Array:
    """dbias: dy summed over its leading dims in float32, in bias's dtype."""
    rows = " ".join(f"t{i}" for i in range(dy.ndim - bias.ndim))
    outer = " ".join(f"o{i}" for i in range(bias.ndim))
    axes = tuple(range(dy.ndim - bias.ndim))
    total = sharding.local("bias", f"{rows} {outer} -> {outer}", lambda dy: jnp.sum(wide(dy), axis=axes), dy)
    return sharding.cotangent(total, bias)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y + bias in float32, rounded to y's dtype."""
    if bias is None:
        return y
    rows = " ".join(f"t{i}" for i in range(y.ndim - bias.ndim))
    outer = " ".join(f"o{i}" for i in range(bias.ndim))
    rule = f"{rows} {outer}, {outer} -> {rows} {outer}"
    return sharding.local("bias", rule, lambda y, b: (wide(y) + wide(b)).astype(y.dtype), y, sharding.follow(bias, y))


def _letters(x: jax.Array, w: jax.Array, contract: int) -> tuple[str, str, str]:
    inner, outer = _LETTERS[:contract], _LETTERS[contract : w.ndim]
    return _LETTERS[w.ndim : w.ndim + x.ndim - contract], inner, outer


def to_halves(w: jax.Array | None, static: Static) -> jax.Array | None:
    """w [..., D] with its last `halves` dims reordered from pairs to halves.

    For XLA, which would reorder what the weight produces, T H P numbers, in a pass of its own, twice a training step.
    """
    return w if w is None or not static.halves else _reorder(w, static.halves, "pairs", "halves")


def from_halves(w: jax.Array, static: Static) -> jax.Array:
    return _reorder(w, static.halves, "halves", "pairs") if static.halves else w


def _reorder(w: jax.Array, rotary_dim: int, read: str, write: str) -> jax.Array:
    kept = w.shape[-1] - rotary_dim
    return jnp.concatenate([w[..., :kept], rope.join(*rope.split(w[..., kept:], read), write)], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static: Static, x, w, bias):
    return project(static, x, w, None, bias)[0]


def _linear_fwd(static: Static, x, w, bias):
    return project(static, x, w, None, bias, train=True)


def _linear_bwd(static: Static, saved: Residuals, dy):
    dx, dw, _, dbias = project_backward(static, saved, dy)
    return dx, dw, dbias


_linear.defvjp(_linear_fwd, _linear_bwd)
