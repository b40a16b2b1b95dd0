"""What one thread of a warpgroup does, for the parts of Pallas Mosaic GPU kernels that are finer than an array.

Functions written on `Threads` compute with values that every thread has one of, by Python's operators: float32, int32,
int64. Here they are emitted as MLIR; the tests run the same functions on NumPy arrays with an entry a thread, which is
how shuffles and byte permutations are checked without a GPU.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector


class Value:
    """An MLIR value with operators. Comparisons are signed and give conditions; `>>` shifts in zeros."""

    def __init__(self, value: ir.Value):
        self.ir = value

    def _with(self, ints: Callable, floats: Callable | None, other: "Value | int | float") -> "Value":
        if not isinstance(other, Value):
            other = Value(arith.constant(self.ir.type, other))
        operation = floats if isinstance(self.ir.type, ir.F32Type) else ints
        return Value(operation(self.ir, other.ir))

    def __add__(self, other):
        return self._with(arith.addi, arith.addf, other)

    def __sub__(self, other):
        return self._with(arith.subi, arith.subf, other)

    def __mul__(self, other):
        return self._with(arith.muli, arith.mulf, other)

    def __and__(self, other):
        return self._with(arith.andi, None, other)

    def __or__(self, other):
        return self._with(arith.ori, None, other)

    def __lshift__(self, other):
        return self._with(arith.shli, None, other)

    def __rshift__(self, other):
        return self._with(arith.shrui, None, other)

    def __floordiv__(self, other):
        return self._with(arith.divui, None, other)

    def __mod__(self, other):
        return self._with(arith.remui, None, other)

    def __lt__(self, other):
        return self._with(lambda a, b: arith.cmpi(arith.CmpIPredicate.slt, a, b), None, other)

    def __ge__(self, other):
        return self._with(lambda a, b: arith.cmpi(arith.CmpIPredicate.sge, a, b), None, other)

    def __ne__(self, other):
        return self._with(lambda a, b: arith.cmpi(arith.CmpIPredicate.ne, a, b), None, other)


class Threads:
    """The 128 threads of a warpgroup. lane, warp: int32, this thread's."""

    def __init__(self):
        self.i32, self.i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        thread = self._asm(self.i32, "mov.u32 $0, %tid.x;", "=r")
        self.lane, self.warp = thread & 31, (thread >> 5) & 3

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(arith.select(condition.ir, yes.ir, no.ir))

    def constant(self, number: int) -> Value:
        return Value(arith.constant(self.i32, number))

    def long(self, value: Value) -> Value:
        return Value(arith.extsi(self.i64, value.ir))

    def bits(self, value: Value) -> Value:
        return Value(arith.bitcast(self.i32, value.ir))

    def float(self, bits: Value) -> Value:
        return Value(arith.bitcast(ir.F32Type.get(), bits.ir))

    def largest(self, values: Sequence[Value]) -> Value:
        """The largest magnitude; NaN if there is one."""
        first, *rest = (Value(math.absf(v.ir)) for v in values)
        for value in rest:  # MLIR's own maximum becomes four instructions
            first = self._asm(ir.F32Type.get(), "max.NaN.f32 $0, $1, $2;", "=f,f,f", first, value)
        return first

    def maximum(self, a: Value, b: Value) -> Value:
        """Of int32."""
        return Value(arith.maxsi(a.ir, b.ir))

    def shuffle_xor(self, value: Value, mask: int) -> Value:
        """int32 `value` of the lane whose number differs in `mask`."""
        return self._asm(self.i32, f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", "=r,r", value, pinned=True)

    def shuffle(self, value: Value, lane: Value) -> Value:
        """int32 `value` of that lane of the warp."""
        return self._asm(self.i32, "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", value, lane, pinned=True)

    def permute(self, low: Value, high: Value, bytes_: Value | int) -> Value:
        """The four bytes, of the eight of two int32, that the hexadecimal digits name, lowest first."""
        digits = bytes_ if isinstance(bytes_, Value) else self.constant(bytes_)
        return self._asm(self.i32, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", low, high, digits)

    def e4m3(self, *values: Value) -> Value:
        """Four float32 as E4M3 codes, to nearest even and saturating, in the bytes of int32."""
        cast = "cvt.rn.satfinite.e4m3x2.f32"
        template = f"{{ .reg .b16 a, b; {cast} a, $2, $1; {cast} b, $4, $3; mov.b32 $0, {{a, b}}; }}"
        return self._asm(self.i32, template, "=r,f,f,f,f", *values)

    def bfloat16(self, low: Value, high: Value) -> Value:
        """Two float32, rounded, in one int32."""
        return self._asm(self.i32, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", low, high)

    def load(self, ref, at: Value, count: int, *, bits: int = 32) -> list[Value]:
        """`count` neighbouring numbers of global memory, int32 (of fewer bits: with zeros above), from byte `at`."""
        kind = ir.IntegerType.get_signless(bits)
        pointer = llvm.inttoptr(llvm.PointerType.get(1), self._address(ref, at).ir)
        if count == 1:
            word = llvm.load(kind, pointer, alignment=bits // 8)
            return [Value(word if bits == 32 else arith.extui(self.i32, word))]
        words = llvm.load(ir.VectorType.get((count,), kind), pointer, alignment=count * bits // 8)
        return [_entry(words, i) for i in range(count)]

    def store(self, ref, at: Value, words: Sequence[Value], mask: Value, *, bits: int = 32) -> None:
        """int32 words, or the lower `bits` of one, to byte `at` of global memory where `mask` holds."""
        value = ", ".join(f"${i + 2}" for i in range(len(words)))
        many, value = (f".v{len(words)}", f"{{{value}}}") if len(words) > 1 else ("", value)
        letters = ",".join(["b", "l", *["r"] * len(words)])
        self._asm(None, f"@$0 st.global{many}.b{bits} [$1], {value};", letters, mask, self._address(ref, at), *words)

    def _address(self, ref, at: Value) -> Value:
        return Value(llvm.ptrtoint(self.i64, mgpu.utils.memref_ptr(ref))) + at

    def _asm(self, result, template: str, constraints: str, *args: Value, pinned: bool = False) -> Value | None:
        """pinned: what must stay where it is, since other threads take part or read it."""
        operands, pinned = [a.ir for a in args], pinned or result is None
        found = llvm.inline_asm(result, operands, template, constraints, has_side_effects=pinned, asm_dialect=0)
        return None if result is None else Value(found)


def _entry(words: ir.Value, i: int) -> Value:
    return Value(vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])))


def inline(function: Callable, arrays: Sequence, refs: Sequence, scalars: Sequence, results: Sequence = ()):
    """Runs function(threads, arrays, refs, scalars) for each thread of the warpgroup that calls.

    arrays: float32 [rows, columns], multiples of 64 and 8, where wgmma leaves its accumulators. The function has each
    as a NumPy array of values [rows / 64, columns / 8, 2, 2]: those of rows 16 warp + lane // 4 + 8 i of every 64 and
    of columns 2 (lane % 4) + j of every 8. refs: global memory, for `load` and `store`. scalars: int32. results: the
    shapes of bf16 arrays of that layout; the function returns each as int32 [rows / 64, columns / 8, 2], two columns in
    one.
    """
    layout = plgpu.Layout.WGMMA
    types = [layout] * len(arrays) + [plgpu.RefType()] * len(refs) + [plgpu.Layout.WG_SPLAT] * len(scalars)
    shapes = [plgpu.ShapeDtypeStruct(shape, np.dtype("bfloat16"), layout=layout) for shape in results]

    @plgpu.inline_mgpu(arg_types=tuple(types), return_type=tuple(shapes))
    def run(ctx, *args):
        given = [_values(a) for a in args[: len(arrays)]]
        numbers = [Value(a.registers.item()) for a in args[len(arrays) + len(refs) :]]
        found = function(Threads(), given, args[len(arrays) : len(arrays) + len(refs)], numbers)
        return tuple(_fragments(words, shape) for words, shape in zip(found or (), results, strict=True))

    return run(*arrays, *refs, *scalars)


def _values(array) -> np.ndarray:
    rows, columns = array.shape
    pairs = [[_entry(register, i) for i in range(2)] for register in array.registers.flat]
    values = np.empty((rows // 64 * columns // 8 * 2, 2), object)
    for i, pair in enumerate(pairs):
        values[i] = pair
    return values.reshape(rows // 64, columns // 8, 2, 2)


def _fragments(words: np.ndarray, shape: tuple[int, ...]):
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    layout = mgpu.WGMMA_LAYOUT
    registers = np.empty(words.size, object)
    for i, word in enumerate(words.flat):
        registers[i] = mgpu.utils.bitcast(word.ir, pair)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )
