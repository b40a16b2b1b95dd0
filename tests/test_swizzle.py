"""swizzle_scales: the 128x4 tiling by its offset formula, its inverse, padding, head-major tiling, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_same

from jax_mla import MXFP8Tensor, dequantize, quantize_mxfp8, quantize_swizzled
from jax_mla.swizzle import swizzle_scales, unswizzle_scales


def offset(r, c, columns):
    """The byte of scale (r, c), as case 16 and cuBLAS state it."""
    padded = -(-columns // 4) * 4
    return ((r // 128) * (padded // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


def numbers(*shape):
    """uint8, never 0."""
    return (np.arange(np.prod(shape)) % 255 + 1).astype(np.uint8).reshape(shape)


def matrix_oracle(scales):
    rows, columns = scales.shape
    buffer = np.zeros(-(-rows // 128) * 128 * -(-columns // 4) * 4, np.uint8)
    r, c = np.indices(scales.shape)
    buffer[offset(r, c, columns)] = scales
    return buffer


def test_the_numbers_of_case_16():
    r, c = np.indices((129, 5))
    scales = ((r * 5 + c) % 255 + 1).astype(np.uint8)
    buffer = np.asarray(swizzle_scales(jnp.asarray(scales)))
    assert buffer.dtype == np.uint8 and buffer.shape == (2048,)
    places = {(0, 0): 0, (32, 0): 4, (1, 0): 16, (0, 4): 512, (128, 0): 1024, (128, 4): 1536}
    for (row, column), place in places.items():
        assert offset(row, column, 5) == place and buffer[place] == scales[row, column]
    assert np.sum(buffer == 0) == 1403
    assert np.array_equal(buffer, matrix_oracle(scales))
    assert_same(unswizzle_scales(jnp.asarray(buffer), (129, 5)), scales)
    assert not np.array_equal(np.asarray(swizzle_scales(jnp.asarray(np.roll(scales, 1)))), buffer)


def test_poisoned_padding_reaches_nothing():
    """Case 16: a GEMM of M = 129, N = K = 160 with 0xFF (NaN) in all padding; batch entries are padded apart."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(rows, 160)), jnp.float32) for rows in (129, 160))

    def through(x, poison):
        t = quantize_mxfp8(x)
        buffer = swizzle_scales(t)
        padding = swizzle_scales(jnp.ones_like(t.rowwise_scales)) == 0
        buffer = jnp.where(padding & poison, 255, buffer).astype(jnp.uint8)
        scales = unswizzle_scales(buffer, t.rowwise_scales.shape)
        return dequantize(MXFP8Tensor(t.rowwise_codes, scales, None, None, t.dtype, t.token_axis)), padding.sum()

    gemm = jax.jit(lambda a, b, poison: (through(a, poison)[0] @ through(b, poison)[0].T, through(a, poison)[1]))
    clean, padding = gemm(a, b, False)
    poisoned, _ = gemm(a, b, True)
    assert padding == 1403 and np.isfinite(clean).all()
    assert_same(poisoned, clean)
    batch = numbers(2, 40, 5)
    buffer = swizzle_scales(jnp.asarray(batch))
    assert buffer.shape == (2, 1024)
    assert_same(buffer, np.stack([matrix_oracle(m) for m in batch]))


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("token_axis,shape", [(-2, (2, 130, 6)), (-2, (1, 1)), (-3, (2, 36, 3, 5)), (-4, (8, 2, 3, 5))])
def test_every_layout_and_its_inverse(token_axis, shape, usage):
    """Head-major: [B, T, H, D/32] is one [T, D/32] matrix a batch entry and head; column-wise tiles the transpose."""
    scales = numbers(*shape)
    matrices = np.moveaxis(scales, token_axis, -2)
    matrices = matrices if usage == "rowwise" else matrices.swapaxes(-1, -2)
    lead = matrices.shape[:-2]
    wanted = np.stack([matrix_oracle(m) for m in matrices.reshape(-1, *matrices.shape[-2:])]).reshape(*lead, -1)
    options = dict(usage=usage, token_axis=token_axis)
    found = jax.jit(lambda s: swizzle_scales(s, **options))(scales)
    assert_same(found, wanted)
    assert_same(jax.jit(lambda b: unswizzle_scales(b, shape, **options))(found), scales)


def test_a_tensor_brings_its_scales_and_token_axis():
    """Quantise now and swizzle later is the same as both in one program; so is each usage."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64, 3, 96)) * 9, jnp.bfloat16)

    @jax.jit
    def at_once(x):
        t = quantize_mxfp8(x, usage="both", token_axis=-3)
        return t.detach(), swizzle_scales(t), swizzle_scales(t, usage="columnwise")

    t, rows, columns = at_once(x)
    assert rows.shape == (2, 3, 512) and columns.shape == (2, 3, 512)
    assert_same(rows, swizzle_scales(t.rowwise_scales, token_axis=-3))
    assert_same(columns, swizzle_scales(t.columnwise_scales, usage="columnwise", token_axis=-3))
    assert_same(rows[1, 2], matrix_oracle(np.asarray(t.rowwise_scales)[1, :, 2]))
    assert_same(columns[1, 2], matrix_oracle(np.asarray(t.columnwise_scales)[1, :, 2].T))


def test_vmap_is_a_leading_dim():
    scales = jnp.asarray(numbers(3, 2, 33, 4))
    swizzle = jax.vmap(lambda s: swizzle_scales(s, usage="columnwise"))
    assert_same(swizzle(scales), swizzle_scales(scales, usage="columnwise"))


@pytest.mark.parametrize("shape,size", [((0, 5, 4), (0, 512)), ((2, 0, 4), (2, 0)), ((0, 4), (0,))])
def test_empty(shape, size):
    buffer = swizzle_scales(jnp.zeros(shape, jnp.uint8))
    assert buffer.shape == size and unswizzle_scales(buffer, shape).shape == shape


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_sharded_batch_and_heads(kind):
    scales = jnp.asarray(numbers(2, 32, 4, 6))
    wanted = swizzle_scales(scales, token_axis=-3)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(scales, NamedSharding(mesh, P("data", None, "model")))
        run = jax.jit(lambda s: (b := swizzle_scales(s, token_axis=-3), unswizzle_scales(b, s.shape, token_axis=-3)))
        compiled = run.lower(placed).compile()
        buffer, back = compiled(placed)
        assert_same((buffer, back), (wanted, scales))
        assert buffer.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 3)
        assert "all-" not in compiled.as_text()
        if kind == "Explicit":
            with pytest.raises(
                ValueError, match=r"swizzle_scales: found dim 2 \(T\) of input 0.*mesh axes \('model',\)"
            ):
                swizzle_scales(placed)


U = jnp.ones((32, 4), jnp.uint8)
T = quantize_mxfp8(jnp.ones((32, 64)))
REFUSED = {
    "dtype": (lambda: swizzle_scales(U.astype(jnp.int32)), "scales: found dtype int32, wanted uint8"),
    "one dim": (lambda: swizzle_scales(U[0]), "scales: found .* wanted at least 2 dims"),
    "usage": (lambda: swizzle_scales(U, usage="both"), "usage: found 'both', wanted one of 'rowwise', 'columnwise'"),
    "missing": (lambda: swizzle_scales(T, usage="columnwise"), "scales: found .* with a columnwise copy"),
    "another axis": (lambda: swizzle_scales(T, token_axis=-3), "token_axis: found -3, wanted None or the tensor's own"),
    "positive axis": (lambda: swizzle_scales(U, token_axis=0), "token_axis: found 0, wanted -2 or less"),
    "a list": (lambda: swizzle_scales([1]), "scales: found list"),
    "no kernel": (lambda: swizzle_scales(U, implementation="triton"), "swizzle_scales: found no implementation"),
    "buffer": (lambda: unswizzle_scales(U, (32, 4)), r"buffer: found .* wanted uint8\[512\] for scales \[32, 4\]"),
    "buffer's dtype": (lambda: unswizzle_scales(jnp.ones(512), (32, 4)), r"buffer: found float32\[512\]"),
    "shape": (lambda: unswizzle_scales(jnp.ones(512, jnp.uint8), (32,)), "shape: found .* wanted at least 2 dims"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_named(case):
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()


@pytest.mark.parametrize("usage", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("shape,token_axis", [((64, 96), -2), ((2, 32, 3, 64), -3), ((2, 3, 160, 32), -2)])
def test_quantize_swizzled_is_quantize_then_swizzle(shape, token_axis, usage):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    options = dict(usage=usage, token_axis=token_axis, rounding="ocp")
    t = quantize_mxfp8(x, **options)
    wanted = []
    for copy in t.usages:
        wanted += [t.copy(copy)[0], swizzle_scales(t, usage=copy)]
    assert_same(jax.jit(lambda x: quantize_swizzled(x, **options))(x), tuple(wanted))


def test_quantize_swizzled_refuses():
    x = jnp.zeros((64, 48))
    with pytest.raises(ValueError, match=r"x: found axis -1 of size 48"):
        quantize_swizzled(x)
    with pytest.raises(ValueError, match="usage: found 'rows'"):
        quantize_swizzled(x, usage="rows")
    with pytest.raises(NotImplementedError, match="quantize_swizzled: .*'mosaic'"):
        quantize_swizzled(x[:, :32], implementation="mosaic")
    with pytest.raises(NotImplementedError, match="second derivative|quantize_swizzled"):
        jax.grad(lambda x: quantize_swizzled(x)[0].astype(jnp.float32).sum())(x[:, :32])
