"""What the recipes are, and how they are named."""

import dataclasses

from jax_mla import checks, fp8_bits


@dataclasses.dataclass(frozen=True)
class FP8Recipe:
    """The recipe "fp8" with its options: Transformer Engine's Float8CurrentScaling.

    grad_format: what cotangents are quantised to, "e5m2" (Transformer Engine's Format.HYBRID) or "e4m3" (Format.E4M3);
    all else is E4M3. power_of_two: scales rounded down to powers of two.
    """

    grad_format: str = "e5m2"
    power_of_two: bool = False

    def __post_init__(self):
        checks.choice("grad_format", self.grad_format, tuple(fp8_bits.CODES))
        object.__setattr__(self, "power_of_two", checks.static_bool("power_of_two", self.power_of_two))


Recipe = str | FP8Recipe | None
NAMES = (None, "mxfp8", "fp8")


def check(recipe: Recipe) -> Recipe:
    """The recipe as the ops know it: None, "mxfp8" or an `FP8Recipe`."""
    if isinstance(recipe, FP8Recipe):
        return recipe
    checks.choice("recipe", recipe, NAMES)
    return FP8Recipe() if recipe == "fp8" else recipe
