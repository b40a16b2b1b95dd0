"""Our reference against NVIDIA's own for its fused kernel: `gemm_proj_rope_mxfp8_reference` of nvidia-cudnn-frontend,
given what `implementation="cudnn"` gives the kernel.

Opt-in: `tests/run --nvidia` installs that package without its dependencies (CuTe DSL, which the kernel needs and the
reference does not). Hence the function is taken out of the installed source, with the constants it reads.
`.ci/blackwell` runs this too.
"""

import ast
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax_mla.ffi import cudnn

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


def arguments():
    rng = np.random.default_rng(0)
    rope = RopeConfig(theta=500.0, scaling=YarnScaling(40, 64, mscale=0.7, mscale_all_dim=1.1))
    tables = (jnp.asarray(t, jnp.bfloat16) for t in rope_tables(jnp.arange(7, 7 + TOKENS), rope, ROPE))
    spread = lambda *s: rng.normal(size=s) * np.exp(rng.normal(size=(*s[:-1], 1)))  # noqa: E731
    return *(jnp.asarray(a, jnp.bfloat16) for a in (spread(TOKENS, RANK), spread(RANK, HEADS, NOPE + ROPE))), *tables


def to_torch(a):
    import torch

    return torch.from_numpy(np.array(a, np.float32))


@pytest.mark.parametrize("operands, layout", [("bfloat16", "pairs"), ("bfloat16", "halves"), ("mxfp8", "pairs")])
def test_codes_and_scales_are_nvidias(golden, operands, layout):
    """bf16 operands; and MXFP8 ones, whose values NVIDIA's reference is given."""
    import torch

    x, w, cos, sin = arguments()
    recipe = None if operands == "bfloat16" else "mxfp8"
    up = dict(nope_dim=NOPE, recipe=recipe, input_layout=layout)

    def ours(x, w):
        wide = q_up_proj_rope(x.astype(jnp.float32), w, cos, sin, **up)
        return q_up_proj_rope(x, w, cos, sin, out="mxfp8", **up).detach(), wide

    t, wide = jax.jit(ours)(x, w)
    if recipe is not None:
        x, w = (jnp.asarray(reference.mxfp8_values(a, axis), jnp.bfloat16) for a, axis in ((x, 1), (w, 0)))
    given = map(to_torch, cudnn.inputs(layout == "pairs", x, w, cos, sin))
    codes_row, scales_row, codes_col, scales_col = golden(*given, w_out_in=True)
    for usage, axis, codes, scales in (
        ("rowwise", -1, codes_row, scales_row),
        ("columnwise", 0, codes_col, scales_col),
    ):
        found_codes, found_scales = (np.asarray(a) for a in t.copy(usage))
        tied, edges = near_a_tie(np.asarray(wide, np.float64), found_scales, axis)
        assert tied.mean() < 5e-3
        assert np.array_equal(found_scales[~edges], scales.numpy()[~edges])
        assert np.array_equal(found_codes.view(np.uint8)[~tied], codes.view(torch.uint8).numpy()[~tied])


def test_what_the_kernel_rounds_and_its_reference_does_not(golden):
    """It hands its accumulator to RoPE in bfloat16. That moves one code in 30, nearly always by one step (by more where
    RoPE cancels), and now and then a scale. The values' error grows by less than 1 %."""
    import torch

    x, w, cos, sin = map(to_torch, cudnn.inputs(True, *arguments()))
    q = x @ w.T
    exact, rounded = (golden(a, torch.eye(a.shape[1]), cos, sin) for a in (q, q.bfloat16().float()))
    wanted = reference.apply_rope(q.reshape(TOKENS, HEADS, -1).numpy(), cos[:, : ROPE // 2], sin[:, : ROPE // 2], ROPE)
    for copy, axis in ((0, -1), (2, 0)):
        pairs = [[a.view(torch.uint8).numpy() for a in t[copy : copy + 2]] for t in (exact, rounded)]
        (codes, scales), (others, moved) = pairs
        signed, changed = (np.where(c > 127, 128 - c.astype(int), c) for c in (codes, others))
        steps = np.abs(signed - changed)[np.repeat(scales == moved, 32, axis)]
        assert 0.02 < np.mean(steps > 0) < 0.04 and np.mean(steps > 1) < 0.001
        assert 0 < np.mean(scales != moved) < 0.005
        errors = [np.linalg.norm(reference.decode(*pair, axis) - wanted) for pair in pairs]
        assert errors[1] < 1.01 * errors[0]
