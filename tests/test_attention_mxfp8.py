"""attention of MXFP8 tensors by NVIDIA's kernel for Blackwell, without that kernel: what is refused, reason by reason;
what it is handed and what becomes of its results, with its part played in jnp. `.ci/blackwell` compiles the kernel.
"""

import dataclasses
import functools
import importlib
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_mla.ffi import cudnn, cudnn_attention, cudnn_attention_mxfp8
from judge import assert_close, error
from test_attention_cudnn import played_backward

from jax_mla import attention, attention_cudnn, attention_mxfp8, compile_for, quantize_mxfp8, swizzle_scales

BF16, F32 = jnp.bfloat16, jnp.float32
COPIES = ("rowwise", "rowwise", "columnwise")
FITS = dict(rows=2, queries=256, keys=384, heads=8, qk=192, v=128, scale=0.1)


def test_what_it_takes():
    for changes in ({}, dict(queries=128, keys=128, rows=1, heads=1), dict(queries=2**17, heads=128, rows=64)):
        assert cudnn_attention_mxfp8.supports(**FITS | changes) is None


REFUSED = {
    "keys of 128": (dict(qk=128), "found heads of 128 and 128 dims, wants 192 and 128"),
    "values of 192": (dict(v=192), "found heads of 192 and 192 dims, wants 192 and 128"),
    "half a tile of queries": (dict(queries=192), "found 192 queries, wants a multiple of 128"),
    "half a tile of keys": (dict(keys=320), "found 320 keys, wants a multiple of 128"),
    "no queries": (dict(queries=0), "found 0 queries"),
    "no keys": (dict(keys=0), "found 0 keys"),
    "no rows": (dict(rows=0), "found 0 rows, wants 1 to 65535"),
    "rows": (dict(rows=2**16, heads=1, queries=128), "found 65536 rows, wants 1 to 65535"),
    "no heads": (dict(heads=0), "found 0 heads"),
    "heads": (dict(heads=2**16, rows=1, queries=128), "found 65536 heads"),
    "lse": (dict(rows=128, heads=128, queries=2**17), r"wants fewer than 2\^31 numbers of lse"),
    "scale 0": (dict(scale=0.0), "found scale=0.0, wants one above 0 and finite"),
    "scale below 0": (dict(scale=-1.0), "found scale=-1.0"),
    "scale, infinite": (dict(scale=math.inf), "found scale=inf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name):
    changes, reason = REFUSED[name]
    assert re.search(reason, cudnn_attention_mxfp8.supports(**FITS | changes))


def test_a_launch_checks_too():
    q, v = jnp.zeros((1, 64, 2, 192), cudnn.CODES), jnp.zeros((1, 64, 2, 128), cudnn.CODES)
    scales = [jnp.zeros((1, 2, n), jnp.uint8) for n in (1024, 1024, 512)]
    with pytest.raises(NotImplementedError, match="found 64 queries, wants a multiple of 128"):
        cudnn_attention_mxfp8.forward(q, q, v, *scales, scale=1.0, causal=True)


def test_where_it_runs(monkeypatch):
    """Another release of the package may have another kernel: the one whose source was read is asked for."""
    monkeypatch.setattr(cudnn, "_absent", lambda: ("nvidia-cutlass-dsl >= 4.8",))
    assert "needs nvidia-cutlass-dsl >= 4.8" in cudnn_attention_mxfp8.unavailable()
    monkeypatch.setattr(cudnn, "_absent", lambda: ())
    version = functools.partial(monkeypatch.setattr, cudnn_attention_mxfp8.importlib.metadata, "version")
    for found, fits in (("1.32.0", True), ("1.33.0", False), ("1.3.2", False), ("2.32.0", False)):
        version(lambda name, found=found: found)
        with compile_for(100):
            reason = cudnn_attention_mxfp8.unavailable()
        assert (reason is None) == fits and (fits or f"found {found}" in reason)
    version(lambda name: "1.32.0")
    assert "compute capability 10.0" in cudnn_attention_mxfp8.unavailable()  # without a GPU
    for capability in (90, 103, 120):
        with compile_for(capability):
            assert "compute capability 10.0" in cudnn_attention_mxfp8.unavailable()


# --- What the op hands it --------------------------------------------------------------------------------------------


@pytest.fixture
def there(monkeypatch):
    """As if cuDNN and the kernel were here. Gives what the op asked, answer by answer."""
    answers = []
    ask = attention_mxfp8.supports
    table = importlib.import_module("jax_mla.attention").IMPLEMENTATIONS
    monkeypatch.setattr(cudnn_attention_mxfp8, "unavailable", lambda: None)
    monkeypatch.setattr(attention_cudnn, "supports", lambda *_: None)
    monkeypatch.setitem(table, "cudnn", dataclasses.replace(table["cudnn"], supports=lambda *_: None))
    monkeypatch.setattr(cudnn_attention_mxfp8, "_launch", played)
    monkeypatch.setattr(attention_mxfp8, "supports", lambda *args: answers.append(ask(*args)) or answers[-1])
    monkeypatch.setattr(cudnn_attention, "forward", lambda q, k, v, **_: (v[:, : q.shape[1]], q[..., 0].swapaxes(1, 2)))
    monkeypatch.setattr(cudnn_attention, "backward", in_float32(played_backward))
    return answers


def in_float32(function):
    def run(*arrays, **settings):
        return tuple(x.astype(BF16) for x in function(*(a.astype(F32) for a in arrays), **settings))

    return run


def of_tiles(tiles, rows: int, blocks: int):
    """Scales [B, H, rows, blocks] out of tiles [B, H, tiles, bytes], by the place that NVIDIA's `sf_atom_offset` gives
    scale (row, block) within the atoms of 128 rows; `test_blackwell.py` compares the two."""
    row, block = jnp.arange(128)[:, None], jnp.arange(blocks)
    at = place(row, block)
    return tiles[..., at].reshape(*tiles.shape[:2], rows, blocks)


def place(row, block):
    return (block // 4) * 512 + (row % 32) * 16 + (row // 32) * 4 + block % 4


ROUNDS = False  # whether probabilities are rounded to E4M3, as the kernel does


def played(scale, causal, *arrays):
    q, k, v, q_tiles, k_tiles, v_tiles, *unread = cudnn_attention_mxfp8.inputs(*arrays)
    (B, T, H, _), S = q.shape, k.shape[1]
    assert [x.shape for x in (q_tiles, k_tiles)] == [(B, H, n // 128, 1024) for n in (T, S)]
    assert v_tiles.shape == (B, H, S // 128, 512) and [x.shape for x in unread] == [(H,), (B,), (2,)]
    q_scales, k_scales = (of_tiles(x, n, 6) for x, n in ((q_tiles, T), (k_tiles, S)))
    # A tile of 128 keys: rows are dims, its four blocks keys.
    v_scales = v_tiles[..., place(jnp.arange(128)[:, None], jnp.arange(4))].swapaxes(-1, -2).reshape(B, H, S // 32, 128)
    q, k, v = (x.astype(F32).swapaxes(1, 2) for x in (q, k, v))
    q = q * jnp.exp2(jnp.repeat(q_scales.astype(F32) - 127, 32, axis=-1))
    k = k * jnp.exp2(jnp.repeat(k_scales.astype(F32) - 127, 32, axis=-1))
    v = v * jnp.exp2(jnp.repeat(v_scales.astype(F32) - 127, 32, axis=-2))
    logits = jnp.einsum("bhtd,bhsd->bhts", q, k) * scale
    if causal:
        logits = jnp.where(jnp.arange(T)[:, None] >= jnp.arange(S), logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    p = jnp.exp(logits - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    p = p.astype(cudnn.CODES).astype(F32) if ROUNDS else p
    o = jnp.einsum("bhts,bhsv->bthv", p / total, v)
    return o.astype(BF16), (top + jnp.log(total))[..., 0]


def operands(B=2, T=256, S=256, H=2, D=192, V=128, dtype=BF16, seed=0):
    """Whose every block has a scale of its own: a wrong place would show."""
    rng = np.random.default_rng(seed)

    def spread(*shape, axis):
        blocks = [n // 32 if i == axis else n for i, n in enumerate(shape)]
        x = rng.normal(size=shape) * np.repeat(2.0 ** rng.integers(-4, 2, blocks), 32, axis)
        return jnp.asarray(x, dtype)

    return spread(B, T, H, D, axis=3), spread(B, S, H, D, axis=3), spread(B, S, H, V, axis=1)


def tensors(*arrays, usages=COPIES):
    return [quantize_mxfp8(x, usage=u, token_axis=-3) for x, u in zip(arrays, usages, strict=True)]


def run(implementation, *arrays, **options):
    return attention(*tensors(*arrays), implementation=implementation, **options)


@pytest.mark.parametrize("options", [{}, dict(causal=False, scale=0.02), dict(causal="bottom_right")], ids=str)
def test_values_and_gradients(there, options):
    """Against the same tensors by "xla"; lse too. As many keys as queries, and more."""
    args = operands(S=256 if "causal" in options and options["causal"] else 384)
    do = jnp.asarray(np.random.default_rng(1).normal(size=(2, 256, 2, 128)), BF16)

    def passes(name, *args):
        o, pull = jax.vjp(functools.partial(run, name, **options), *args)
        return o, pull(do), run(name, *args, return_lse=True, **options)[1]

    ours = jax.jit(functools.partial(passes, "cudnn"))(*args)
    assert there == [None, None]
    (o, gradients, lse), wanted = ours, jax.jit(functools.partial(passes, "xla"))(*args)
    assert_close((o, gradients), wanted[:2])
    assert_close(lse, wanted[2], 1e-5)


def test_what_rounding_probabilities_costs(there, monkeypatch):
    """docs/blackwell.md: 1.4 to 1.7 % of o, nothing of lse."""
    monkeypatch.setattr(sys.modules[__name__], "ROUNDS", True)
    args = operands()
    (o, lse), (wanted, same) = (jax.jit(lambda *a, n=n: run(n, *a, return_lse=True))(*args) for n in ("cudnn", "xla"))
    norm = np.linalg.norm(reference.f64(o) - reference.f64(wanted)) / np.linalg.norm(reference.f64(wanted))
    assert 0.01 < norm < 0.02, norm
    assert error(lse, same) < 1e-5


def test_vmap_loops_over_it(there):
    args = operands(B=1, T=128, S=128)
    stacked = [jnp.stack([a, a[:, ::-1]]) for a in args]
    found = jax.jit(jax.vmap(functools.partial(run, "cudnn")))(*stacked)
    for i in range(2):
        assert_close(found[i], run("xla", *(a[i] for a in stacked)))
    assert there[0] is None


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_over_a_mesh_each_device_launches_its_share(there, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    args = operands(T=128, S=128)
    over = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(run, "cudnn"))(*(jax.device_put(a, over) for a in args))
    assert there == [None]
    assert_close(np.asarray(found.astype(F32)).astype(BF16), run("xla", *args))


IDS = np.ones((2, 256), np.int32)
MISFIT = {
    "arrays": (dict(quantized=False), {}, "found arrays, wants MXFP8Tensors"),
    "unnamed": ({}, dict(implementation=None), "found implementation=None, wants 'cudnn' by name, first"),
    "named second": ({}, dict(implementation=("xla", "cudnn")), "wants 'cudnn' by name, first"),
    "float32": (dict(dtype=F32), {}, "found tensors of float32, wants bfloat16"),
    "packed": ({}, dict(segment_ids=IDS), "found packed sequences"),
    "largest logits": ({}, dict(return_max_logit=True), "found return_max_logit=True"),
    "bottom right": (dict(S=384), dict(causal="bottom_right"), "found causal='bottom_right' for 256 queries and 384"),
    "dims": (dict(D=128), {}, "found heads of 128 and 128 dims"),
    "tail": (dict(T=160), {}, "found 160 queries, wants a multiple of 128"),
}


@pytest.mark.parametrize("name", MISFIT)
def test_what_the_op_does_not_hand_it(name, there):
    """And takes the way it took before."""
    sizes, options, reason = MISFIT[name]
    quantized, options = sizes.pop("quantized", True), dict(implementation="cudnn") | options
    jax.eval_shape(lambda *a: attention(*(tensors(*a) if quantized else a), **options), *operands(**sizes))
    (found,) = there
    assert re.search(re.escape(reason), found)


def test_no_backward_pass_no_forward_pass(there, monkeypatch):
    """lse with a gradient: cuDNN has no room for it on Blackwell."""
    monkeypatch.setattr(attention_cudnn, "supports", lambda *_: "found heads of 192 and 192 dims")
    jax.eval_shape(lambda *a: run("cudnn", *a), *operands())
    assert there == ["found heads of 192 and 192 dims"]


def test_scales_are_tiled_as_nvidias_rule_says():
    """`swizzle_scales` of values: an atom for every 128 keys, in the order in which the kernel reads them."""
    scales = jnp.asarray(np.random.default_rng(0).integers(0, 255, (2, 8, 3, 128)), jnp.uint8)
    tiles = np.asarray(swizzle_scales(scales, usage="columnwise", token_axis=-3)).reshape(2, 3, 2, 512)
    for block, dim in ((0, 0), (3, 127), (4, 1), (6, 40)):
        np.testing.assert_array_equal(tiles[:, :, block // 4, place(dim, block % 4)], scales[:, block, :, dim])
