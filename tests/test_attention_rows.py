"""Packed rows that sequences of one length fill, which are a batch; and what None takes for each pass: "cudnn" and
"triton" are played by jnp, and take notes."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, draw

from jax_mla import attention, attention_rows, blockwise

module = importlib.import_module("jax_mla.attention")


@pytest.fixture
def notes(monkeypatch):
    """(who, which pass, of how many tokens a row) of every pass that is traced."""
    found = set()

    def player(name, direction):
        def run(static, q, *arrays):
            found.add((name, direction, q.shape[1]))
            return getattr(blockwise, direction)(static, q, *arrays)

        return run

    players = {
        name: dataclasses.replace(
            module.IMPLEMENTATIONS["xla"],
            forward=player(name, "forward"),
            backward=player(name, "backward"),
            opaque=True,
        )
        for name in ("cudnn", "triton")
    }
    monkeypatch.setattr(module, "IMPLEMENTATIONS", players | {"xla": module.IMPLEMENTATIONS["xla"]})
    return found


def arguments(length, batch=2, heads=2):
    rng = np.random.default_rng(length)
    return [draw(rng, batch, length, heads, width, dtype=jnp.float32) for width in (16, 16, 8, 8)]


def both_passes(q, k, v, do, at=None, name=None, causal=True):
    o, pullback = jax.vjp(lambda *a: attention(*a, causal=causal, cu_seqlens=at, implementation=name), q, k, v)
    return o, pullback(do)


def ends(length, *inner):
    return np.array([[0, *inner, length]] * 2, np.int32)


EVEN, UNEVEN = ends(48, 16, 32), ends(48, 16, 33)


def test_what_is_known_of_boundaries():
    assert attention_rows.alike(EVEN, 48) is True and attention_rows.alike(EVEN[0], 48) is True
    mixed = np.stack([EVEN[0], UNEVEN[0]])
    for at, length in ((UNEVEN, 48), (mixed, 48), (EVEN, 51), (EVEN, 49), (np.array([0]), 8), (np.arange(9), 8)):
        assert attention_rows.alike(at, length) is False, (at, length)
    asked = {}
    jax.eval_shape(lambda at: asked.update({n: attention_rows.alike(at, n) for n in (48, 384, 385)}), EVEN)
    assert asked == {48: False, 384: None, 385: False}  # sequences so short are not worth the question


@pytest.mark.parametrize("name", ["cudnn", "triton"])
def test_a_batch_or_not(notes, monkeypatch, name):
    """Told as the program runs: the same one has both. Where boundaries are known, it has what it needs."""
    monkeypatch.setattr(attention_rows, "LEAST", 16)
    args, run = arguments(48), functools.partial(both_passes, name=name)
    traced = jax.jit(run)
    for at in (EVEN, UNEVEN, np.stack([EVEN[0], UNEVEN[0]])):
        wanted = both_passes(*args, at, "xla")
        assert_close(traced(*args, at), wanted, 1e-5)
        assert notes == {(name, direction, n) for direction in ("forward", "backward") for n in (16, 48)}
    for at, length in ((EVEN, 16), (UNEVEN, 48)):
        notes.clear()
        assert_close(jax.jit(lambda *a, at=at: run(*a, at))(*args), both_passes(*args, at, "xla"), 1e-5)
        assert notes == {(name, "forward", length), (name, "backward", length)}
    notes.clear()
    both_passes(*args, EVEN, "xla")
    assert not notes


def test_vmap_asks_once(notes, monkeypatch):
    monkeypatch.setattr(attention_rows, "LEAST", 16)
    args = [jnp.stack([a, 2 * a]) for a in arguments(48)]
    mapped = jax.jit(jax.vmap(functools.partial(both_passes, name="triton"), (0, 0, 0, 0, 0)))
    for at in (np.stack([EVEN, EVEN]), np.stack([EVEN, UNEVEN])):
        wanted = [both_passes(*(a[i] for a in args), at[i], "xla") for i in range(2)]
        assert_close(mapped(*args, at), jax.tree.map(lambda *a: jnp.stack(a), *wanted), 1e-5)
    text = mapped.lower(*args, at).as_text()
    assert text.count("stablehlo.case") == 2


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes(notes, monkeypatch, kind):
    """Batch and heads sharded: every device answers for its rows, and nothing is gathered."""
    monkeypatch.setattr(attention_rows, "LEAST", 16)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    args = arguments(48)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
    put = [place(a, "data", None, "model") for a in args]
    run = jax.jit(lambda at, *a: both_passes(*a, at, "triton"))
    for at in (EVEN, np.stack([EVEN[0], UNEVEN[0]])):
        with jax.set_mesh(mesh):
            program = run.lower(place(at, "data"), *put).compile()
        assert not any(name in program.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "collective"))
        assert_close(program(place(at, "data"), *put), both_passes(*args, at, "xla"), 1e-5)


def test_what_none_takes_for_each_pass(notes):
    def traced(length, at=None, causal=True):
        notes.clear()
        shapes = [jax.ShapeDtypeStruct((2, length, 2, n), jnp.float32) for n in (16, 16, 8, 8)]
        jax.eval_shape(functools.partial(both_passes, causal=causal), *shapes, *(() if at is None else (at,)))
        return notes

    forward, backward = ("cudnn", "forward"), ("triton", "backward")
    assert traced(2048, causal=False) == {(*forward, 2048), (*backward, 2048)}
    assert traced(1024) == {(*forward, 1024), (*backward, 1024)}
    for length in (64, 2048):
        assert traced(length) == {(*forward, length), ("cudnn", "backward", length)}
    packed = {("triton", "forward", 2048), (*backward, 2048)}
    assert traced(2048, ends(2048, 1024)) == packed | {(*forward, 1024), (*backward, 1024)}
    assert traced(2048, ends(2048, 64, 65, 66)) == packed | {(*forward, 512), (*backward, 512)}
    assert traced(2048, ends(2048, 64, 65)) == packed
