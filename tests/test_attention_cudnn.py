"""attention by cuDNN: what it refuses, what it hands to cuDNN and makes of what comes back, with cuDNN's part played in
jnp; what is lowered for a GPU; and, on one, values and gradients against float32."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_mla.ffi import cudnn_attention
from judge import assert_close, assert_same, draw
from test_gpu_programs import compiled

from jax_mla import attention, attention_cudnn, compile_for, quantize_mxfp8

CUDNN = dict(implementation="cudnn")
BF16 = jnp.bfloat16


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def heads(B=2, T=64, S=64, H=3, D=192, V=128, dtype=BF16):
    return array(B, T, H, D, dtype=dtype), array(B, S, H, D, dtype=dtype), array(B, S, H, V, dtype=dtype)


# --- What it refuses -------------------------------------------------------------------------------------------------

IDS = array(2, 64, dtype=jnp.int32)


@pytest.mark.parametrize(
    "sizes, options, reason",
    [
        (dict(dtype=jnp.float32), {}, "found operands in float32, wants bfloat16 or float16"),
        (dict(dtype=jnp.float64), {}, "found operands in float64"),
        ({}, dict(return_max_logit=True), "found return_max_logit=True"),
        (dict(S=32), dict(causal="bottom_right"), "found causal='bottom_right' for 64 queries and 32 keys"),
        ({}, dict(segment_ids=IDS, kv_segment_ids=IDS), "found kv_segment_ids"),
        ({}, dict(scale=0.0), "found scale=0.0, wants one above 0"),
        (dict(T=1), {}, "found 1 queries and 64 keys"),
        (dict(B=0), {}, "no empty dim"),
        (dict(D=196), {}, "found heads of 196 and 128 dims, wants multiples of 8"),
        (dict(V=100), {}, "found heads of 192 and 100 dims, wants multiples of 8"),
        (dict(D=576, V=512), {}, "found heads of 576 and 576 dims as cuDNN is given them, wants at most 256"),
        (dict(D=256, V=256), dict(return_lse=True), "found heads of 264 and 264 dims"),
        (dict(B=1, T=2**20, S=2**20, H=16), dict(segment_ids=array(1, 2**20, dtype=jnp.int32)), r"fewer than 2\^31"),
    ],
)
def test_what_it_refuses(sizes, options, reason, x64):
    ids = {name: options[name] for name in options if "ids" in name}
    rest = {name: value for name, value in options.items() if name not in ids}
    run = functools.partial(attention, **rest, **CUDNN)
    with compile_for(90), pytest.raises(NotImplementedError, match=f"attention: .*'cudnn': .*{reason}"):
        jax.eval_shape(lambda q, k, v, ids: run(q, k, v, **ids), *heads(**sizes), ids)


def test_what_no_gpu_has():
    with pytest.raises(NotImplementedError, match="NVIDIA GPU of compute capability 8.0 or later; found jax's"):
        jax.eval_shape(functools.partial(attention, **CUDNN), *heads())
    with compile_for(75), pytest.raises(NotImplementedError, match="found 7.5"):
        jax.eval_shape(functools.partial(attention, **CUDNN), *heads())


def test_another_jax_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_parameters", lambda module, direction: {"scale", "a_new_setting"})
    cudnn_attention._private.cache_clear()
    try:
        assert "a_new_setting" in cudnn_attention.unavailable()
    finally:
        cudnn_attention._private.cache_clear()


def test_widths_by_gpu():
    """As they are on Hopper; elsewhere, packed, and where lse has a gradient, all as wide as the widest."""
    with compile_for(90):
        assert cudnn_attention.widths(192, 128) == (192, 128) and cudnn_attention.widths(96, 64) == (96, 64)
        assert cudnn_attention.widths(192, 128, packed=True) == cudnn_attention.widths(192, 128, spare=8) == (192, 192)
        assert cudnn_attention.widths(64, 64, spare=8) == (72, 72) and cudnn_attention.widths(64, 96) == (96, 96)
        assert cudnn_attention.supports(256, 256) is None
    with compile_for(100):
        assert cudnn_attention.widths(192, 128) == (192, 128) and cudnn_attention.widths(96, 64) == (96, 96)
        assert cudnn_attention.supports(192, 128) is None and "at most 128" in cudnn_attention.supports(192, 192)
    with compile_for(80):
        assert cudnn_attention.widths(96, 64) == (96, 96) and "at most 128" in cudnn_attention.supports(192, 192)


# --- With cuDNN's part played in jnp ---------------------------------------------------------------------------------


def probabilities(q, k, scale, causal, slots, lse=None):
    """P [B, H, T, S], lse of each row; with slots all tokens are one row, and what no slot has sees nothing."""
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    visible = rows >= columns if causal else jnp.ones_like(rows >= columns)
    if slots is not None:
        at = (slots.starts[:, None] <= columns) & (columns < (slots.starts + slots.lengths)[:, None])
        visible &= jnp.any(at[:, :, None] & at[:, None, :], axis=0)
    logits = jnp.where(visible, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1) if lse is None else lse
    return jnp.where(visible, jnp.exp(logits - lse[..., None]), 0.0), lse


def one_row(slots, *arrays):
    return arrays if slots is None else [x.reshape(1, -1, *x.shape[2:]) for x in arrays]


def of_no_slot(slots, x):
    """x [1, tokens, ...] with NaN for what cuDNN does not write."""
    if slots is None:
        return x
    tokens = jnp.arange(x.shape[1])
    written = (slots.starts[:, None] <= tokens) & (tokens < (slots.starts + slots.lengths)[:, None])
    return jnp.where(jnp.any(written, axis=0).reshape(-1, *[1] * (x.ndim - 2)), x, jnp.nan)


def played_forward(q, k, v, *, scale, causal, slots=None):
    assert slots is None or (q.shape[-1] == v.shape[-1] and slots.starts.size % q.shape[0] == 0)
    length, shape = q.shape[1], (*q.shape[:3], v.shape[3])
    q, k, v = one_row(slots, q, k, v)
    p, lse = probabilities(q, k, scale, causal, slots)
    o = of_no_slot(slots, jnp.einsum("bhts,bshv->bthv", p, v))
    if slots is not None:
        index = slots.starts[:, None] + jnp.arange(length)
        within = jnp.arange(length) < slots.lengths[:, None]
        lse = jnp.where(within, jnp.take(lse[0], index, axis=1, mode="clip"), jnp.nan).swapaxes(0, 1)
    return o.reshape(shape), lse


def played_backward(q, k, v, o, lse, do, *, scale, causal, slots=None):
    shapes = [x.shape for x in (q, k, v)]
    q, k, v, o, do = one_row(slots, q, k, v, o, do)
    if slots is not None:
        tokens = jnp.arange(q.shape[1])
        own = (slots.starts[:, None] <= tokens) & (tokens < (slots.starts + slots.lengths)[:, None])
        slot = jnp.argmax(own, axis=0)
        lse = lse[slot, :, tokens - slots.starts[slot]].T[None]
    p, _ = probabilities(q, k, scale, causal, slots, lse)
    delta = jnp.einsum("bthv,bthv->bht", do, o)
    ds = p * (jnp.einsum("bthv,bshv->bhts", do, v) - delta[..., None]) * scale
    found = jnp.einsum("bhts,bshd->bthd", ds, k), jnp.einsum("bhts,bthd->bshd", ds, q)
    found += (jnp.einsum("bhts,bthv->bshv", p, do),)
    return tuple(of_no_slot(slots, g).reshape(s) for g, s in zip(found, shapes, strict=True))


@pytest.fixture
def played(monkeypatch):
    """In float32, in slots of 2 segments a launch."""
    monkeypatch.setattr(cudnn_attention, "DTYPES", (jnp.dtype(jnp.float32),))
    monkeypatch.setattr(cudnn_attention, "forward", played_forward)
    monkeypatch.setattr(cudnn_attention, "backward", played_backward)
    monkeypatch.setattr(attention_cudnn, "SLOTS", 2)
    with compile_for(90):
        yield


def arguments(T=24, S=24, D=16, V=8, B=2, H=3, dtype=jnp.float32, seed=0, lse=True):
    rng = np.random.default_rng(seed)
    shapes = [(B, T, H, D), (B, S, H, D), (B, S, H, V), (B, T, H, V)] + [(B, T, H)] * lse
    return [draw(rng, *s, dtype=dtype) for s in shapes[:4]] + [draw(rng, *s) for s in shapes[4:]]


def both_passes(q, k, v, do, dlse=None, **options):
    """o, lse (where it has a cotangent) and the three gradients."""
    o, pullback = jax.vjp(lambda *a: attention(*a, **options, return_lse=dlse is not None), q, k, v)
    return o, pullback(do if dlse is None else (do, dlse))


def against_xla(args, **options):
    def run(*args):
        return both_passes(*args, **options, **CUDNN), both_passes(*args, **options, implementation="xla")

    ours, wanted = jax.jit(run)(*args)
    assert_close(ours, wanted, 1e-5)
    return ours


@pytest.mark.parametrize("causal", [True, False])
def test_a_dense_pass_and_lses_gradient(played, causal):
    against_xla(arguments(T=24, S=17, D=8), causal=causal, scale=0.7)


PACKED = np.array([[0, 5, 5, 6, 19, 22], [0, 24, 24, 24, 24, 24]], np.int32)
# One id twice, ids that fall, padding first and between, a row of padding alone.
SCATTERED = np.zeros((3, 24), np.int32)
SCATTERED[0] = np.repeat([0, 7, 7, 3, -1, 7, 0, 9], 3)
SCATTERED[2] = np.arange(24)


@pytest.mark.parametrize("how, lse", [("cu_seqlens", False), ("segment_ids", True)])
def test_packed_sequences(played, how, lse):
    """More of them than a launch has slots; NaN in padding reaches nothing."""
    if how == "cu_seqlens":
        args, options = arguments(lse=lse), dict(cu_seqlens=PACKED)
        live = np.arange(24) < PACKED[:, -1:]
    else:
        args, options = arguments(B=3, lse=lse), dict(segment_ids=SCATTERED)
        live = SCATTERED != 0
    args = [jnp.where(live.reshape(*live.shape, *[1] * (a.ndim - 2)), a, jnp.nan) for a in args]
    found = jax.tree.leaves(against_xla(args, **options))
    assert all(np.all(np.asarray(f)[~live] == (-np.inf if f.ndim == 3 else 0)) for f in found)


def test_vmap(played, monkeypatch):
    """k, and ids, the same for every entry; in parts of two rows, as where offsets would pass int32."""
    q, k, v, do = (jnp.stack([a, 2 * a]) for a in arguments(T=12, S=12, lse=False))
    ids = dict(segment_ids=SCATTERED[[0, 2], 4:16])
    monkeypatch.setattr(attention_cudnn, "MOST", 2 * 12 * 3 * 16 + 1)
    ours, xla = (functools.partial(both_passes, **ids, implementation=name) for name in ("cudnn", "xla"))
    axes = (0, None, 0, 0)
    found, wanted = jax.jit(lambda *a: [jax.vmap(f, axes)(*a) for f in (ours, xla)])(q, k[0], v, do)
    assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes(played, kind):
    """Batch and heads sharded: nothing is gathered."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    args = arguments(H=4, lse=False)
    ids = SCATTERED[[0, 2]]
    wanted = jax.jit(functools.partial(both_passes, segment_ids=ids, implementation="xla"))(*args)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
    args = [place(a, "data", None, "model") for a in args]
    run = jax.jit(lambda ids, *a: both_passes(*a, segment_ids=ids, **CUDNN))
    with jax.set_mesh(mesh):
        program = run.lower(place(ids, "data"), *args).compile()
    text = program.as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective", text)
    assert_close(program(place(ids, "data"), *args), wanted, 1e-5)


# --- What is lowered and compiled for a GPU --------------------------------------------------------------------------


def lowered(function, *args) -> Counter:
    with compile_for(90):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @([\w$]+)|stablehlo\.(pad|while|sort|convert)\b", text)
    return Counter(name or op for name, op in calls)


def program(**options):
    """Both passes; the cotangent is what is returned."""

    def run(q, k, v, **ids):
        o, pullback = jax.vjp(lambda *a: attention(*a, **ids, **options, **CUDNN), q, k, v)
        return o, pullback(o)

    return run


BOTH = {target: 1 for target in cudnn_attention.TARGETS}


def test_both_passes_are_one_call_each():
    assert lowered(program(), *heads()) == BOTH
    assert lowered(program(causal=False), *heads(T=100, S=64, D=96, V=64, dtype=jnp.float16)) == BOTH
    assert lowered(jax.vmap(program(), (0, 0, 0)), *(array(3, *x.shape) for x in heads())) == BOTH

    def packed(*ends):
        found = lowered(program(cu_seqlens=np.array([0, *ends], np.int32)), *(array(*x.shape[1:]) for x in heads()))
        return {name: found[name] for name in (*BOTH, "while")}

    assert packed(10, 10, 64) == BOTH | {"while": 0}
    assert packed(10, 64) == packed(32, 64) == BOTH | {"while": 0}, "known to be a batch, or to be none"
    at = jax.ShapeDtypeStruct((3,), jnp.int32)
    found = lowered(lambda at, *a: program(cu_seqlens=at)(*a), at, *(array(*x.shape[1:]) for x in heads(T=512, S=512)))
    assert {name: found[name] for name in BOTH} == {name: 2 for name in BOTH}, "or a batch of two"


def test_compiled_for_an_h200_it_copies_nothing(monkeypatch):
    found = compiled(monkeypatch, "attention")["attention"]
    lse = 2 * 128 * 4096 * 4
    assert lse <= found.pop("temporaries") < lse + 4096  # no kernel's workspace: there is no cuDNN to ask for it
    assert found == {"custom-call": 2}


# --- On a GPU --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
TOLERANCE = {BF16: 2e-2, jnp.float16: 4e-3}


def on_gpu(args, dtype=BF16, tolerance=None, **options):
    """Ours against "xla" in float32, on what is left of the arguments in dtype."""
    args = [a if a.ndim == 3 else a.astype(dtype) for a in args]
    found = jax.jit(functools.partial(both_passes, **CUDNN | options))(*args)
    with jax.default_matmul_precision("highest"):
        exact = functools.partial(both_passes, **options | dict(implementation="xla"))
        wanted = jax.jit(exact)(*(a.astype(jnp.float32) for a in args))
    assert_close(found, wanted, TOLERANCE[dtype] if tolerance is None else tolerance)
    return found


LENGTHS = [(64, 64), (100, 100), (192, 192), (320, 320), (100, 64), (64, 320), (2, 2), (7, 9)]
SHAPES = [(192, 128, T, S) for T, S in LENGTHS]
SHAPES += [(D, V, 100, 100) for D, V in ((96, 64), (64, 64), (128, 128), (40, 24), (64, 96))]
SHAPES += [(96, 64, 64, 320), (64, 64, 320, 192)]


@gpu
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D, V, T, S", SHAPES)
def test_gpu_values_and_gradients(D, V, T, S, causal, lse):
    on_gpu(arguments(T, S, D, V, H=5, lse=lse), causal=causal)


@gpu
def test_gpu_float16_and_a_scale():
    on_gpu(arguments(192, 192, 192, 128), jnp.float16, scale=0.05)


@gpu
@pytest.mark.parametrize("shift", [-120.0, 3000.0])
def test_gpu_shifting_all_logits_of_a_row_changes_nothing(shift):
    q, k, v, do = arguments(192, 192, 192, 128, lse=False)
    q, k = q.at[..., -1].set(1.0), k.at[..., -1].set(0.0)
    run = jax.jit(functools.partial(both_passes, scale=1.0, **CUDNN))
    q, k, v, do = (a.astype(BF16) for a in (q, k, v, do))
    o, (dq, dk, dv) = run(q, k, v, do)
    moved, (moved_dq, moved_dk, moved_dv) = run(q, k.at[..., -1].set(shift), v, do)
    # dq's last dim multiplies the shift.
    found, wanted = (moved, moved_dq[..., :-1], moved_dk, moved_dv), (o, dq[..., :-1], dk, dv)
    assert_close(found, wanted, 2e-2)


def packed_on_gpu(lead, length, D, V, lse=True, **options):
    """With zeros in padding, and with NaN."""
    args = arguments(length, length, D, V, B=lead, H=5, lse=lse)
    ids = options.get("segment_ids")
    live = np.arange(length) < options["cu_seqlens"][:, -1:] if ids is None else np.asarray(ids) != 0
    mask = lambda a, other: jnp.where(live.reshape(*live.shape, *[1] * (a.ndim - 2)), a, other)  # noqa: E731
    clean = on_gpu([mask(a, 0.0) for a in args], **options)
    found = on_gpu([mask(a, jnp.nan) for a in args], **options)
    assert_close(found, clean, 1e-2)  # its sums have no order
    for f in jax.tree.leaves(found):
        assert np.all(np.asarray(f, np.float32)[~live] == (-np.inf if f.dtype == jnp.float32 else 0))


@gpu
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D, V", [(192, 128), (64, 64)])
def test_gpu_packed_sequences(D, V, causal, lse):
    ends = np.array([[0, 100, 100, 101, 165, 293, 300], [0, 320, 320, 320, 320, 320, 320]], np.int32)
    packed_on_gpu(2, 320, D, V, lse=lse, causal=causal, cu_seqlens=ends)


@gpu
def test_gpu_packed_sequences_fill_the_row():
    for last in (512, 511):  # a batch; three of one length and a shorter one
        packed_on_gpu(1, 512, 192, 128, cu_seqlens=np.array([[0, 128, 256, 384, last]], np.int32))
    packed_on_gpu(1, 512, 192, 128, cu_seqlens=np.array([[0, 512]], np.int32))


@gpu
def test_gpu_more_sequences_than_slots():
    packed_on_gpu(1, 320, 192, 128, cu_seqlens=np.array([[*range(0, 301, 10), 320]], np.int32))
    packed_on_gpu(2, 128, 192, 128, segment_ids=np.stack([np.arange(128), np.arange(128) // 3]))


@gpu
def test_gpu_segment_ids():
    right = np.where(np.arange(192) < np.array([[150], [192], [0]]), 1, 0)  # right padding, none, all
    packed_on_gpu(3, 192, 192, 128, segment_ids=right)
    scattered = np.stack([np.repeat([0, 7, 7, 3, -1, 7, 0, 9], 24), np.repeat([2, 1, 0], 64), np.ones(192, int)])
    packed_on_gpu(3, 192, 192, 128, segment_ids=scattered)


@gpu
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_vmap(packed):
    args = [jnp.stack([a, 2 * a]).astype(BF16) for a in arguments(96, 96, 192, 128, lse=False)]
    ids = dict(segment_ids=jnp.asarray(np.repeat([[1, 2, 0], [5, 5, 4]], 32, axis=1))) if packed else {}
    run = functools.partial(both_passes, **ids, **CUDNN)
    found = jax.jit(jax.vmap(run))(*args)
    wanted = jax.tree.map(lambda *a: jnp.stack(a), *(jax.jit(run)(*(a[i] for a in args)) for i in range(2)))
    assert_close(found, wanted, 1e-2)


@gpu
def test_gpu_scan_and_remat():
    q, k, v, do = (a.astype(BF16) for a in arguments(96, 96, 64, 64, lse=False))
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def chain(name, turn):
        def loss(q, k, v):
            step = turn(lambda q, _: (attention(q, k, v, implementation=name), None))
            return jnp.sum((jax.lax.scan(step, q, length=3)[0] * do).astype(jnp.float32))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    plain = chain("cudnn", lambda f: f)
    assert_close(chain("cudnn", jax.checkpoint), plain, 2e-2)
    assert_close(chain("cudnn", functools.partial(jax.checkpoint, policy=policy)), plain, 2e-2)
    assert_close(plain, chain("xla", lambda f: f), 4e-2)


@gpu
def test_gpu_mxfp8_and_none():
    """MXFP8 is dequantised first: those values' attention. None is cuDNN's."""
    q, k, v, do = (a.astype(BF16) for a in arguments(96, 96, 192, 128, lse=False))
    usages = ("rowwise", "rowwise", "columnwise")
    tensors = [quantize_mxfp8(a, usage=u, token_axis=-3) for a, u in zip((q, k, v), usages, strict=True)]
    attend = {n: jax.jit(functools.partial(attention, implementation=n)) for n in ("cudnn", "xla", None)}
    assert_close(attend["cudnn"](*tensors), attend["xla"](*tensors), 2e-2)
    assert_same(attend[None](q, k, v), attend["cudnn"](q, k, v))
    assert "fmhaSoftmax" in attend[None].lower(q, k, v).as_text()
