"""Compiles every launch at DeepSeek-V3's shapes for a GPU that is not here. `python tests/compiled_kernels.py 90` gives
as JSON registers, bytes spilled and the PTX instructions that tell whether the casts are the hardware's. A process of
its own, as `lowering.py`."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from jax_mla.kernels import attention, attention_backward, fp8, fp8_heads, mxfp8, norm, rope, rope_mxfp8
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"bfloat16": "*bf16", "float32": "*fp32", "uint8": "*u8", "int32": "*i32"}
R, H, TABLE = 8192, 128, (4096, 0, 1)
BF16, F32, U8, I32 = "bfloat16", "float32", "uint8", "int32"
SPLIT = (R, H, 128, 64, 128, TABLE, "pairs", "halves", BF16)
# name: (launch, dtypes of its inputs)
LAUNCHES = {
    "rope, in place": (rope.rope(R, H, 192, 64, TABLE, "halves", "halves", False, BF16, False), [BF16, F32, F32]),
    "rope, pairs": (rope.rope(R, H, 192, 64, TABLE, "pairs", "halves", False, BF16, True), [BF16, F32, F32]),
    "split": (rope.split(*SPLIT), [BF16, BF16, F32, F32]),
    "split_backward": (rope.split_backward(*SPLIT), [BF16, BF16, F32, F32]),
    "quantize rowwise": (mxfp8.quantize(R, H * 192, "rowwise"), [BF16]),
    "quantize both": (mxfp8.quantize(R, H * 192, "both"), [BF16]),
    "quantize both, tiled": (mxfp8.quantize(R, H * 192, "both", tiled=(4096, 192)), [BF16]),
    "quantize both, float32": (mxfp8.quantize(R, H * 192, "both"), [F32]),
    "quantize both, values": (mxfp8.quantize(R, H * 256, "both", values=(BF16, BF16)), [BF16]),
    "quantize both, values and codes": (mxfp8.quantize(R, 7168, "both", values=(BF16, None)), [BF16]),
    "rope_quantize, values": (
        rope_mxfp8.rope_quantize(R, H, 192, 64, TABLE, "halves", "pairs", True, values=(BF16, BF16)),
        [BF16, F32, F32],
    ),
    "norm_quantize, values and codes": (norm.norm_quantize(R, 1536, False, values=(BF16, None)), [BF16, F32, F32]),
    "dequantize": (mxfp8.dequantize(R, H * 192, "columnwise", BF16), [U8, U8]),
    "swizzle": (mxfp8.swizzle(2, 4096, H, 6, "rowwise"), [U8]),
    "rope_quantize": (
        rope_mxfp8.rope_quantize(R, H, 192, 64, TABLE, "halves", "pairs", True),
        [BF16, F32, F32],
    ),
    "norm": (norm.norm(R, 7168, 1e-6, False, BF16), [BF16, F32]),
    "rstd": (norm.rstd(R, 7168, 1e-6), [BF16]),
    "norm_quantize, rowwise": (norm.norm_quantize(R, 1536, False, "rowwise"), [BF16, F32, F32]),
    "norm_quantize": (norm.norm_quantize(R, 7168, False), [BF16, F32, F32]),
    "norm_backward": (norm.norm_backward(R, 7168, False, BF16), [BF16, F32, F32, BF16]),
    "fp8 quantize rowwise": (fp8.quantize(1, R, 7168, "rowwise", BF16), [BF16, F32]),
    "fp8 quantize rowwise, float32": (fp8.quantize(1, 1536, H * 192, "rowwise", F32), [F32, F32]),
    "fp8 quantize columnwise, ragged": (fp8.quantize(1, R, 576 + 5, "columnwise", BF16), [BF16, F32]),
    "fp8 quantize both": (fp8.quantize(1, R, 7168, "both", BF16), [BF16, F32]),
    "fp8 quantize both, e5m2": (fp8.quantize(1, R, 7168, "both", BF16, "e5m2"), [BF16, F32]),
    "fp8 split amax": (fp8_heads.split_amax(R, H, 128, 64, 128, TABLE, "pairs", "halves"), [BF16, BF16, F32, F32]),
    "fp8 join_quantize": (fp8_heads.join_quantize(1, R, H, 128, 64, 128, BF16, "e4m3"), [BF16, BF16, F32]),
}


def attentions(packed: bool) -> dict:
    shape = attention.Shape(2, 4096, 4096, H, 192, 128, 192**-0.5, True, packed=packed)
    return {
        "attention": (attention.forward(shape, BF16), [*[BF16] * 3, I32, I32]),
        "attention dq": (attention_backward.dq(shape, BF16), [*[BF16] * 5, F32, F32, I32, I32]),
        "attention dkv": (attention_backward.dkv(shape, BF16), [*[BF16] * 4, F32, F32, I32, I32]),
    }


def compiled(launch, inputs: list[str], capability: int) -> str:
    """Its PTX."""
    constants, names = dict(launch.constants), launch.kernel.arg_names
    pointers = iter([*inputs, *(dtype for _, dtype in launch.outputs)])
    signature = {name: "constexpr" if name in constants else TYPES[next(pointers)] for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    source = ASTSource(launch.kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=False)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def assembled(ptx: str) -> dict:
    """ptxas's own report."""
    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = re.search(r"\.target (\w+)", ptx)[1]
    # The newer of the two that Triton carries knows its PTX.
    program = next(p for p in (programs / "ptxas-blackwell", programs / "ptxas") if p.exists())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [program, "-v", f"--gpu-name={target}", path, "-o", Path(folder) / "kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return {"registers": int(re.search(r"Used (\d+) registers", report)[1]), "spilled": spilled}


def main(capability: int) -> None:
    report = {}
    # They take longest to compile: where they are used all, of packed sequences, which are larger; elsewhere one.
    more = attentions(True) if capability == 90 else {"attention": attentions(False)["attention"]}
    for name, (launch, inputs) in (LAUNCHES | more).items():
        ptx = compiled(launch, inputs, capability)
        report[name] = assembled(ptx) | {
            "casts": len(re.findall(r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32", ptx)),
            "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
            "flushing": len(re.findall(r"\.ftz\.", ptx)),
            "tensor cores": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
