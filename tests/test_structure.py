"""Holds the shape of the package: which folder may import which, what stays free of torch, how modules are named and how long they get."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "loramux"

MAY_IMPORT = {
    "gateway": {"gateway", "engine", "lora", "grammar", "adapters", "kernels"},
    "engine": {"engine", "lora", "grammar", "adapters", "kernels"},
    "lora": {"lora", "adapters", "kernels"},
    "grammar": {"grammar", "adapters", "kernels"},
    "adapters": {"adapters"},
    "kernels": {"kernels"},
    "errors": set(),
    "__main__": {"gateway"},
    "__init__": set(),
}
"""gateway -> engine -> {lora, grammar} -> {adapters, kernels}, and everyone -> errors."""

ONLY_GATEWAY = {"fastapi", "starlette", "uvicorn", "typer", "redis"}

TORCH_FREE = (
    "gateway",
    "adapters",
    "errors",
    *(f"engine.{name}" for name in ("types", "protocol", "config", "interface", "client", "checkpoint")),
    *(f"engine.{name}" for name in ("scheduler", "block_pool", "prefix", "fair_queue", "sequence", "plan")),
    "lora.slots",
    "lora.types",
    "grammar.types",
    "grammar.coverage",
)
"""Modules, and folders with all they hold, that run without torch."""

MAX_LINES = 450


class Import(NamedTuple):
    module: str
    line: int
    type_checking: bool
    """Under `if TYPE_CHECKING`."""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(tree: ast.AST, type_checking: bool = False) -> Iterator[Import]:
    """Every import at any depth. `from a import b` gives both `a` and `a.b`, since b may be a module; a relative one gives `.`"""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, type_checking) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." if node.level else str(node.module)
            yield Import(base, node.lineno, type_checking)
            yield from (Import(f"{base}.{alias.name}", node.lineno, type_checking) for alias in node.names)
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            yield from imports(ast.Module(node.body, []), True)
            yield from imports(ast.Module(node.orelse, []), type_checking)
        else:
            yield from imports(node, type_checking)


def allowed(part: str, found: Import) -> bool:
    """Whether a module in a folder of loramux/ (or a file beside them) may import this."""
    top, *rest = found.module.split(".")
    if top == "loramux":
        return not rest or rest[0] == "errors" or rest[0] in MAY_IMPORT[part]
    if top in ONLY_GATEWAY:
        return part == "gateway" or (top == "redis" and part == "adapters" and found.type_checking)
    return top != ""


def complaints(part: str, source: str) -> list[str]:
    return [f"line {found.line}: {part} imports {found.module}" for found in imports(ast.parse(source)) if not allowed(part, found)]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(("loramux", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def torch_free_modules() -> list[str]:
    wanted = tuple(f"loramux.{name}" for name in TORCH_FREE)
    names = [dotted(path) for path in modules() if path.stem != "__main__"]
    return [name for name in names if any(name == prefix or name.startswith(prefix + ".") for prefix in wanted)]


def first_torch_importer(names: list[str]) -> str | None:
    """The first of the modules whose import, in a fresh process and after those before it, loads torch."""
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""
    done = subprocess.run([sys.executable, "-c", code, *names], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip() or None


def test_imports_go_one_way() -> None:
    found = [f"{path.relative_to(PACKAGE)} {complaint}" for path in modules() for complaint in complaints(part_of(path), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("kernels", "import loramux.lora.types"),
        ("kernels", "from loramux import adapters"),
        ("adapters", "from loramux.kernels.ops import Ops"),
        ("lora", "from loramux.grammar.types import Constraint"),
        ("grammar", "def f():\n    from loramux.lora.types import LoraSite"),
        ("lora", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from loramux.engine.types import SamplingParams"),
        ("engine", "from loramux.gateway.settings import Settings"),
        ("engine", "import redis.asyncio"),
        ("engine", "try:\n    import uvicorn\nexcept ImportError:\n    pass"),
        ("adapters", "from redis.asyncio import Redis"),
        ("adapters", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import redis"),
        ("lora", "if TYPE_CHECKING:\n    import redis"),
        ("errors", "from loramux.adapters.types import ModuleShape"),
        ("gateway", "from .settings import Settings"),
        ("gateway", "from . import settings"),
    ],
)
def test_a_wrong_import_is_seen(part: str, source: str) -> None:
    assert complaints(part, source)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("gateway", "import fastapi, redis.asyncio, loramux\nfrom loramux.engine.client import EngineClient"),
        ("engine", "from loramux.kernels.ops import Ops\nfrom loramux.errors import Failure"),
        ("adapters", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from redis.asyncio import Redis"),
    ],
)
def test_a_right_import_passes(part: str, source: str) -> None:
    assert complaints(part, source) == []


def test_every_folder_has_a_rule() -> None:
    assert {part_of(path) for path in modules()} <= MAY_IMPORT.keys()


def test_the_gateway_and_the_pure_parts_load_no_torch() -> None:
    assert first_torch_importer(torch_free_modules()) is None


def test_a_module_that_loads_torch_is_seen() -> None:
    assert first_torch_importer(["loramux.errors", "loramux.kernels.ops", "loramux.lora.slots"]) == "loramux.kernels.ops"


def test_no_module_is_named_for_nothing_in_particular() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc"}
    assert [str(path) for path in modules() if vague & {path.stem, *path.relative_to(PACKAGE).parts[:-1]}] == []


def test_no_file_is_too_long() -> None:
    sources = [path for pattern in ("*.py", "*.cpp", "*.h", "*.lua") for path in PACKAGE.rglob(pattern)]
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_LINES} == {}


def test_init_files_hold_a_docstring_only() -> None:
    bodies = {dotted(path): ast.parse(path.read_text()).body for path in PACKAGE.glob("*/**/__init__.py")}
    assert [name for name, body in bodies.items() if len(body) != 1 or not isinstance(body[0], ast.Expr)] == []
