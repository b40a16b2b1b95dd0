"""A kernel launch as plain data, so that every framework that launches a kernel launches the same one."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Launch:
    """kernel(*inputs, *outputs, **constants) over `grid`, all arrays contiguous.

    outputs: (shape, dtype name) of each, in the kernel's order. constants: the kernel's constexprs, by name. aliases:
    (input, output) pairs that are one buffer: the kernel writes a part of that input and does not touch the output's
    pointer; who launches it gives it a buffer that nobody reads afterwards, or a copy.
    """

    kernel: Any  # triton.JITFunction
    grid: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int = 4
    num_stages: int = 2
    aliases: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        names = self.kernel.arg_names
        unknown = [name for name, _ in self.constants if name not in names]
        if unknown:
            raise ValueError(f"constants: found {unknown}, wanted arguments of {self.kernel.__name__}: {names}")

    @property
    def inputs(self) -> int:
        return len(self.kernel.arg_names) - len(self.outputs) - len(self.constants)


def require(holds: bool, argument: str, found, wanted: str) -> None:
    """ValueError unless it holds: a kernel would read or write what is not its."""
    if not holds:
        raise ValueError(f"{argument}: found {found!r}, wanted {wanted}")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
