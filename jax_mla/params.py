"""The parameters of a layer: names, shapes, logical axes, and the one initialiser."""

import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, fp8, fp8_block, mxfp8, operands, recipes
from jax_mla.coded import COPIES, Coded
from jax_mla.config import MLAConfig
from jax_mla.mxfp8_bits import BLOCK
from jax_mla.recipes import FP8BlockRecipe, FP8Recipe, Recipe


class Spec(NamedTuple):
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # MaxText's logical names, so that its rules apply
    contracted: int = 0  # how many leading dims a product sums over; 0 for what is not a matrix

    @property
    def token_axis(self) -> int:
        """Of the parameter as a quantised tensor."""
        return operands.weight_axis(len(self.shape), self.contracted)


def specs(config: MLAConfig) -> dict[str, Spec]:
    """Every parameter that `config` has, and none that it turns off."""
    if not isinstance(config, MLAConfig):
        raise TypeError(f"config: found {checks.show(config)}, wanted an MLAConfig")
    M, H, R, C = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    N, P, V, D = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.qk_head_dim
    biased = config.attention_bias
    result = {}
    if R is None:
        result["wq"] = Spec((M, H, D), ("embed", "q_heads", "kv"), 1)
    else:
        result["wq_a"] = Spec((M, R), ("embed", "q_lora_up_proj"), 1)
        if biased:
            result["wq_a_bias"] = Spec((R,), ("q_lora_up_proj",))
        result["q_norm"] = Spec((R,), ("norm",))
        result["wq_b"] = Spec((R, H, D), ("q_lora", "q_heads", "kv"), 1)
    result["wkv_a"] = Spec((M, C + P), ("embed", "kv_lora_up_proj"), 1)
    if biased:
        result["wkv_a_bias"] = Spec((C + P,), ("kv_lora_up_proj",))
    result["kv_norm"] = Spec((C,), ("norm",))
    result["wkv_b"] = Spec((C, H, N + V), ("kv_lora", "kv_heads", "kv_head_dim"), 1)
    result["wo"] = Spec((H, V, M), ("heads", "kv", "embed"), 2)
    if biased:
        result["wo_bias"] = Spec((M,), ("embed",))
    return result


def init(key: jax.Array, config: MLAConfig, param_dtype=jnp.float32) -> dict[str, jax.Array]:
    """The parameters of one layer, a flat dict: what the linen and nnx modules hold too.

      wq [M, H, D], or wq_a [M, R], q_norm [R], wq_b [R, H, D]; wkv_a [M, C + P], kv_norm [C], wkv_b [C, H, N + V],
      wo [H, V, M]; with attention_bias wq_a_bias [R], wkv_a_bias [C + P], wo_bias [M].

    Weights are normal with standard deviation (contracted size)^-0.5, drawn in float32; norms are 1, biases 0. A
    parameter's value depends on the key and its name alone. key: a JAX PRNG key. param_dtype: floating.
    Raises TypeError for another config or dtype.
    """
    param_dtype = checks.dtype("param_dtype", param_dtype)
    if not jnp.issubdtype(param_dtype, jnp.floating) or param_dtype.itemsize < 2:
        raise TypeError(f"param_dtype: found {param_dtype}, wanted bfloat16, float16, float32 or float64")
    return {name: draw(key, name, spec, param_dtype) for name, spec in specs(config).items()}


def draw(key: jax.Array, name: str, spec: Spec, param_dtype) -> jax.Array:
    """The initial value of one parameter; `key` is the layer's."""
    if name.endswith("_bias"):
        return jnp.zeros(spec.shape, param_dtype)
    if not spec.contracted:
        return jnp.ones(spec.shape, param_dtype)
    drawn = jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), spec.shape, jnp.float32)
    return (drawn * math.prod(spec.shape[: spec.contracted]) ** -0.5).astype(param_dtype)


def quantize_params(
    params: Mapping[str, jax.Array], config: MLAConfig, *, usage: str = "both", recipe: Recipe = "mxfp8"
) -> dict:
    """`params` with every weight as what `mla` multiplies under a recipe, an `MXFP8Tensor`, `FP8Tensor` or
    `FP8BlockTensor`: once a step, not once a use.

    The token axis of a weight is the last axis its product contracts: -3 for wq, wq_b, wkv_b, -2 for wq_a, wkv_a, wo.
    usage: "both" for training; "columnwise" is what the forward pass reads ("fp8_block" has one copy for all). Norms
    and biases stay as they are. Gradients pass through; `detach` the tensors for weights that get none. Raises as
    `quantize_mxfp8`, `quantize_fp8`, `quantize_fp8_block` and `mla`.
    """
    recipe = recipes.check(recipe)
    if recipe is None:
        raise checks.found("recipe", recipe, "one that quantises")
    check(params, config)
    usages = COPIES if usage == "both" else (usage,)

    def quantize(name, spec):
        given = params[name]
        if not spec.contracted:
            return given
        argument = f"params[{name!r}]"
        operands.check_usages(argument, given, recipe, spec.token_axis, *(usages if isinstance(given, Coded) else ()))
        if isinstance(given, Coded):
            return given
        how = dict(usage=usage, token_axis=spec.token_axis)
        if isinstance(recipe, FP8Recipe):
            return fp8.quantize_fp8(jnp.asarray(given), power_of_two=recipe.power_of_two, **how)
        if isinstance(recipe, FP8BlockRecipe):
            options = dict(block="128x128", power_of_two=recipe.power_of_two)
            return fp8_block.quantize_fp8_block(jnp.asarray(given), **options, **how)
        return mxfp8.quantize_mxfp8(jnp.asarray(given), **how)

    return {name: quantize(name, spec) for name, spec in specs(config).items()}


def logical_axes(config: MLAConfig) -> dict[str, tuple[str, ...]]:
    """MaxText's logical axis names of every parameter's dims."""
    return {name: spec.axes for name, spec in specs(config).items()}


def check(params: Mapping[str, jax.Array], config: MLAConfig, recipe: Recipe = None) -> None:
    """ValueError or TypeError naming every missing, unexpected or misshapen parameter; under a recipe also copies that
    the forward pass would miss, and dims without whole blocks of MXFP8."""
    wanted = specs(config)
    if not isinstance(params, Mapping):
        raise TypeError(f"params: found {type(params).__name__}, wanted a dict of arrays: {', '.join(wanted)}")
    if set(params) != set(wanted):
        missing, extra = sorted(set(wanted) - set(params)), sorted(map(str, set(params) - set(wanted)))
        raise ValueError(
            f"params: found {extra or 'nothing'} not in the config's, wanted {missing or 'nothing'} besides"
        )
    for name, spec in wanted.items():
        if isinstance(params[name], Coded) and spec.contracted:
            operands.check_tensor(f"params[{name!r}]", params[name], spec.token_axis)
            operands.check_usages(f"params[{name!r}]", params[name], recipe, spec.token_axis, "columnwise")
        elif not isinstance(params[name], jax.Array | np.ndarray):
            raise TypeError(f"params[{name!r}]: found {type(params[name]).__name__}, wanted an array (nnx: param[...])")
        if tuple(params[name].shape) != spec.shape:
            raise checks.found(f"params[{name!r}]", params[name], f"shape {list(spec.shape)}")
        if recipe == "mxfp8" and spec.contracted:
            for axis in (spec.token_axis, -1):
                if spec.shape[axis] % BLOCK:
                    wanted = f"axis {axis} a multiple of {BLOCK} (MXFP8 blocks): choose the config's dims so"
                    raise checks.found(f"params[{name!r}]", params[name], wanted)
        checks.floating(f"params[{name!r}]", params[name])
