"""What is installed, what importing it pulls in, and which way imports go."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Each layer may import itself and what stands before it.
LAYERS = ["kernels", "ffi", "jax_mla", "flax_examples", "benchmarks", "tests"]


def imports(path: Path) -> set[str]:
    """Dotted names of every module a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Kernels are loaded without the package too, so within their folder they say `from .launch import`.
            assert node.level == 0 or (node.level == 1 and path.parent.name == "kernels"), f"{path}: relative import"
            module = f"kernels.{node.module}" if node.level else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> str | None:
    for layer in ("kernels", "ffi"):
        if module.startswith(f"jax_mla.{layer}"):
            return layer
    top = module.split(".")[0]
    return top if top in LAYERS else None


def files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS[:5])
def test_imports_go_one_way(layer):
    assert files(layer)
    for path in files(layer):
        for module in imports(path):
            target = layer_of(module)
            if target is not None:
                limit = LAYERS.index(layer)
                if layer in ("flax_examples", "benchmarks"):  # users of the library, not of each other
                    assert target in ("jax_mla", layer), f"{path} imports {module}"
                assert LAYERS.index(target) <= limit, f"{path} imports {module}"


def test_torch_and_transformers_appear_only_in_tests():
    for layer in LAYERS[:5]:
        for path in files(layer):
            assert not {m.split(".")[0] for m in imports(path)} & {"torch", "transformers"}, path
    dependencies = PROJECT["project"]["optional-dependencies"]
    named = {
        extra for extra, wanted in dependencies.items() if any(w.startswith(("torch", "transformers")) for w in wanted)
    }
    assert named == {"golden"} and "torch==2.13.0" in dependencies["golden"]


def test_kernels_know_no_framework():
    """But those that only JAX can launch."""
    for path in files("kernels"):
        framework = {"torch", "flax"} if path.name.startswith("mosaic_") else {"jax", "torch", "flax"}
        assert not {m.split(".")[0] for m in imports(path)} & framework, path


def test_importing_the_package_pulls_in_no_extra():
    code = """
import sys, jax_mla
extras = {"flax", "triton", "jax_triton", "torch", "transformers", "optax", "orbax", "safetensors"}
heavy = {m.split(".")[0] for m in sys.modules} & extras
assert not heavy, heavy
assert set(jax_mla.__all__) <= set(dir(jax_mla))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.golden
def test_transformers_finds_its_own_kernels():
    """It needs the published package `kernels` since 5.25; first on the path, the checkout's folder would hide that."""
    try:
        theirs = importlib.metadata.files("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this transformers needs no package named kernels")
    assert theirs and Path(importlib.util.find_spec("kernels").origin).parent != ROOT / "kernels"


def test_extras_and_base_dependencies():
    project = PROJECT["project"]
    assert {d.split(">")[0] for d in project["dependencies"]} == {"jax", "numpy", "ml_dtypes"}
    wanted = {"cuda", "blackwell", "flax", "convert", "examples", "test", "golden", "bench"}
    assert set(project["optional-dependencies"]) == wanted
    assert project["requires-python"] == ">=3.11,<3.14" and project["license"] == "Apache-2.0"


def test_the_wheel_holds_one_package(tmp_path):
    """kernels/ and ffi/ arrive as jax_mla.kernels and jax_mla.ffi, nothing else arrives, and each file is there."""
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools >= 77 to build the wheel")
    source = tmp_path / "source"
    for name in ("jax_mla", "kernels", "ffi"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})"
    built = subprocess.run([sys.executable, "-P", "-c", code], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    code_files = {n for n in names if ".dist-info/" not in n}
    wanted = {f"jax_mla/{p.relative_to(ROOT / 'jax_mla')}" for p in files("jax_mla")} | {"jax_mla/py.typed"}
    for layer in ("kernels", "ffi"):
        wanted |= {f"jax_mla/{layer}/{p.relative_to(ROOT / layer)}" for p in files(layer)}
    assert code_files == wanted
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_nothing_of_a_machine_is_kept():
    """No environment, and no path of somebody's machine, in what git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to list what is tracked")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tops = {"jax_mla", "kernels", "ffi", "tests", "flax_examples", "benchmarks", "docs", ".ci"}
    assert {name.split("/")[0] for name in tracked if "/" in name} == tops
    for name in tracked:
        if name.endswith((".py", ".md", ".json", ".toml", ".sh", "/run")):
            assert not re.search(r"(?<![\w.])/(home|root|work|Users)/\w", (ROOT / name).read_text(encoding="utf-8")), (
                name
            )


def test_files_stay_readable():
    """80 to 350 lines is what we aim at; nothing in the library passes the upper end."""
    for layer in LAYERS[:5]:
        for path in files(layer):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, path
