"""What a compiled program says between GPUs, and which kernels it calls, read from XLA's text of it."""

import re
from collections import Counter

from benchmarks.scaling_model import KINDS, array

_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\((.*)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)=(\S+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


def collectives(text: str) -> dict[str, dict[str, int]]:
    """kind: {array and size of its group: how often a step has it}. A synchronous one and a -start count once, a -done
    not at all, one in a loop as often as the loop turns; one of several arrays is several. The array is what is
    gathered, reduced or sent: the result, but for a reduce-scatter, of which it is the operand."""
    found: dict[str, Counter] = {}
    for times, line in _lines(text):
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        shape, kind, start, rest = match.groups()
        shapes = _nested(shape)
        if start and (isinstance(shapes[0], list) or kind != "all-reduce"):
            shapes = [shapes[1]]  # after the operands; an all-reduce-start of jax 0.10 has results alone
        size = 1 if kind == "collective-permute" else _group(rest)
        for dtype, dims in _flat(shapes):
            if kind == "reduce-scatter":
                axis = int(re.search(r"dimensions=\{(\d+)\}", rest)[1])
                dims = [n * size if i == axis else n for i, n in enumerate(dims)]
            found.setdefault(kind, Counter())[array(dtype, dims, size)] += times
    return {kind: dict(sorted(arrays.items())) for kind, arrays in sorted(found.items())}


def custom_calls(text: str, targets: tuple[str, ...]) -> dict[str, int]:
    """How often a step calls each of them."""
    found = Counter()
    for times, line in _lines(text):
        match = _TARGET.search(line)
        if match and match[1] in targets:
            found[match[1]] += times
    return dict(sorted(found.items()))


def _lines(text: str):
    """(how often it runs, the line) of every instruction."""
    bodies, name, entry = {}, None, None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name is not None and " = " in line:
            bodies[name].append(line)
    times = Counter({entry: 1})
    for name in reversed(bodies):  # a computation stands before its callers
        for line in bodies[name]:
            for role, called in _CALLED.findall(line):
                turns = 1
                if role == "body":
                    known = _TRIPS.search(line)
                    turns = int(known[1]) if known else _unknown(line)
                for each in re.findall(r"%([\w.-]+)", called):
                    times[each] += times[name] * turns
    for name, lines in bodies.items():
        yield from ((times[name], line) for line in lines if times[name])


def _unknown(line: str) -> int:
    raise ValueError(f"text: found a loop, {line.strip()[:60]!r}, wanted one whose number of turns XLA knows")


def _nested(shape: str) -> list:
    """A shape as lists of (dtype, dims), one within the other as its tuples are."""
    stack = [[]]
    for token in re.findall(r"[()]|\w+\[[\d,]*\]", re.sub(r"/\*.*?\*/", "", shape)):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            dtype, dims = _ARRAY.fullmatch(token).groups()
            stack[-1].append((dtype, [int(n) for n in dims.split(",") if n]))
    (top,) = stack
    return top[0] if len(top) == 1 and isinstance(top[0], list) else top


def _flat(shapes: list) -> list:
    return [a for shape in shapes for a in (_flat(shape) if isinstance(shape, list) else [shape])]


def _group(attributes: str) -> int:
    """How many GPUs take part, in any of the three ways in which XLA writes it."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        size = 1
        for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]):
            size *= int(part or sizes[axis])
        return size
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(listed[1].split(","))
    raise ValueError(f"text: found no group of replicas in {attributes[:80]!r}, wanted a list, an iota or a mesh")
