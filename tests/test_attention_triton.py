"""attention by our Triton kernels, from JAX: what it refuses; and, on a GPU, values and gradients against float32.
(`test_attention_kernel.py` has the kernels themselves, `test_lowering.py` when None takes them.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, assert_same
from test_attention_cudnn import BF16, IDS, LENGTHS, arguments, both_passes, heads, on_gpu, packed_on_gpu

from jax_mla import attention, compile_for, quantize_mxfp8

TRITON = dict(implementation="triton")


@pytest.mark.parametrize(
    "sizes, options, reason",
    [
        (dict(dtype=jnp.float32), {}, "found operands in float32, wants bfloat16 or float16"),
        ({}, dict(segment_ids=IDS, kv_segment_ids=IDS), "found kv_segment_ids"),
        ({}, dict(scale=0.0), "found scale=0.0, wants one above 0"),
        (dict(B=0), {}, "found an empty dim"),
        (dict(D=200), {}, "found heads of 200 and 128 dims, wants 64 to 256, multiples of 32"),
        (dict(D=64, V=32), {}, "found heads of 64 and 32 dims, wants 64 to 256"),
        (dict(D=576, V=512), {}, "found heads of 576 and 512 dims, wants 64 to 256"),
        (dict(B=1, T=2**25, S=2**25, H=64), {}, r"wants fewer than 2\^31 in all"),
    ],
)
def test_what_it_refuses(sizes, options, reason):
    pytest.importorskip("triton", reason="needs triton (extra `test`)")
    run = functools.partial(attention, **TRITON)
    with compile_for(90), pytest.raises(NotImplementedError, match=f"attention: .*'triton': .*{reason}"):
        jax.eval_shape(
            lambda q, k, v, ids: run(q, k, v, **options | ids),
            *heads(**sizes),
            {k: options.pop(k) for k in list(options) if "ids" in k},
        )


def test_what_no_gpu_has():
    with pytest.raises(NotImplementedError, match="'triton': needs "):
        jax.eval_shape(functools.partial(attention, **TRITON), *heads())
    with compile_for(75), pytest.raises(NotImplementedError, match="needs (compute capability 8.0|triton|jax_triton)"):
        jax.eval_shape(functools.partial(attention, **TRITON), *heads())


# --- On a GPU --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("causal", [True, False, "bottom_right"])
@pytest.mark.parametrize("D, V, T, S", [(192, 128, T, S) for T, S in LENGTHS] + [(192, 128, 1, 128), (96, 64, 100, 70)])
def test_gpu_values_and_gradients(D, V, T, S, causal):
    on_gpu(arguments(T, S, D, V, H=5, lse=True), causal=causal, **TRITON)


@gpu
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_packed_sequences(causal):
    ends = np.array([[0, 100, 100, 101, 165, 293, 300], [0, 320, 320, 320, 320, 320, 320]], np.int32)
    packed_on_gpu(2, 320, 192, 128, causal=causal, cu_seqlens=ends, **TRITON)
    scattered = np.stack([np.repeat([0, 7, 7, 3, -1, 7, 0, 9], 24), np.repeat([2, 1, 0], 64), np.arange(192)])
    packed_on_gpu(3, 192, 192, 128, causal=causal, segment_ids=scattered, **TRITON)


@gpu
def test_gpu_hundred_repeats_are_the_same_bits():
    """Case 31 of public reports: nothing is added up in an order of chance."""
    args = [a.astype(BF16) for a in arguments(700, 700, 192, 128, H=16, lse=False)]
    at = np.array([[0, 300, 700]] * 2, np.int32)
    run = jax.jit(functools.partial(both_passes, cu_seqlens=at, **TRITON))
    first = run(*args)
    for _ in range(100):
        assert_same(run(*args), first)


@gpu
def test_gpu_largest_logits():
    q, k, v, _ = (a.astype(BF16) for a in arguments(300, 300, 192, 128, H=6, lse=False))
    ids = np.repeat([[1, 2, 0], [4, 4, 9]], 100, axis=1)
    for options in ({}, dict(segment_ids=ids), dict(causal=False, scale=0.3)):
        attend = functools.partial(attention, return_max_logit=True, **options)
        o, found = jax.jit(attend)(q, k, v)
        with jax.default_matmul_precision("highest"):
            exact, wanted = jax.jit(functools.partial(attend, implementation="xla"))(
                *(a.astype(jnp.float32) for a in (q, k, v))
            )
        assert_close(found, wanted, 1e-5)
        assert_close(o, exact, 2e-2)


@gpu
def test_gpu_vmap_scan_and_remat():
    q, k, v, do = (jnp.stack([a, 2 * a]).astype(BF16) for a in arguments(96, 96, 192, 128, lse=False))
    ids = jnp.asarray(np.repeat([[1, 2, 0], [5, 5, 4]], 32, axis=1))
    run = functools.partial(both_passes, segment_ids=ids, **TRITON)
    found = jax.jit(jax.vmap(run))(q, k, v, do)
    wanted = jax.tree.map(lambda *a: jnp.stack(a), *(jax.jit(run)(q[i], k[i], v[i], do[i]) for i in range(2)))
    assert_same(found, wanted)

    def loss(turn, q, k, v):
        step = turn(lambda q, _: (q + jnp.pad(attention(q, k, v, **TRITON), [(0, 0)] * 3 + [(0, 64)]), None))
        return jnp.sum((jax.lax.scan(step, q, length=3)[0][..., :128] * do[0]).astype(jnp.float32))

    plain, remat = (
        jax.jit(jax.grad(functools.partial(loss, t), (0, 1, 2)))(q[0], k[0], v[0])
        for t in (lambda f: f, jax.checkpoint)
    )
    assert_same(remat, plain)


@gpu
def test_gpu_mxfp8_and_a_mesh():
    q, k, v, do = (a.astype(BF16) for a in arguments(96, 96, 192, 128, H=4, lse=False))
    tensors = [
        quantize_mxfp8(a, usage=u, token_axis=-3)
        for a, u in zip((q, k, v), ("rowwise", "rowwise", "columnwise"), strict=True)
    ]
    assert_close(*(jax.jit(functools.partial(attention, implementation=n))(*tensors) for n in ("triton", "xla")), 2e-2)
    for kind in ("Auto", "Explicit"):
        mesh = jax.make_mesh(
            (1,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:1]
        )
        with jax.set_mesh(mesh):
            put = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (q, k, v, do)]
            assert_same(
                jax.jit(functools.partial(both_passes, **TRITON))(*put),
                jax.jit(functools.partial(both_passes, **TRITON))(q, k, v, do),
            )
