"""Packed sequences: ids, positions that restart, and the order that causality is counted in."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, sharding


def check(
    segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None, B: int, T: int, S: int, **_: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """The ids of queries [B, T] and keys [B, S] or None twice. Named errors otherwise."""
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise checks.found("segment_ids", None, "integers [B, T] where kv_segment_ids are given")
        return None, None
    segment_ids = check_ids("segment_ids", segment_ids, B=B, T=T)
    if kv_segment_ids is None:
        if T != S:
            raise checks.found(
                "kv_segment_ids", None, f"integers [B={B}, S={S}]: the keys are not as many as the queries"
            )
        return segment_ids, segment_ids
    return segment_ids, check_ids("kv_segment_ids", kv_segment_ids, B=B, S=S)


def segment_ids_from_cu_seqlens(cu_seqlens: jax.Array, length: int) -> jax.Array:
    """Segment ids of packed rows, int32 [T] or [B, T]: sequence i of a row holds tokens cu_seqlens[i] to
    cu_seqlens[i + 1] and gets id i + 1; tokens past the last boundary are padding, id 0.

    cu_seqlens: integers [n + 1] for one row, [B, n + 1] for many: 0, then the sequences' ends, never falling (equal
    neighbours are sequences of no tokens), at most `length` = T tokens. The number of sequences is a shape, their
    lengths are not: no length compiles anew.

    Raises TypeError for another dtype, ValueError for another shape and, where the values are known at trace time, for
    boundaries that do not start at 0, fall, or pass T. Traced boundaries are the caller's promise.
    """
    length = checks.static_int("length", length, 0)
    if not hasattr(cu_seqlens, "dtype"):
        raise TypeError(f"cu_seqlens: found {type(cu_seqlens).__name__}, wanted an integer array [n + 1] or [B, n + 1]")
    checks.integer("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim not in (1, 2) or cu_seqlens.shape[-1] < 1:
        raise checks.found("cu_seqlens", cu_seqlens, "an array [n + 1] or [B, n + 1]")
    if not isinstance(cu_seqlens, jax.core.Tracer):
        values = np.asarray(cu_seqlens).astype(np.int64)
        if np.any(values[..., 0] != 0) or np.any(np.diff(values) < 0) or np.any(values[..., -1] > length):
            raise ValueError(
                f"cu_seqlens: found {values.tolist()}, wanted 0 first, then ends that never fall, at most {length}"
            )
    boundaries = jnp.asarray(cu_seqlens).astype(jnp.int32)
    tokens = jnp.arange(length, dtype=jnp.int32)
    passed = jnp.sum(boundaries[..., None, :] <= tokens[:, None], axis=-1, dtype=jnp.int32)
    return jnp.where(tokens < boundaries[..., -1:], passed, jnp.zeros((), jnp.int32))


def check_ids(argument: str, ids: jax.Array, **sizes: int) -> jax.Array:
    checks.dims(argument, ids, " ".join(sizes), **sizes)
    return checks.integers(argument, ids)


def check_blocks(argument: str, ids: jax.Array | None, block: int) -> None:
    """ValueError where ids known at trace time start a segment within a block of tokens. Traced ones are a promise."""
    if ids is None or isinstance(ids, jax.core.Tracer):
        return
    ids = np.asarray(ids)
    inside = (ids[:, 1:] != ids[:, :-1]) & (ids[:, 1:] != 0) & (np.arange(1, ids.shape[1]) % block != 0)
    _check_starts(argument, np.nonzero(inside)[1] + 1, block)


def check_starts(argument: str, cu_seqlens: jax.Array, block: int) -> None:
    """The same of boundaries [n + 1] or [B, n + 1]; a sequence of no tokens starts nowhere."""
    if isinstance(cu_seqlens, jax.core.Tracer) or getattr(cu_seqlens, "ndim", 0) not in (1, 2):
        return  # traced, or to be refused by `segment_ids_from_cu_seqlens`
    values = np.asarray(cu_seqlens)
    starts = values[..., :-1][values[..., 1:] > values[..., :-1]]
    _check_starts(argument, starts[starts % block != 0], block)


def _check_starts(argument: str, wrong: np.ndarray, block: int) -> None:
    if wrong.size:
        raise ValueError(
            f"{argument}: found a sequence that starts at token {wrong.flat[0]}, wanted multiples of {block}: one "
            f"MXFP8 block would mix two sequences (pad between them with id 0)"
        )


def zero_padding(x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """x [B, T, K] with the rows of padding 0, and their cotangents too."""
    if segment_ids is None:
        return x

    def keep(x, ids):
        return jnp.where((ids != 0)[..., None], x, jnp.zeros((), x.dtype))

    return sharding.local("segment_ids", "b t k, b t -> b t k", keep, x, segment_ids)


def positions_within(segment_ids: jax.Array, *, from_end: bool = False) -> jax.Array:
    """Each token's index in its run of equal ids, int32 [..., T]; from_end counts down to 0 at the run's last token."""
    ids = jnp.flip(segment_ids, axis=-1) if from_end else segment_ids
    index = jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    starts = jnp.concatenate([jnp.ones_like(ids[..., :1], dtype=bool), ids[..., 1:] != ids[..., :-1]], axis=-1)
    within = index - jax.lax.cummax(jnp.where(starts, index, jnp.zeros((), jnp.int32)), axis=ids.ndim - 1)
    return jnp.flip(within, axis=-1) if from_end else within


def causal_order(
    causal: bool | str, segment_ids: jax.Array, kv_segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Numbers [B, T], [B, S] such that a query sees a key of its segment if its number is not below the key's."""
    if causal is False:
        return None, None
    if causal == "bottom_right":
        return -positions_within(segment_ids, from_end=True), -positions_within(kv_segment_ids, from_end=True)
    return positions_within(segment_ids), positions_within(kv_segment_ids)
