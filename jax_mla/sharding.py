"""The rules by which every op runs under a mesh, in one place.

- No mesh, or inside `shard_map` (Manual): called directly, on arrays that already are one device's shards.
- Auto mesh: XLA partitions pure jnp. What it cannot look into, a kernel's launch, it would hand whole arrays: such a
  function is `opaque` to `local`, and XLA is told by the op's rule how to run it on shards (`custom_partitioning`).
- Explicit mesh (what `jax.make_mesh` gives): the type of every array says how it is sharded. What has no terms across
  devices runs inside `shard_map` with those specs (`local`); contractions pass `out_sharding` (`einsum`).

Gradients: `cotangent` gives a cotangent its primal's dtype, varying axes and sharding, so that a replicated parameter's
gradient is summed over the devices exactly once (and not at all where `shard_map(check_vma=False)` will do it).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mla import fp8_einsum
from jax_mla.ffi.varying import vary_like, varying

Axes = tuple[str, ...]  # the mesh axes one dim is sharded over, () for none


def _explicit_mesh(*arrays: jax.Array | None):
    """The mesh whose Explicit axes shard one of the arrays, or None."""
    for array in arrays:
        if array is not None and any(spec(array)):
            return jax.typeof(array).sharding.mesh
    return None


def spec(array: jax.Array) -> tuple[Axes, ...]:
    """Per dim, the Explicit mesh axes the array's type says it is sharded over."""
    sharding = jax.typeof(array).sharding
    mesh = sharding.mesh
    explicit = _explicit_axes(mesh)
    dims = []
    for entry in tuple(sharding.spec) + (None,) * (array.ndim - len(sharding.spec)):
        names = entry if isinstance(entry, tuple) else (entry,)
        dims.append(tuple(name for name in names if name in explicit))
    return tuple(dims)


def _explicit_axes(mesh) -> set[str]:
    return {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}


def reshard(array: jax.Array, mesh, wanted: PartitionSpec) -> jax.Array:
    return jax.sharding.reshard(array, NamedSharding(mesh, wanted))


def _partition(dims: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims))


def cotangent(value: jax.Array, primal: jax.Array) -> jax.Array:
    """`value` as a cotangent of `primal`: summed, in its own precision, over Manual axes the primal is replicated on,
    then in the primal's dtype and sharding."""
    extra = varying(value) - varying(primal)
    if extra:
        value = jax.lax.psum(value, tuple(sorted(extra)))
    value = vary_like(value, primal).astype(primal.dtype)
    mesh = _explicit_mesh(primal, value)
    if mesh is not None and spec(value) != spec(primal):
        value = reshard(value, mesh, _partition(spec(primal)))
    return value


def follow(parameter: jax.Array, y: jax.Array | None = None) -> jax.Array:
    """A small parameter sharded as the trailing dims of y, or whole without y: gathered where FSDP has spread it."""
    mesh = _explicit_mesh(parameter, y)
    wanted = ((),) * parameter.ndim if y is None else spec(y)[y.ndim - parameter.ndim :]
    return parameter if mesh is None or spec(parameter) == wanted else reshard(parameter, mesh, _partition(wanted))


def whole_tokens(x: jax.Array, tokens: int = 1) -> jax.Array:
    """x [B, T, ...], or with that axis of tokens, with every token on every device, its other dims and those of its
    cotangent spread as they were.

    Under an Explicit mesh it is gathered if its type says that it must be; under an Auto one, where no type does, XLA
    is told, and gathers what is spread."""
    mesh, tokens = jax.typeof(x).sharding.mesh, tokens % x.ndim
    auto = not mesh.empty and all(kind != AxisType.Explicit for kind in mesh.axis_types)
    if auto and AxisType.Auto in mesh.axis_types:
        dims = [None if axis == tokens else PartitionSpec.UNCONSTRAINED for axis in range(x.ndim)]
        return _constrained(NamedSharding(mesh, PartitionSpec(*dims)), x)
    dims = [() if axis == tokens else axes for axis, axes in enumerate(spec(x))]
    return reshard(x, mesh, _partition(dims)) if spec(x)[tokens] else x


# Outside jit a constraint may leave no dim open.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _constrained(sharding: NamedSharding, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)


def tokens_as(y: jax.Array, x: jax.Array) -> jax.Array:
    """y [B, T, ...], whose tokens are whole, with them spread as x's type says that they are in x."""
    tokens, dims = spec(x)[1], spec(y)
    if not tokens or dims[1] == tokens:
        return y
    return reshard(y, jax.typeof(x).sharding.mesh, _partition([dims[0], tokens, *dims[2:]]))


def own_heads(x: jax.Array, w: jax.Array) -> Axes:
    """The mesh axes that each device keeps its share of the heads of w [R, H, D] over: those that do not spread x."""
    taken = {axis for axes in spec(x) for axis in axes}
    return tuple(axis for axis in spec(w)[1] if axis not in taken)


def gather_but_heads(w: jax.Array, heads: Axes) -> jax.Array:
    """w [R, H, D] whole on every device but for its heads, which are spread over `heads`."""
    if spec(w) == ((), heads, ()):
        return w
    return reshard(w, jax.typeof(w).sharding.mesh, PartitionSpec(None, heads or None, None))


def shard_shape(array: jax.Array, dims: tuple[Axes, ...]) -> list[int]:
    """Of a device's share of an array whose dims are spread over those mesh axes."""
    mesh = jax.typeof(array).sharding.mesh
    return [n // math.prod(mesh.shape[axis] for axis in axes) for n, axes in zip(array.shape, dims, strict=True)]


def values(primals: tuple) -> tuple:
    """The arguments behind what a forward rule that asks for `symbolic_zeros` is handed: None, arrays, pytrees."""
    return jax.tree.map(lambda primal: primal.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))


def dense(value: jax.Array | SymbolicZero) -> jax.Array:
    """A cotangent as an array: rules that ask for `symbolic_zeros` are handed zeros by name."""
    if not isinstance(value, SymbolicZero):
        return value
    aval = value.aval
    zeros = jnp.zeros(aval.shape, aval.dtype)
    if aval.manual_axis_type.varying:
        zeros = jax.lax.pcast(zeros, tuple(sorted(aval.manual_axis_type.varying)), to="varying")
    mesh = aval.sharding.mesh
    return reshard(zeros, mesh, aval.sharding.spec) if any(aval.sharding.spec) else zeros


def local(op: str, rule: str, function: Callable, *arrays: jax.Array | None, opaque: bool = False):
    """Runs `function(*arrays)`, which works alike on shards of the lower-case dims of `rule`, on each device's shards.

    `rule` reads like einsum with spaces, "b t h D, b t P -> b t h D": a lower-case dim may be sharded, an upper-case
    one must be whole (ValueError otherwise, naming op, array, dim and mesh axes). A dim of size 1 broadcasts. Arrays
    may be None. An output that lacks a sharded dim of the inputs is a partial sum, and is summed over its axes.
    opaque: XLA cannot partition the function by itself; under an Auto mesh it gathers what is to be whole.
    """
    inputs, outputs = ([term.split() for term in side.split(",")] for side in rule.split("->"))
    mesh = _explicit_mesh(*arrays)
    if mesh is None:
        return _partitioned(op, inputs, outputs, function, arrays) if opaque and _auto(arrays) else function(*arrays)
    dims: dict[str, Axes] = {}
    for number, (array, names) in enumerate(zip(arrays, inputs, strict=True)):
        if array is None:
            continue
        for position, (name, axes) in enumerate(zip(names, spec(array), strict=True)):
            if axes and name.isupper():
                if math.prod(mesh.shape[axis] for axis in axes) == 1:
                    continue  # "sharded" over one device is whole
                raise ValueError(
                    f"{op}: found dim {position} ({name}) of input {number}, {jax.typeof(array)}, sharded over mesh "
                    f"axes {axes}, wanted it whole on every device"
                )
            if axes:
                dims.setdefault(name, axes)
    used = [axis for axes in dims.values() for axis in axes]
    if len(set(used)) != len(used):
        raise ValueError(f"{op}: found one mesh axis sharding two dims, {dims}, wanted one dim an axis")

    def place(names: list[str], array: jax.Array | None = None) -> PartitionSpec:
        whole = [array is not None and size == 1 for size in (array.shape if array is not None else names)]
        return _partition([() if w else dims.get(name, ()) for name, w in zip(names, whole, strict=True)])

    def axes_of(names: list[str]) -> set[str]:
        return {axis for name in names for axis in dims.get(name, ())}

    def body(*shards):
        results = function(*shards)
        single = not isinstance(results, tuple)
        summed = []
        for result, names in zip((results,) if single else results, outputs, strict=True):
            partial = varying(result).intersection(used) - axes_of(names)
            summed.append(jax.lax.psum(result, tuple(sorted(partial))) if partial else result)
        return summed[0] if single else tuple(summed)

    in_specs = tuple(place(names, array) for names, array in zip(inputs, arrays, strict=True))
    out_specs = tuple(map(place, outputs))
    arrays = tuple(
        array if array is None or _partition(spec(array)) == wanted else reshard(array, mesh, wanted)
        for array, wanted in zip(arrays, in_specs, strict=True)
    )
    if not used:
        return function(*arrays)
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs if len(out_specs) > 1 else out_specs[0],
        axis_names=set(used),  # no other: under vmap a mapped dim may be sharded over one of those
    )
    return mapped(*arrays)


def _auto(arrays: Sequence[jax.Array | None]) -> bool:
    """Whether a program is being traced of which XLA may yet decide how these arrays are spread."""
    arrays = [array for array in arrays if array is not None]
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    decided = any(kind != AxisType.Auto for mesh in meshes for kind in mesh.axis_types) or any(map(varying, arrays))
    return not decided and any(isinstance(array, jax.core.Tracer) for array in arrays)


def underivable(op: str, run: Callable) -> Callable:
    """`run`, and an error that says what to do for who differentiates the rule that launches it."""

    @jax.custom_jvp
    def guarded(*arrays):
        return run(*arrays)

    @guarded.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            f"{op}: found a derivative of a kernel itself (a second derivative, or forward mode), wanted a first one; "
            "implementation='xla' has it where there is one"
        )

    return guarded


def _partitioned(op: str, inputs: list[list[str]], outputs: list[list[str]], function: Callable, arrays):
    """`function(*arrays)`, which XLA partitions by the names of dims. custom_partitioning has no rule for vmap: there
    the batch is one more dim, named anew, of the vmapped function."""
    given = [i for i, array in enumerate(arrays) if array is not None]
    inputs = [inputs[i] for i in given]

    def on_given(*values):
        values = dict(zip(given, values, strict=True))
        return function(*(values.get(i) for i in range(len(arrays))))

    run = jax.custom_batching.custom_vmap(_by_rule(inputs, outputs, on_given))

    @run.def_vmap
    def batch(size, differs, *values):
        name = f"vmapped{sum(name.startswith('vmapped') for name in outputs[0])}"
        named = [[name, *names] if d else names for names, d in zip(inputs, differs, strict=True)]
        mapped = jax.vmap(on_given, in_axes=[0 if d else None for d in differs])
        results = _partitioned(op, named, [[name, *names] for names in outputs], mapped, values)
        return results, jax.tree.map(lambda _: True, results)

    return underivable(op, run)(*(arrays[i] for i in given))


def _by_rule(inputs: list[list[str]], outputs: list[list[str]], function: Callable) -> Callable:
    def run(*arrays):
        spread = {
            n for names, a in zip(inputs, arrays, strict=True) for n, s in zip(names, a.shape, strict=True) if s > 1
        }
        ones = (f"One{i}" for i in itertools.count())  # dims of size 1 are no factor of another's size
        into = [
            [name if size > 1 else next(ones) for name, size in zip(names, array.shape, strict=True)]
            for names, array in zip(inputs, arrays, strict=True)
        ]
        out = [[name if name in spread else next(ones) for name in names] for names in outputs]
        rule = " -> ".join(", ".join(map(" ".join, side)) for side in (into, out))
        # In the order in which they appear, as Shardy wants them.
        whole = tuple(dict.fromkeys(name for names in into + out for name in names if not name.islower()))

        def dims_of(mesh, arguments, results):
            named = list(zip(into + out, [*arguments, *jax.tree.leaves(results)], strict=True))
            return _axes_by_name(mesh, into, arguments, named)

        def infer(mesh, arguments, results):
            return _like(results, _named_shardings(mesh, dims_of(mesh, arguments, results), out))

        def partition(mesh, arguments, results):
            dims = dims_of(mesh, arguments, results)

            def on_shards(*shards):
                found, summed = function(*shards), []
                for result, names in zip(jax.tree.leaves(found), out, strict=True):
                    missing = tuple(axis for name, axes in dims.items() if name not in names for axis in axes)
                    summed.append(jax.lax.psum(result, missing) if missing else result)
                return _like(found, summed)

            return mesh, on_shards, infer(mesh, arguments, results), _named_shardings(mesh, dims, into)

        partitioned = custom_partitioning(function)
        partitioned.def_partition(partition, infer, sharding_rule=rule, need_replication_factors=whole)
        return partitioned(*arrays)

    return run


def _axes_by_name(mesh, inputs: list[list[str]], arguments, named) -> dict[str, Axes]:
    """What mesh axes XLA has spread the lower-case dims over: an axis spreads one, and into equal parts of all the
    arrays, in `named`, that have it (a dim of scales is 32 times shorter than that of codes)."""
    dims: dict[str, Axes] = {}

    def divides(name, axes):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        sizes = (size for names, array in named for n, size in zip(names, array.shape, strict=True) if n == name)
        return all(size % parts == 0 for size in sizes)

    for names, argument in zip(inputs, arguments, strict=True):
        given = argument.sharding.spec
        for name, entry in zip(names, tuple(given) + (None,) * (len(names) - len(given)), strict=True):
            axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            taken = {axis for other in dims.values() for axis in other}
            if axes and name.islower() and name not in dims and not taken.intersection(axes) and divides(name, axes):
                dims[name] = axes
    return dims


def _named_shardings(mesh, dims: dict[str, Axes], side: list[list[str]]) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, _partition([dims.get(name, ()) for name in names])) for names in side)


def _like(tree, leaves):
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def einsum(equation: str, x, w, dtype, like: jax.Array | None = None, scales: tuple | None = None) -> jax.Array:
    """`jnp.einsum` of two arrays, the result in `dtype` straight from the accumulator.

    scales: of x and w, which are FP8 codes then, float32 []: what is multiplied are their values.

    Under an Explicit mesh: x keeps its sharding, w follows x in the letters they share and is gathered over mesh axes
    that x already uses (FSDP); the result keeps what is left, or has the sharding of `like`.
    """
    run = jnp.einsum if scales is None else functools.partial(fp8_einsum.einsum, scales)
    mesh = _explicit_mesh(x, w)
    if mesh is None:
        return run(equation, x, w, preferred_element_type=dtype)
    (x_names, w_names), out_names = equation.split("->")[0].split(","), equation.split("->")[1]
    dims = dict(zip(x_names, spec(x), strict=True))
    taken = {axis for axes in dims.values() for axis in axes}
    for name, axes in zip(w_names, spec(w), strict=True):
        dims.setdefault(name, tuple(a for a in axes if a not in taken))
    w_dims = [dims[name] for name in w_names]
    if tuple(w_dims) != spec(w):
        w = reshard(w, mesh, _partition(w_dims))
    out = spec(like) if like is not None else [dims[name] for name in out_names]
    sharding = NamedSharding(mesh, _partition(out))
    return run(equation, x, w, preferred_element_type=dtype, out_sharding=sharding)
