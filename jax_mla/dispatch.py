"""Which implementation of an op runs: small explicit tables, one an op, in the op's own file.

`implementation=None` takes the first of the op's table that can run; a name must run or raise with the reason; a
sequence of names is tried in order. The choice is made at trace time.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import launches, recipes

# Every name an op may have an implementation under; what this version lacks says so.
NAMES = {
    "xla": "pure jnp, on every platform",
    "triton": "Triton kernels for NVIDIA GPUs",
    "mosaic": "Pallas Mosaic GPU kernels for Hopper",
    "cudnn": "NVIDIA's fused kernels",
}

# The files that hold a table, by op.
_OPS = {
    "apply_rope": "jax_mla.rope",
    "apply_rope_kv": "jax_mla.rope_kv",
    "rms_norm": "jax_mla.norm",
    "q_up_proj_rope": "jax_mla.q_up",
    "kv_up_proj_rope": "jax_mla.kv_up",
    "attention": "jax_mla.attention",
    "quantize_mxfp8": "jax_mla.mxfp8",
    "quantize_fp8": "jax_mla.fp8",
    "dequantize": "jax_mla.dequantize",
    "rms_norm_quantize": "jax_mla.norm_quantize",
    "swizzle_scales": "jax_mla.swizzle",
    "quantize_swizzled": "jax_mla.quantize_swizzled",
}

Choice = str | Sequence[str] | None


def anywhere(*args: Any, **kwargs: Any) -> None:
    """`supports` of an implementation without limits."""
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """forward and backward take the op's static settings and arrays. supports takes the same and returns None, or why
    it cannot run them; with no arguments it answers for this machine. opaque: XLA cannot look into what it launches."""

    forward: Callable
    backward: Callable
    supports: Callable[..., str | None] = anywhere
    opaque: bool = False


def composed(forward: Callable, backward: Callable, norm_row: Callable) -> dict[str, Implementation]:
    """The table, of "triton" and "xla", of an op that is made of other ops: forward and backward take the name, and use
    it for every part. norm_row: of the static settings and arrays, how long the rows are that are normalised."""

    def supports(static=None, *args):
        if static is None:
            return launches.supports()
        # Neither codes nor their proxies' kin: what is no float is not computed with.
        floats = [a for a in jax.tree.leaves(args) if jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize > 1]
        return launches.supports(*floats) or launches.supports_row(norm_row(static, *args))

    return {
        "triton": Implementation(functools.partial(forward, "triton"), functools.partial(backward, "triton"), supports),
        "xla": Implementation(functools.partial(forward, "xla"), functools.partial(backward, "xla")),
    }


def fused(forward: Callable, misfit: Callable, unavailable: Callable, parts: Mapping[str, Implementation]):
    """The implementation of an op whose forward pass is a kernel with some of `parts`, a table of `composed`'s, around
    it: forward takes the name of the best that can run, which gives the backward pass as well. misfit: why the kernel
    could run the arguments on no machine, or None; unavailable: why not on this one."""

    def best(*args) -> str:
        return next(name for name, part in parts.items() if part.supports(*args) is None)

    def supports(static=None, *args):
        if static is None or len(args) == 1:  # this machine; the backward pass, which has other kernels
            return unavailable()
        if static.project.recipe not in (None, "mxfp8"):
            return f"found recipe {recipes.name(static.project.recipe)!r}, wants None or 'mxfp8'"
        return misfit(static, *args) or unavailable()

    return Implementation(
        lambda static, train, *args: forward(best(static, *args), static, train, *args),
        lambda static, saved, *args: parts[best(static, saved)].backward(static, saved, *args),
        supports,
    )


def check(choice: Choice) -> Choice:
    """The choice in hashable form. TypeError or ValueError for what is not a name or a sequence of names."""
    if choice is None or isinstance(choice, str):
        names = () if choice is None else (choice,)
    elif isinstance(choice, Sequence) and choice and all(isinstance(name, str) for name in choice):
        names = choice = tuple(choice)
    else:
        raise TypeError(f"implementation: found {choice!r}, wanted None, a name or a sequence of names")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"implementation: found {name!r}, wanted one of {', '.join(map(repr, NAMES))}")
    return choice


def _reason(table: Mapping[str, Implementation], name: str, *args: Any) -> str | None:
    """Why the named implementation cannot run, or None."""
    return table[name].supports(*args) if name in table else f"this version has no {name} implementation of it"


def choose(op: str, table: Mapping[str, Implementation], choice: Choice, *args: Any) -> Implementation:
    """The implementation that `choice` means for these arguments.

    Raises NotImplementedError with every reason if there is none.
    """
    names = table if choice is None else (choice,) if isinstance(choice, str) else choice
    reasons = []
    for name in names:
        reason = _reason(table, name, *args)
        if reason is None:
            return table[name]
        reasons.append(f"{name!r}: {reason}")
    raise NotImplementedError(f"{op}: found no implementation that can run; " + "; ".join(reasons))


def implementations() -> dict[str, dict[str, str]]:
    """What can run on this machine, by op and implementation: "" where it can, else the reason why not.

    Shapes and dtypes may still rule an implementation out; the op then says so.
    """
    report = {}
    for op, module in _OPS.items():
        table = importlib.import_module(module).IMPLEMENTATIONS
        report[op] = {
            name: (table[name].supports() or "")
            if name in table
            else f"this version has no {name} implementation of it"
            for name in NAMES
        }
    return report
