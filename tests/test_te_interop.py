"""Tensors from and to Transformer Engine: the same bits, its padding, its axes, and what is refused.

Transformer Engine itself needs CUDA to import, so the classes below stand in for it: the fields, their order, the
checks of `__post_init__`, the factory's signature and the padded shapes of version 2.18 (tag v2.18, commit 27486e03,
transformer_engine/jax/quantize/tensor.py and scaling_modes.py) and, where a name ends in 24, of version 2.4 (tag v2.4),
which padded. The last test runs against Transformer Engine where there is one.
"""

import dataclasses
import enum
import math
import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mla import MXFP8Tensor, dequantize, quantize_mxfp8, te

E8M0, E4M3 = jnp.dtype(jnp.float8_e8m0fnu), jnp.dtype(jnp.float8_e4m3fn)


class ScalingMode(enum.Enum):
    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5


MXFP8 = ScalingMode.MXFP8_1D_SCALING


def scale_shape(shape, is_colwise, flatten_axis, is_padded):
    """BlockScalingModeMetadataImpl(block_dims=(1, 32)).get_scale_shape, restated."""
    blocks, tiles = ((32, 1), (4, 128)) if is_colwise else ((1, 32), (128, 4))
    result = ()
    for dims, block, tile in zip((shape[:flatten_axis], shape[flatten_axis:]), blocks, tiles, strict=True):
        assert dims and dims[-1] % block == 0
        inner = (*dims[1:-1], dims[-1] // block) if len(dims) > 1 else ()
        count = math.prod(dims) // block
        if is_padded:
            count = -(-count // tile) * tile
        assert count % math.prod(inner) == 0
        result += (count // math.prod(inner), *inner)
    return result


@dataclasses.dataclass
class ScaledTensor1x:
    data: jax.Array
    amax: jax.Array
    scale_inv: jax.Array
    scaling_mode: ScalingMode
    dq_dtype: jnp.dtype
    _dq_func: Callable
    is_colwise: bool
    data_layout: str
    flatten_axis: int
    has_rht_applied: bool

    def __post_init__(self):
        assert 0 < self.flatten_axis < len(self.data.shape)
        if self.scaling_mode is MXFP8:
            wanted = scale_shape(self.data.shape, self.is_colwise, self.flatten_axis, is_padded=False)
            assert self.scale_inv.shape == wanted


@dataclasses.dataclass
class ScaledTensor2x:
    rowwise_tensor: ScaledTensor1x
    colwise_tensor: ScaledTensor1x


@dataclasses.dataclass
class ScaledTensor1x24:
    data: jax.Array
    scale_inv: jax.Array
    scaling_mode: ScalingMode
    dq_dtype: jnp.dtype
    _dq_func: Callable
    is_colwise: bool
    data_layout: str
    flatten_axis: int = -1

    def __post_init__(self):
        self.flatten_axis %= len(self.data.shape)
        assert 0 < self.flatten_axis
        padded, unpadded = (
            scale_shape(self.data.shape, self.is_colwise, self.flatten_axis, is_padded) for is_padded in (True, False)
        )
        if self.scale_inv.shape != padded:
            assert self.scale_inv.shape == unpadded
            width = tuple((0, a - b) for a, b in zip(padded, unpadded, strict=True))
            self.scale_inv = jnp.pad(self.scale_inv, width, mode="constant", constant_values=0)


@dataclasses.dataclass
class NoScaleTensor:
    data: jax.Array
    amax: jax.Array


class GroupedScaledTensor1x(ScaledTensor1x):
    first_dims = last_dims = None
    original_shape = (2, 64, 96)
    pre_swizzled = False


class ScaledTensorFactory:
    @staticmethod
    def create_1x(
        data,
        scale_inv,
        amax=None,
        scaling_mode=ScalingMode.NO_SCALING,
        dq_dtype=jnp.bfloat16,
        is_colwise=False,
        data_layout="N",
        flatten_axis=-1,
        first_dims=None,
        last_dims=None,
        original_shape=None,
        has_rht_applied=False,
        pre_swizzled=False,
    ):
        amax = jnp.empty((1,), jnp.float32) if amax is None else amax
        flatten_axis = (data.ndim + flatten_axis) % data.ndim
        arguments = scaling_mode, dq_dtype, print, is_colwise, data_layout, flatten_axis, has_rht_applied
        return ScaledTensor1x(data, amax, scale_inv, *arguments)

    @staticmethod
    def create_2x(
        data,
        scale_inv,
        colwise_data,
        colwise_scale_inv,
        amax=None,
        colwise_amax=None,
        scaling_mode=ScalingMode.NO_SCALING,
        dq_dtype=jnp.bfloat16,
        data_layout="NN",
        flatten_axis=-1,
        first_dims=None,
        last_dims=None,
        original_shape=None,
        rowwise_has_rht_applied=False,
        colwise_has_rht_applied=False,
        pre_swizzled=False,
    ):
        def half(data, scale_inv, is_colwise):
            return ScaledTensorFactory.create_1x(
                data, scale_inv, None, scaling_mode, dq_dtype, is_colwise, data_layout[is_colwise], flatten_axis
            )

        return ScaledTensor2x(half(data, scale_inv, False), half(colwise_data, colwise_scale_inv, True))


class ScaledTensorFactory24:
    @staticmethod
    def create_1x(
        data, scale_inv, scaling_mode, dq_dtype=jnp.bfloat16, is_colwise=False, data_layout="N", flatten_axis=-1
    ):
        return ScaledTensor1x24(data, scale_inv, scaling_mode, dq_dtype, print, is_colwise, data_layout, flatten_axis)

    @staticmethod
    def create_2x(
        data,
        scale_inv,
        colwise_data,
        colwise_scale_inv,
        scaling_mode,
        dq_dtype=jnp.bfloat16,
        data_layout="NN",
        flatten_axis=-1,
    ):
        create, rest = ScaledTensorFactory24.create_1x, (scaling_mode, dq_dtype)
        return ScaledTensor2x(
            create(data, scale_inv, *rest, False, data_layout[0], flatten_axis),
            create(colwise_data, colwise_scale_inv, *rest, True, data_layout[1], flatten_axis),
        )


QUANTIZE = types.SimpleNamespace(ScalingMode=ScalingMode, ScaledTensorFactory=ScaledTensorFactory)
QUANTIZE24 = types.SimpleNamespace(ScalingMode=ScalingMode, ScaledTensorFactory=ScaledTensorFactory24)
VERSIONS = {"2.18": QUANTIZE, "2.4": QUANTIZE24}

# Shape, flatten_axis, then written out by hand: token_axis, row-wise and column-wise scales, the same padded.
CASES = {
    "[T, K]": ((64, 96), 1, -2, (64, 3), (2, 96), (128, 4), (4, 128)),
    "[B, T, K]": ((2, 64, 160), 2, -2, (2, 64, 5), (2, 2, 160), (2, 64, 8), (2, 2, 256)),
    "[R, H, D], rows R": ((96, 2, 64), 1, -3, (96, 2, 2), (3, 2, 64), (128, 2, 2), (4, 2, 64)),
    "[H, V, M], rows H V": ((3, 64, 32), 2, -2, (3, 64, 1), (3, 2, 32), (4, 64, 4), (4, 2, 128)),
    "[B, T, H, D], rows B T": ((1, 128, 3, 32), 2, -3, (1, 128, 3, 1), (1, 4, 3, 32), None, (1, 4, 4, 32)),
}
PADDED = [name for name, case in CASES.items() if None not in case]  # of the others 2.4 has no padded shape: it asserts


def bits(rng, shape, dtype):
    return jnp.asarray(rng.integers(0, 256, shape, np.uint8)).view(dtype)


def raw(array):
    return np.asarray(array).view(np.uint8)


def theirs(name, usage, dtype=jnp.bfloat16, quantize=QUANTIZE):
    """A tensor as Transformer Engine makes it, of every code and scale, NaN among them."""
    shape, flatten_axis, _, row, column, _, _ = CASES[name]
    rng = np.random.default_rng(0)
    rowwise = bits(rng, shape, E4M3), bits(rng, row, E8M0)
    columnwise = bits(rng, shape, E4M3), bits(rng, column, E8M0)
    more = {"scaling_mode": MXFP8, "dq_dtype": jnp.dtype(dtype), "flatten_axis": flatten_axis - len(shape)}
    if usage == "both":
        return quantize.ScaledTensorFactory.create_2x(*rowwise, *columnwise, **more)
    colwise = usage == "columnwise"
    return quantize.ScaledTensorFactory.create_1x(*(columnwise if colwise else rowwise), is_colwise=colwise, **more)


def halves(tensor):
    """The copies of a tensor of Transformer Engine's, by our names."""
    if isinstance(tensor, ScaledTensor2x):
        return {"rowwise": tensor.rowwise_tensor, "columnwise": tensor.colwise_tensor}
    return {"columnwise" if tensor.is_colwise else "rowwise": tensor}


USAGES = ["rowwise", "columnwise", "both"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", CASES)
def test_from_te_has_the_bits_and_the_axes(name, usage, dtype):
    shape, _, token_axis, row, column, _, _ = CASES[name]
    source = theirs(name, usage, dtype)
    t = MXFP8Tensor.from_te(source)
    assert t.shape == shape and t.token_axis == token_axis and t.dtype == dtype and t.proxy is None
    assert set(t.usages) == set(halves(source))
    for copy, half in halves(source).items():
        codes, scales = t.copy(copy)
        assert codes.dtype == E4M3 and scales.dtype == jnp.uint8
        assert scales.shape == {"rowwise": row, "columnwise": column}[copy]
        np.testing.assert_array_equal(raw(codes), raw(half.data))
        np.testing.assert_array_equal(raw(scales), raw(half.scale_inv))


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", CASES)
def test_the_values_are_theirs(name, usage):
    """Block by block, as BlockScaleDequantizer pairs codes and scales: its reshape to [..., blocks, 32, ...]."""
    source = theirs(name, usage, jnp.float32)
    shape, axis = source.data.shape, source.flatten_axis
    scales = raw(source.scale_inv)
    split = (
        *shape[: axis - 1],
        scales.shape[axis - 1],
        shape[axis - 1] // scales.shape[axis - 1],
        *shape[axis:-1],
        scales.shape[-1],
        shape[-1] // scales.shape[-1],
    )
    codes = np.asarray(source.data).astype(np.float64).reshape(split)
    spread = np.expand_dims(scales.astype(np.float64), (axis, -1))
    wanted = np.where(spread == 255, np.nan, codes * 2.0 ** (spread - 127)).reshape(shape)
    with np.errstate(over="ignore"):
        wanted = wanted.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(dequantize(MXFP8Tensor.from_te(source))), wanted)


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name, version", [(n, "2.18") for n in CASES] + [(n, "2.4") for n in PADDED])
def test_round_trip_of_ours(name, usage, version):
    shape, flatten_axis, token_axis, row, column, *padded = CASES[name]
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    t = quantize_mxfp8(x, usage=usage, token_axis=token_axis)
    made = t.to_te(VERSIONS[version])
    wanted = {"rowwise": row, "columnwise": column} if version == "2.18" else dict(zip(USAGES, padded, strict=False))
    for copy, half in halves(made).items():
        assert half.data.dtype == E4M3 and half.scale_inv.dtype == E8M0 and half.dq_dtype == jnp.dtype(jnp.bfloat16)
        assert half.scaling_mode is MXFP8 and half.data_layout == "N" and half.is_colwise == (copy == "columnwise")
        assert half.flatten_axis == flatten_axis and half.scale_inv.shape == wanted[copy]
        codes, scales = t.copy(copy)
        np.testing.assert_array_equal(raw(half.data), raw(codes))
        np.testing.assert_array_equal(raw(half.scale_inv)[tuple(map(slice, scales.shape))], raw(scales))
    assert_same(MXFP8Tensor.from_te(made), t)


def assert_same(found, wanted):
    assert found.usages == wanted.usages and found.dtype == wanted.dtype and found.token_axis == wanted.token_axis
    for usage in wanted.usages:
        for a, b in zip(found.copy(usage), wanted.copy(usage), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(raw(a), raw(b))


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", CASES)
def test_round_trip_of_theirs(name, usage):
    source = theirs(name, usage)
    made = MXFP8Tensor.from_te(source).to_te(QUANTIZE)
    assert type(made) is type(source)
    for copy, half in halves(source).items():
        for field in dataclasses.fields(ScaledTensor1x):
            a, b = getattr(halves(made)[copy], field.name), getattr(half, field.name)
            if field.name in ("data", "scale_inv"):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(raw(a), raw(b))
            elif field.name != "amax":  # MXFP8 has none: the factory's own, uninitialised
                assert a == b, field.name


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_cut_off(name, usage):
    """Filled with a mark where 2.4 has zeros: none of it may arrive."""
    source, wanted = theirs(name, usage, quantize=QUANTIZE24), MXFP8Tensor.from_te(theirs(name, usage))
    shapes = dict(zip(USAGES, CASES[name][5:], strict=False))
    for copy, half in halves(source).items():
        assert half.scale_inv.shape == shapes[copy]
        marked = np.full(half.scale_inv.shape, 77, np.uint8)
        kept = tuple(map(slice, wanted.copy(copy)[1].shape))
        marked[kept] = raw(half.scale_inv)[kept]
        half.scale_inv = jnp.asarray(marked).view(E8M0)
    assert_same(MXFP8Tensor.from_te(source), wanted)


def test_scales_as_bytes_and_numpy_arrays_are_taken():
    source = theirs("[B, T, K]", "both")
    wanted = MXFP8Tensor.from_te(source)
    for half in halves(source).values():
        half.data, half.scale_inv = np.asarray(half.data), raw(half.scale_inv)
    assert_same(MXFP8Tensor.from_te(source), wanted)


def test_codes_as_bytes_and_proxies_leave_no_trace():
    t = quantize_mxfp8(jax.random.normal(jax.random.key(0), (64, 96)), usage="both")
    assert t.proxy is not None
    assert_same(MXFP8Tensor.from_te(t.bytes().to_te(QUANTIZE)), t)


def test_under_jit():
    def there_and_back(x):
        return MXFP8Tensor.from_te(quantize_mxfp8(x, usage="both").to_te(QUANTIZE))

    x = jax.random.normal(jax.random.key(0), (2, 64, 96))
    assert_same(jax.jit(there_and_back)(x), there_and_back(x))


def test_shardings_are_kept():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((4, 64, 64), np.float32), NamedSharding(mesh, PartitionSpec("x", None, None)))
        t = MXFP8Tensor.from_te(quantize_mxfp8(x, usage="both").to_te(QUANTIZE))
        for usage in t.usages:
            for array in t.copy(usage):
                assert array.sharding.spec[0] == "x"


# --- Refusals -----------------------------------------------------------------------------------------------------


def changed(usage="rowwise", half=None, **fields):
    """A sound tensor with some fields set afterwards, of one half where there are two."""
    tensor = theirs("[B, T, K]", usage)
    for field, value in fields.items():
        setattr(tensor if half is None else getattr(tensor, half), field, value)
    return tensor


def zeros(shape, dtype):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    "fields, error, wanted",
    [
        (
            {"scaling_mode": ScalingMode.DELAYED_TENSOR_SCALING},
            ValueError,
            "tensor.scaling_mode: found DELAYED_TENSOR_SCALING, wanted MXFP8_1D_SCALING",
        ),
        (
            {"scaling_mode": ScalingMode.NVFP4_1D_SCALING},
            ValueError,
            "tensor.scaling_mode: found NVFP4_1D_SCALING, wanted MXFP8_1D_SCALING",
        ),
        (
            {"data": zeros((2, 64, 160), ml_dtypes.float8_e5m2)},
            TypeError,
            "tensor.data: found float8_e5m2[2, 64, 160], wanted float8_e4m3fn",
        ),
        (
            {"data": zeros((2, 64, 160), np.uint8)},
            TypeError,
            "tensor.data: found uint8[2, 64, 160], wanted float8_e4m3fn",
        ),
        ({"data": None}, TypeError, "tensor.data: found None, wanted float8_e4m3fn"),
        (
            {"scale_inv": zeros((2, 64, 5), np.float32)},
            TypeError,
            "tensor.scale_inv: found float32[2, 64, 5], wanted float8_e8m0fnu or uint8",
        ),
        (
            {"scale_inv": zeros((2, 64, 6), np.uint8)},
            ValueError,
            "tensor.scale_inv: found uint8[2, 64, 6], wanted shape [2, 64, 5] or, padded, [2, 64, 8]",
        ),
        (
            {"scale_inv": zeros((1024,), np.uint8)},  # as a grouped tensor's, or swizzled
            ValueError,
            "tensor.scale_inv: found uint8[1024], wanted shape [2, 64, 5] or, padded, [2, 64, 8]",
        ),
        (
            {"is_colwise": True},
            ValueError,
            "tensor.scale_inv: found float8_e8m0fnu[2, 64, 5], wanted shape [2, 2, 160] or, padded, [2, 2, 256]",
        ),
        (
            {"data": zeros((2, 64, 100), E4M3)},
            ValueError,
            "tensor.data: found axis -1 of size 100, wanted a multiple of 32 for rowwise blocks",
        ),
        ({"data_layout": "T"}, ValueError, "tensor.data_layout: found 'T', wanted 'N'"),
        (
            {"has_rht_applied": True},
            ValueError,
            "tensor.has_rht_applied: found True, wanted False: codes of the values themselves",
        ),
        ({"dq_dtype": jnp.float64}, TypeError, "tensor.dq_dtype: found dtype float64, wanted bfloat16, float16 or "),
        ({"flatten_axis": 0}, ValueError, "tensor.flatten_axis: found 0, wanted at least 1"),
        ({"flatten_axis": 3}, ValueError, "tensor.flatten_axis: found 3, wanted less than the 3 dims of data"),
        ({"flatten_axis": None}, TypeError, "tensor.flatten_axis: found None, wanted a Python int"),
    ],
)
def test_other_tensors_are_refused(fields, error, wanted):
    with pytest.raises(error) as raised:
        MXFP8Tensor.from_te(changed(**fields))
    assert str(raised.value).startswith(wanted)


@pytest.mark.parametrize(
    "half, fields, error, wanted",
    [
        ("rowwise_tensor", {"is_colwise": True}, ValueError, "is_colwise: found True, wanted False"),
        ("colwise_tensor", {"is_colwise": False}, ValueError, "is_colwise: found False, wanted True"),
        ("colwise_tensor", {"data_layout": "T"}, ValueError, "data_layout: found 'T', wanted 'N'"),
        (
            "colwise_tensor",
            {"dq_dtype": jnp.dtype(jnp.float32)},
            ValueError,
            "dq_dtype: found dtype('float32'), wanted the row-wise one's, dtype(bfloat16)",
        ),
        (
            "colwise_tensor",
            {"flatten_axis": 1, "scale_inv": zeros((1, 64, 160), np.uint8), "data": zeros((32, 64, 160), E4M3)},
            ValueError,
            "data: found float8_e4m3fn[32, 64, 160], wanted the row-wise one's, float8_e4m3fn[2, 64, 160]",
        ),
    ],
)
def test_halves_that_do_not_fit_are_refused(half, fields, error, wanted):
    with pytest.raises(error) as raised:
        MXFP8Tensor.from_te(changed("both", half, **fields))
    assert str(raised.value) == f"tensor.{half}.{wanted}"


def test_what_is_no_scaled_tensor_is_refused():
    wanted = "wanted a ScaledTensor1x or ScaledTensor2x of Transformer Engine"
    for value, found in (
        (NoScaleTensor(jnp.ones((2, 2)), None), "NoScaleTensor without scale_inv, scaling_mode, dq_dtype, "),
        (jnp.ones((2, 2)), "ArrayImpl without data, "),
        (None, "NoneType without data, "),
    ):
        with pytest.raises(TypeError) as raised:
            MXFP8Tensor.from_te(value)
        assert str(raised.value).startswith(f"tensor: found {found}") and str(raised.value).endswith(wanted)
    with pytest.raises(TypeError, match="tensor.colwise_tensor: found NoneType without data"):
        MXFP8Tensor.from_te(ScaledTensor2x(theirs("[T, K]", "rowwise"), None))
    one = theirs("[T, K]", "rowwise")
    grouped = GroupedScaledTensor1x(*(getattr(one, field.name) for field in dataclasses.fields(one)))
    with pytest.raises(TypeError, match="tensor: found GroupedScaledTensor1x, a grouped tensor, wanted a Scaled"):
        MXFP8Tensor.from_te(grouped)


def test_to_te_refuses_what_has_no_token_axis():
    t = quantize_mxfp8(jnp.ones(64))
    with pytest.raises(
        ValueError, match=r"tensor: found MXFP8Tensor\(float32\[64\].*, wanted at least 2 dims, for its token_axis"
    ):
        t.to_te(QUANTIZE)
    with pytest.raises(ValueError, match="at least 3 dims"):
        dataclasses.replace(quantize_mxfp8(jnp.ones((4, 64))), token_axis=-3).to_te(QUANTIZE)
    with pytest.raises(ValueError, match="tensor: found an MXFP8Tensor without codes"):
        MXFP8Tensor(None, None, None, None, jnp.float32, -2).to_te(QUANTIZE)
    with pytest.raises(TypeError, match="tensor: found 3, wanted an MXFP8Tensor"):
        te.to_te(3, QUANTIZE)


def test_without_transformer_engine_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    t = quantize_mxfp8(jnp.ones((32, 64)))
    with pytest.raises(ImportError, match="quantize: found no transformer_engine.jax.quantize .* pip install 'transf"):
        t.to_te()


def test_with_transformer_engine_itself():
    """Its classes check shapes as they are made; its own dequantisation of them is ours."""
    reason = "needs Transformer Engine for JAX, hence a GPU"
    quantize = pytest.importorskip("transformer_engine.jax.quantize", reason=reason)
    for shape, _, token_axis, *_ in CASES.values():
        for usage in USAGES:
            t = quantize_mxfp8(jax.random.normal(jax.random.key(0), shape), usage=usage, token_axis=token_axis)
            made = t.to_te()
            assert type(made) is (quantize.ScaledTensor2x if usage == "both" else quantize.ScaledTensor1x)
            np.testing.assert_array_equal(np.asarray(made.dequantize()), np.asarray(dequantize(t)))
            assert_same(MXFP8Tensor.from_te(made), t)
