"""What the recipes are, and how they are named."""

import dataclasses

from jax_mla import checks, fp8_bits


@dataclasses.dataclass(frozen=True)
class FP8Recipe:
    """The recipe "fp8" with its options: Transformer Engine's Float8CurrentScaling.

    grad_format: what cotangents are quantised to, "e5m2" (Transformer Engine's Format.HYBRID) or "e4m3" (Format.E4M3);
    all else is E4M3. power_of_two: scales rounded down to powers of two. quantize_attention: q, k, v and attention's
    output are quantised too, so that what `mla` keeps of them for the backward pass are codes: half the bytes. What
    attention multiplies are then their values, in x's dtype.
    """

    grad_format: str = "e5m2"
    power_of_two: bool = False
    quantize_attention: bool = False

    def __post_init__(self):
        checks.choice("grad_format", self.grad_format, tuple(fp8_bits.CODES))
        for name in ("power_of_two", "quantize_attention"):
            object.__setattr__(self, name, checks.static_bool(name, getattr(self, name)))


@dataclasses.dataclass(frozen=True)
class FP8BlockRecipe:
    """The recipe "fp8_block" with its option: DeepSeek-V3's (arXiv:2412.19437, section 3.3), of which Transformer
    Engine's Float8BlockScaling is the kin.

    E4M3 throughout, a float32 scale for every 1 x 128 of activations and cotangents and every 128 x 128 of weights.
    power_of_two: scales rounded up to powers of two, as Transformer Engine's are by default.
    """

    power_of_two: bool = False

    def __post_init__(self):
        object.__setattr__(self, "power_of_two", checks.static_bool("power_of_two", self.power_of_two))


Recipe = str | FP8Recipe | FP8BlockRecipe | None
NAMES = (None, "mxfp8", "fp8", "fp8_block")
_OF_NAMES = {"fp8": FP8Recipe(), "fp8_block": FP8BlockRecipe()}


def check(recipe: Recipe) -> Recipe:
    """The recipe as the ops know it: None, "mxfp8", an `FP8Recipe` or an `FP8BlockRecipe`."""
    if isinstance(recipe, FP8Recipe | FP8BlockRecipe):
        return recipe
    checks.choice("recipe", recipe, NAMES)
    return _OF_NAMES.get(recipe, recipe)


def name(recipe: Recipe) -> str | None:
    """Of a recipe as `check` returns it."""
    return next((name for name, kind in _OF_NAMES.items() if isinstance(recipe, type(kind))), recipe)
