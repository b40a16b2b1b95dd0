"""The devices of a run as a mesh, and which of its axes every logical axis is spread over.

Parameters, activations and batches say in logical axes (MaxText's names) what their dims are; RULES alone says which
axis of the mesh spreads them. A further axis of the mesh is a line in AXES and its lines in RULES.
"""

import argparse
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding

import jax_mla
from flax_examples.data import InputError

# The axes, outermost first: what talks most is innermost, among neighbours.
AXES = {
    "dp": "copies of the model, each with its part of the batch",
    "fsdp": "parts of the batch, and of the parameters, which are gathered where they are used",
    "cp": "parts of every row's tokens; attention gathers their latents",
    "tp": "parts of the heads, of the MLP's width and of the vocabulary",
}
RULES = (
    ("batch", ("dp", "fsdp")),
    ("tokens", "cp"),
    ("embed", "fsdp"),
    ("q_lora", "fsdp"),
    ("kv_lora", "fsdp"),
    ("q_heads", "tp"),
    ("kv_heads", "tp"),
    ("heads", "tp"),
    ("mlp", "tp"),
    ("vocab", "tp"),
)


def parse(text: str) -> dict[str, int]:
    """`dp=2,tp=2` as {"dp": 2, "tp": 2}, for argparse."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES:
            raise argparse.ArgumentTypeError(f"found axis {axis!r} in {text!r}, wanted one of {', '.join(AXES)}")
        if axis in sizes:
            raise argparse.ArgumentTypeError(f"found axis {axis} twice in {text!r}, wanted it once")
        if not (size.isascii() and size.isdecimal() and int(size) > 0):
            raise argparse.ArgumentTypeError(f"found {part!r}, wanted {axis}= and a whole number, at least 1")
        sizes[axis] = int(size)
    return sizes


@dataclasses.dataclass(frozen=True)
class Layout:
    """How arrays lie on the devices of a mesh that has every axis of AXES, of size 1 where it was not asked for."""

    mesh: Mesh

    @property
    def sizes(self) -> dict[str, int]:
        """The axes that spread anything."""
        return {axis: size for axis, size in self.mesh.shape.items() if size > 1}

    @property
    def parts(self) -> int:
        """How many parts a batch is cut in."""
        return math.prod(self.mesh.shape[axis] for axis in _axes("batch"))

    @functools.cached_property
    def own_parts(self) -> list[int]:
        """Those parts that this process's devices hold."""
        places = self.sharding("batch").addressable_devices_indices_map((self.parts,))
        return sorted({place[0].indices(self.parts)[0] for place in places.values()})

    @property
    def context_axis(self) -> str | None:
        """The axis that spreads tokens, as the layer is to be told: if any does, in zig-zag order."""
        (axis,) = _axes("tokens")
        return axis if axis in self.sizes else None

    def zigzag(self, x: jax.Array) -> jax.Array:
        """x [B, T] of tokens in natural order as the layer wants them: without an axis that spreads them, as it is."""
        if self.context_axis is None:
            return x
        order = jax_mla.zigzag(x.shape[1], self.sizes[self.context_axis])
        return self.spread(jnp.take(x, order, axis=1), "batch", "tokens")

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Of an array whose dims have these logical axes; without any, whole on every device."""
        return NamedSharding(self.mesh, nn.logical_to_mesh_axes(axes, RULES))

    def spread(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Inside jit: x laid out so, which keeps XLA from spreading an activation as a parameter is. What cannot be cut
        so, as the one row that generation works on, is left to XLA."""
        wanted = self.sharding(*axes)
        cut = zip(x.shape, wanted.spec, strict=True)
        fits = all(size % self._size(names) == 0 for size, names in cut)
        return jax.lax.with_sharding_constraint(x, wanted) if self.sizes and fits else x

    def batch(self, make: Callable):
        """The whole batch as global arrays, of which this process makes its own parts alone.

        make: the number of a part -> it, an array or a pytree of arrays with the batch first, all parts of one size.
        """
        own = [make(part) for part in self.own_parts]
        return jax.tree.map(self._whole, *own)

    def _whole(self, *own: np.ndarray) -> jax.Array:
        local = np.concatenate(own)
        shape = (self.parts * len(own[0]), *local.shape[1:])
        return jax.make_array_from_process_local_data(self.sharding("batch"), local, shape)

    def _size(self, names: str | tuple[str, ...] | None) -> int:
        return math.prod(self.mesh.shape[axis] for axis in _tuple(names))

    def check(self, batch: int, window: int, block: int, shapes: Mapping, axes: Mapping) -> None:
        """InputError unless the batch, its rows (into chunks of whole blocks of tokens) and every parameter can be cut
        evenly: `shapes` and `axes` are two trees of tuples."""
        if batch % self.parts:
            names = [axis for axis in _axes("batch") if axis in self.sizes]
            raise InputError(
                f"--batch: found {batch} over {' x '.join(f'{axis}={self.sizes[axis]}' for axis in names)},"
                f" wanted a multiple of {self.parts}"
            )
        if self.context_axis is not None:
            cp, of = self.sizes[self.context_axis], f" in blocks of {block} tokens" * (block > 1)
            if window % (2 * cp * block):
                raise InputError(
                    f"--window: found {window} over {self.context_axis}={cp}, wanted a multiple of {2 * cp * block}:"
                    f" every device holds two chunks{of}"
                )
        flat, tree = jax.tree.flatten(axes, is_leaf=lambda node: isinstance(node, tuple))
        for shape, names in zip(tree.flatten_up_to(shapes), flat, strict=True):
            for size, logical, mesh_axis in zip(shape, names, self.sharding(*names).spec, strict=True):
                if size % self._size(mesh_axis):
                    raise InputError(
                        f"--mesh: found {mesh_axis}={self._size(mesh_axis)} and {logical} of {size} in the model,"
                        f" wanted {mesh_axis} to divide it"
                    )


def make(sizes: Mapping[str, int] | None) -> Layout:
    """Over all devices of all processes. Without sizes one device, or what only splits the batch where there are
    several processes."""
    devices = jax.devices()
    if sizes is None:
        sizes = {"dp": len(devices)} if jax.process_count() > 1 else {}
        devices = devices if sizes else devices[:1]
    if math.prod(sizes.values()) != len(devices):
        raise InputError(
            f"--mesh: found {' x '.join(f'{axis}={size}' for axis, size in sizes.items())} ="
            f" {math.prod(sizes.values())}, wanted the number of devices, {len(devices)}"
        )
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    counts = collections.Counter(device.process_index for device in devices)
    inner = math.prod(shape[1 + max(map(list(AXES).index, _axes("batch"))) :])  # devices that share a part of the batch
    if len(counts) > 1 and any(count % inner and inner % count for count in counts.values()):
        raise InputError(
            f"--mesh: found parts of the batch that are shared by {inner} devices, and processes of"
            f" {sorted(set(counts.values()))} devices, wanted one to divide the other"
        )
    # Auto: XLA partitions the programs; the library's kernels bring their own rules.
    return Layout(jax.make_mesh(shape, tuple(AXES), axis_types=(AxisType.Auto,) * len(shape), devices=devices))


def _axes(logical: str) -> tuple[str, ...]:
    """The mesh axes that spread a logical axis."""
    return _tuple(dict(RULES).get(logical))


def _tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else names


def shardings(layout: Layout, axes: Mapping) -> dict:
    """Of a tree of parameters whose logical axes are given."""
    return jax.tree.map(lambda names: layout.sharding(*names), axes, is_leaf=lambda node: isinstance(node, tuple))
