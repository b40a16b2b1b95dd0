"""What a training step of MLA should hold and say on each GPU, by arithmetic alone: neither JAX nor XLA is asked.

`scaling.py` compiles the same for GPUs that are not there, and `tests/test_scaling.py` compares the two.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping

# DeepSeek-V3's attention.
M, H, R, C, N, P, V = 7168, 128, 1536, 512, 128, 64, 128
LAYERS, TOKENS = 61, 4096  # tokens: one row of them for each GPU, whatever the mesh
# By what a stack of layers keeps; and with fsdp cutting wo by heads, where they suffice, instead of by hidden size.
REMATS = ("everything", "latents", "nothing")
BY_HEADS = "latents, wo by heads"
F32, BF16 = 4, 2
SIZES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u8": 1, "s8": 1, "pred": 1, "f8e4m3fn": 1}
A_MACHINE = 8  # GPUs, neighbours along the last axes of a mesh
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh, and what is spread over its axes: the batch over dp and fsdp, parameters over fsdp (and over tp where
    they have heads), heads over tp. Another axis, that of context parallelism say, is a field here, what it spreads in
    `scaling_programs` (RULES, BATCH, TOKEN_AXIS), and what it says in `said` below."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def gpus(self) -> int:
        return math.prod(self.axes.values())

    @property
    def axes(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.axes.items() if size > 1) or "one GPU"


# FSDP over everything keeps least. dp x fsdp=8 keeps the gathers inside a machine's NVLink and lets one sum of
# gradients cross the network; tp=8 lets heads do what FSDP's gathers would, for a machine that shares its rows.
PLANS = (
    Plan(fsdp=8),
    Plan(fsdp=4, tp=2),
    Plan(fsdp=64),
    Plan(dp=8, fsdp=8),
    Plan(fsdp=8, tp=8),
    Plan(fsdp=256),
    Plan(dp=32, fsdp=8),
    Plan(fsdp=32, tp=8),
)

# name: (shape, the dim that fsdp cuts, the dim of heads); norms are whole everywhere.
WEIGHTS = {
    "wq_a": ((M, R), 0, None),
    "wq_b": ((R, H, N + P), 0, 1),
    "wkv_a": ((M, C + P), 0, None),
    "wkv_b": ((C, H, N + V), 0, 1),
    "wo": ((H, V, M), 2, 0),
}
NORMS = R + C
UP = ("wq_b", "wkv_b")  # what remat="latents" runs again


def gathered(plan: Plan, name: str) -> tuple[int, ...]:
    """The shape of a weight whole but for its heads."""
    shape, _, heads = WEIGHTS[name]
    return tuple(n // plan.tp if axis == heads else n for axis, n in enumerate(shape))


def shard(plan: Plan, name: str) -> tuple[int, ...]:
    """The shape of what a GPU keeps of a weight."""
    cut = WEIGHTS[name][1]
    return tuple(n // plan.fsdp if axis == cut else n for axis, n in enumerate(gathered(plan, name)))


def parameters(plan: Plan) -> int:
    """Numbers of a layer that a GPU keeps."""
    return NORMS + sum(math.prod(shard(plan, name)) for name in WEIGHTS)


def rows(plan: Plan) -> int:
    """Of tokens that a GPU works on: those of the GPUs that share heads."""
    return plan.tp


def activation(plan: Plan) -> int:
    """Bytes of x on a GPU, and of y, and of their cotangents."""
    return rows(plan) * TOKENS * M * BF16


def layer_arguments(plan: Plan) -> int:
    """Float32 parameters, x, and y's cotangent."""
    return parameters(plan) * F32 + 2 * activation(plan)


def layer_outputs(plan: Plan) -> int:
    """Gradients of the parameters, y, and x's cotangent."""
    return layer_arguments(plan)


def stack_arguments(plan: Plan, layers: int = LAYERS) -> int:
    """Float32 parameters, Adam's two moments, and x."""
    return 3 * layers * parameters(plan) * F32 + activation(plan)


def stacks(plan: Plan) -> tuple[str, ...]:
    """Which are compiled for a mesh."""
    return (*REMATS, BY_HEADS) if H % (plan.fsdp * plan.tp) == 0 else REMATS


def policy(stack: str) -> str:
    return "latents" if stack == BY_HEADS else stack


def saved(plan: Plan, remat: str) -> int:
    """Bytes of a layer, its input among them, that wait on a GPU for the backward pass: numbers a token, as in
    docs/remat.md, those of heads shared by tp."""
    whole, heads = M * BF16, 0
    if remat != "nothing":
        whole += (R + C + P) * BF16
        heads += H * (V * BF16 + F32)  # attention's output, and lse
    if remat == "everything":
        whole += 2 * F32  # both norms' rstd
        heads += H * (2 * (N + P) + V) * BF16  # q, k, v
    return rows(plan) * TOKENS * (whole + heads // plan.tp)


def stack_temporaries(plan: Plan, stack: str, layers: int = LAYERS) -> dict[str, int]:
    """What a step must hold besides its arguments, by name: all that grows with the number of layers."""
    gradients = layers * parameters(plan) * F32
    # XLA gathers along a dim that it has put first. wo's, which is last, is so in a copy of what all layers keep.
    copied = layers * math.prod(shard(plan, "wo")) * F32 if stack != BY_HEADS else 0
    return {"gradients": gradients, "saved": layers * saved(plan, policy(stack)), "wo in another order": copied}


def gathers(name: str, remat: str | None) -> int:
    """How often a step gathers a layer's weight: for each pass that multiplies by it. XLA does not share what a remat
    policy runs again and the backward pass itself. Nobody asks for y again: wo is in no second forward pass."""
    again = {None: (), "everything": (), "latents": UP, "nothing": ("wq_a", "wkv_a", *UP)}[remat]
    return 2 + (name in again)


def said(plan: Plan, remat: str | None = None) -> Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...], int]]:
    """What a layer's step says between GPUs: kind, dtype, shape of the array (the result of an all-gather or
    all-reduce, the operand of a reduce-scatter, what a collective-permute sends), mesh axes, times."""
    # Where both axes are of one length, XLA takes a down-projection's fsdp for tp: it hands each shard to the GPU that
    # then has it, gathers among those that share rows, and adds up parts of the gradient before it hands them back.
    swapped = ("wq_a", "wkv_a") if plan.fsdp == plan.tp > 1 else ()
    for name in WEIGHTS:
        times, whole, own = gathers(name, remat), gathered(plan, name), shard(plan, name)
        yield "all-gather", "bf16", whole, ("tp",) if name in swapped else ("fsdp",), times
        if name in swapped:
            yield "collective-permute", "bf16", own, ("fsdp", "tp"), times
            yield "collective-permute", "f32", own, ("fsdp", "tp"), 1
            yield "all-reduce", "f32", own, ("fsdp",), 1
        else:
            yield "reduce-scatter", "f32", whole, ("fsdp",), 1
        yield "all-reduce", "f32", own, ("dp",), 1
    yield "all-reduce", "f32", (NORMS,), ("dp", "fsdp"), 1
    tokens = (rows(plan), TOKENS)
    yield "all-reduce", "bf16", (*tokens, M), ("tp",), 1  # y
    for rank in (R, C):  # cotangents of latents, not of x: 3.4 times less
        yield "all-reduce", "bf16", (*tokens, rank), ("tp",), 1
    yield "all-reduce", "f32", (*tokens, P), ("tp",), 1  # that of the shared rotary key


def collectives(plan: Plan, remat: str | None = None, layers: int = 1) -> dict[str, dict[str, int]]:
    """kind: {array and size of its group: times}, as `scaling_hlo.collectives` finds them."""
    found = {kind: Counter() for kind in KINDS}
    for kind, dtype, shape, axes, times in said(plan, remat):
        group = math.prod(plan.axes[axis] for axis in axes)
        if group > 1:
            found[kind][array(dtype, shape, 1 if kind == "collective-permute" else group)] += times * layers
    return {kind: dict(arrays) for kind, arrays in found.items() if arrays}


def network(plan: Plan, remat: str | None = None) -> int:
    """Bytes of a layer's step that leave a machine through each of its network cards, one a GPU: of an array that is
    gathered or summed over g GPUs, k of them in each machine, a machine is sent what it lacks, 1 - k/g, once."""
    found, strides, inner = 0, {}, 1
    for axis, size in reversed(plan.axes.items()):
        strides[axis], inner = inner, inner * size
    for kind, dtype, shape, axes, times in said(plan, remat):
        group = math.prod(plan.axes[axis] for axis in axes)
        together = math.prod(min(plan.axes[axis], max(1, A_MACHINE // strides[axis])) for axis in axes)
        if group > 1:
            bytes_ = times * math.prod(shape) * SIZES[dtype]
            if kind == "collective-permute":
                found += bytes_ if group > A_MACHINE else 0
            else:
                found += (2 if kind == "all-reduce" else 1) * bytes_ * (group - together) // (group * together)
    return found


def array(dtype: str, shape, group: int) -> str:
    return f"{dtype}[{','.join(map(str, shape))}] over {group}"


def split(text: str) -> tuple[str, tuple[int, ...], int]:
    """What `array` was made of."""
    dtype, _, rest = text.partition("[")
    dims, _, group = rest.partition("] over ")
    return dtype, tuple(int(n) for n in dims.split(",") if n), int(group)


def size(text: str) -> int:
    """Bytes of an array as `array` writes it."""
    dtype, shape, _ = split(text)
    return SIZES[dtype] * math.prod(shape)


def total(arrays: Mapping[str, int]) -> int:
    return sum(size(text) * times for text, times in arrays.items())


def sent(kind: str, arrays: Mapping[str, int]) -> int:
    """Bytes a GPU sends for them by the ring: each its share of what is gathered or scattered, to all but itself."""
    passes = {"all-reduce": 2}.get(kind, 1)
    found = 0
    for text, times in arrays.items():
        _, _, group = split(text)
        found += times * passes * size(text) * (group - 1) // group if group > 1 else times * size(text)
    return found
