"""How a result is judged: relative to the largest entry of what was wanted, by one table of tolerances."""

import jax
import jax.numpy as jnp
import numpy as np
import reference

# Largest error over the largest wanted entry. bfloat16: three of its rounding steps (2^-8 each).
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 1.2e-2, "float16": 1.5e-3}


def error(found, wanted) -> float:
    found, wanted = reference.f64(found), reference.f64(wanted)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if wanted.size == 0:
        return 0.0
    infinite = np.isinf(wanted)
    assert np.array_equal(found[infinite], wanted[infinite]), "infinities differ"
    gap = np.abs(np.where(infinite, 0.0, found) - np.where(infinite, 0.0, wanted))
    return float(gap.max() / max(np.abs(np.where(infinite, 0.0, wanted)).max(), 1e-30))


def assert_close(found, wanted, tolerance=None, what=""):
    """tolerance: by default of found's dtype; pytrees are compared leaf by leaf."""
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for number, (f, w) in enumerate(zip(found, wanted, strict=True)):
        limit = TOLERANCE[str(f.dtype)] if tolerance is None else tolerance
        gap = error(f, w)
        assert gap <= limit, f"{what} result {number}: error {gap:.2e}, allowed {limit:.2e}"


def assert_same(found, wanted):
    """Bit for bit, dtype and shape included (NaN equals NaN)."""
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for f, w in zip(found, wanted, strict=True):
        assert f.dtype == w.dtype and f.shape == w.shape, (f, w)
        assert np.array_equal(
            np.atleast_1d(np.asarray(f)).view(np.uint8), np.atleast_1d(np.asarray(w)).view(np.uint8)
        ), "bits differ"


def draw(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def check(op, model, args, rng, tolerance=None, gradient_tolerance=2e-5):
    """op's outputs and its vjp against the model's, in one jit; the vjp in a random direction of every argument.

    `model` is the fp64 numpy reference of `op`; both may return tuples. Cotangents are random. The model's directional
    derivatives are central differences in float64, good to about 1e-9.
    """
    shapes = jax.eval_shape(op, *args)
    cotangents = jax.tree.map(lambda o: draw(rng, *o.shape, dtype=o.dtype), shapes)

    @jax.jit
    def run(args, cotangents):
        outputs, pullback = jax.vjp(op, *args)
        return outputs, pullback(cotangents)

    outputs, gradients = run(tuple(args), cotangents)
    assert_close(outputs, model(*args), tolerance)
    for gradient, arg in zip(gradients, args, strict=True):
        assert gradient.dtype == arg.dtype and gradient.shape == arg.shape

    def scalar(*arrays):
        found = jax.tree.leaves(model(*arrays))
        pairs = zip(found, jax.tree.leaves(cotangents), strict=True)
        return sum(np.sum(np.where(np.isfinite(f), f, 0.0) * reference.f64(c)) for f, c in pairs)

    directions = reference.one_at_a_time(rng, args)
    wanted = reference.numeric_grad(scalar, args, directions)
    for number, (gradient, direction, w) in enumerate(zip(gradients, directions, wanted, strict=True)):
        g, d = reference.f64(gradient), reference.f64(direction[number])
        size = np.linalg.norm(g) * np.linalg.norm(d) / np.sqrt(max(g.size, 1)) + 1e-30
        gap = abs(np.sum(g * d) - w) / size
        assert gap < gradient_tolerance, f"argument {number}: {np.sum(g * d)} against {w}, error {gap:.2e}"
    return outputs
