"""Runs a kernel's launch specification on torch tensors: on the CPU in Triton's interpreter, or on a GPU.

To be imported before triton: TRITON_INTERPRET is read when a kernel is defined. The interpreter (3.6 to 3.9) casts
float32 to FP8 without saturating, and wrongly; here its casts are ml_dtypes' with saturation, as cvt.rn.satfinite.
"""

import os

import ml_dtypes
import numpy as np
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"

DTYPES = {name: getattr(torch, name) for name in ("uint8", "int32", "bfloat16", "float16", "float32")}
CANARY = 0x5A  # in every byte that a kernel is to write


def _patch_casts():
    from triton.runtime import interpreter

    types = {
        "fp8e4nv": (ml_dtypes.float8_e4m3fn, 448.0),
        "fp8e5": (ml_dtypes.float8_e5m2, 57344.0),
        "bf16": (ml_dtypes.bfloat16, None),
        "fp16": (np.float16, None),
        "fp32": (np.float32, None),
    }
    original = interpreter._convert_float

    def convert(x, source, target, rounding):
        s, t = types.get(str(source)), types.get(str(target))
        if s is None or t is None or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return original(x, source, target, rounding)
        values = np.frombuffer(x.tobytes(), s[0]).astype(np.float32)
        if t[1] is not None:
            values = np.where(np.isnan(values), values, np.clip(values, -t[1], t[1]))
        bits = np.frombuffer(values.astype(t[0]).tobytes(), f"uint{target.primitive_bitwidth}")
        if t[1] is not None:
            bits = np.where(np.isnan(values).ravel(), np.uint8(0x7F), bits)  # of any NaN, as the hardware's
        return bits.reshape(x.shape)

    interpreter._convert_float = convert


_arrays: list[tuple[int, int]] = []  # of the launch under way, where each begins and ends


def _patch_accesses():
    """Every access is to an array of the launch: elsewhere the interpreter reads whatever is there."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def checked(access):
        def call(self, pointers, *args):
            mask = args[0] if access.__name__ == "create_masked_load" else args[1]
            at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            # numpy's integers: a pointer is uint64
            inside = sum((at >= np.uint64(begin)) & (at + np.uint64(size) <= np.uint64(end)) for begin, end in _arrays)
            assert at.size == 0 or np.all(inside), f"{access.__name__}: an access outside the launch's arrays"
            return access(self, pointers, *args)

        return call

    for name in ("create_masked_load", "create_masked_store"):
        setattr(builder, name, checked(getattr(builder, name)))


if not GPU:
    _patch_casts()
    _patch_accesses()


def run(launch, *inputs):
    """The outputs; every byte of one that is not an alias starts as a canary."""
    outputs = []
    for shape, dtype in launch.outputs:
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        raw = torch.full((size,), CANARY, dtype=torch.uint8, device=inputs[0].device)
        outputs.append(raw.view(DTYPES[dtype]).reshape(shape))
    for i, o in launch.aliases:
        outputs[o] = inputs[i].clone()
    aliased = dict(launch.aliases)
    arguments = [outputs[aliased[i]] if i in aliased else x for i, x in enumerate(inputs)]
    options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=False)
    _arrays[:] = [(a.data_ptr(), a.data_ptr() + a.numel() * a.element_size()) for a in (*arguments, *outputs)]
    launch.kernel[launch.grid](*arguments, *outputs, **dict(launch.constants), **options)
    return outputs


def to_torch(x, dtype="float32"):
    """A tensor of a numpy array's values, on the device that kernels run on."""
    return torch.from_numpy(np.asarray(x, np.float32)).to(DTYPES[dtype]).to("cuda" if GPU else "cpu")


def to_numpy(x):
    return x.cpu().numpy() if x.dtype != torch.bfloat16 else x.cpu().float().numpy()
