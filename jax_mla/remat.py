"""What a layer keeps for its backward pass, by name."""

from collections.abc import Callable

import jax

from jax_mla import checks

_LATENTS = ("mla_x", "query_wa_proj", "kv_wa_proj", "attention_out", "attention_lse")

# Each policy keeps the values of these checkpoint names, and every policy the parameters and the layer's input: in its
# place those that have "mla_x" keep a recipe's codes of it.
POLICIES = {
    # The latents and attention's output: the backward pass runs the up-projections again, but not attention.
    "latents": _LATENTS,
    # q, k and v as well: the backward pass recomputes nothing but norms.
    "qkv": (*_LATENTS, "query_proj", "key_proj", "value_proj"),
    # Nothing: the backward pass runs the layer again.
    "nothing": (),
}
CHOICES = (None, "everything", *POLICIES)


def check(remat: str | None) -> None:
    checks.choice("remat", remat, CHOICES)


def apply(function: Callable, remat: str | None) -> Callable:
    """`function` under the named policy; None and "everything" let JAX keep every residual of its rules."""
    check(remat)
    if remat in (None, "everything"):
        return function
    return jax.checkpoint(function, policy=policy(remat))


def policy(remat: str) -> Callable:
    """The named policy for `jax.checkpoint` or Flax's `remat`, to be put round more than the layer."""
    if remat == "everything":
        return jax.checkpoint_policies.everything_saveable
    checks.choice("remat", remat, tuple(POLICIES))
    return jax.checkpoint_policies.save_only_these_names(*POLICIES[remat])
