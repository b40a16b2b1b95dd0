"""Our reference against NVIDIA's own for its fused kernel: `gemm_proj_rope_mxfp8_reference` of nvidia-cudnn-frontend.

Opt-in: `tests/run --nvidia` installs that package without its dependencies (CuTe DSL, which the kernel needs and the
reference does not). Hence the function is taken out of the installed source, with the constants it reads.
"""

import ast
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_mla import RopeConfig, YarnScaling, q_up_proj_rope, rope_tables

FILE = "cudnn/gemm/cutedsl/dense/proj_rope_mxfp8/gemm_proj_rope_mxfp8.py"
NAME = "gemm_proj_rope_mxfp8_reference"
TOKENS, RANK, HEADS, NOPE, ROPE = 96, 64, 3, 128, 64

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module")
def golden():
    try:
        package = importlib.metadata.distribution("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs nvidia-cudnn-frontend (`tests/run --nvidia`)")
    tree = ast.parse(package.locate_file(FILE).read_text())
    constants = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == NAME]
    namespace = {}
    exec(compile(ast.Module([*constants, function], []), FILE, "exec"), namespace)  # noqa: S102
    return namespace[NAME]


def near_a_tie(values, scales, axis):
    """Where float32 sums in another order may change a code: values within 1e-5 of where E4M3's nearest changes, and
    whole blocks whose amax is that close to where the scale does."""
    spread = np.repeat(scales.astype(int) - 127, 32, axis)
    scaled = np.abs(np.ldexp(values, -spread))
    nearest = np.take(reference.MIDDLES, np.searchsorted(reference.MIDDLES, scaled).clip(0, len(reference.MIDDLES) - 1))
    close = np.abs(scaled - nearest) < 1e-5 * np.maximum(scaled, 2.0**-6)
    blocks = np.moveaxis(scaled, axis, -1)
    amax = blocks.reshape(*blocks.shape[:-1], -1, 32).max(-1)
    edge = np.minimum(np.abs(amax - 448), np.abs(amax - 224)) < 1e-2
    return close | np.repeat(np.moveaxis(edge, -1, axis), 32, axis), np.moveaxis(edge, -1, axis)


@pytest.mark.parametrize("operands", ["bfloat16", "mxfp8"])
def test_codes_and_scales_are_nvidias(golden, operands):
    """bf16 operands; and MXFP8 ones, whose values NVIDIA's reference is given."""
    import torch

    rng = np.random.default_rng(0)
    rope = RopeConfig(theta=500.0, scaling=YarnScaling(40, 64, mscale=0.7, mscale_all_dim=1.1))
    cos, sin = (jnp.asarray(t, jnp.bfloat16) for t in rope_tables(jnp.arange(7, 7 + TOKENS), rope, ROPE))
    spread = lambda *s: rng.normal(size=s) * np.exp(rng.normal(size=(*s[:-1], 1)))  # noqa: E731
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (spread(TOKENS, RANK), spread(RANK, HEADS, NOPE + ROPE)))
    recipe = None if operands == "bfloat16" else "mxfp8"

    def ours(x, w):
        t = q_up_proj_rope(x, w, cos, sin, nope_dim=NOPE, recipe=recipe, out="mxfp8")
        wide = q_up_proj_rope(x.astype(jnp.float32), w, cos, sin, nope_dim=NOPE, recipe=recipe)
        return t.detach(), wide

    t, wide = jax.jit(ours)(x, w)
    if recipe is not None:
        x, w = (jnp.asarray(reference.mxfp8_values(a, axis), jnp.bfloat16) for a, axis in ((x, 1), (w, 0)))
    to_torch = lambda a: torch.from_numpy(np.asarray(a, np.float32))  # noqa: E731
    whole = [torch.cat([to_torch(a)] * 2, -1) for a in (cos, sin)]  # its tables repeat for both halves
    codes_row, scales_row, codes_col, scales_col = golden(to_torch(x), to_torch(w.reshape(RANK, -1)), *whole)
    for usage, axis, codes, scales in (
        ("rowwise", -1, codes_row, scales_row),
        ("columnwise", 0, codes_col, scales_col),
    ):
        found_codes, found_scales = (np.asarray(a) for a in t.copy(usage))
        tied, edges = near_a_tie(np.asarray(wide, np.float64), found_scales, axis)
        assert tied.mean() < 5e-3
        assert np.array_equal(found_scales[~edges], scales.numpy()[~edges])
        assert np.array_equal(found_codes.view(np.uint8)[~tied], codes.view(torch.uint8).numpy()[~tied])
