"""The direction of imports: an arrow may only point down the list of layers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "lit_qrl").rglob("*.py"))
LAYERS = [
    {"errors", "types", "seeding", "events", "run_folder"},
    {"functional", "metrics", "optim", "identity"},
    {"rewards", "precision"},
    {"rollout"},
    {"callbacks.base"},
    {"callbacks", "objective", "policy", "data", "module", "strategies", "loggers", "report"},
    {"commands"},
    {"training_cli", "cli", "parser_errors", "config_files", "run_config", "publish_errors", "trainer_errors"},
]
OPTIONAL = {"vllm", "transformer_engine", "bitsandbytes", "torchao"}


def layer(name: str) -> int | None:
    parts = name.split(".")
    for key in (".".join(parts[1:3]), ".".join(parts[1:2])):
        for rank, members in enumerate(LAYERS):
            if key in members:
                return rank
    return None


def imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Imported module names, without those under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and top_level_only:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "lit_qrl" or node.module.count(".") == 1:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    own = layer(name)
    if name == "lit_qrl":
        return
    assert own is not None, f"{name} stands in no layer"
    for imported in imports(path, top_level_only=True):
        if imported.startswith("lit_qrl."):
            theirs = layer(imported)
            if theirs is not None and imported.count(".") >= 1:
                assert theirs <= own, f"{name} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_libraries_are_imported_inside_functions(path):
    assert not {name.split(".")[0] for name in imports(path, top_level_only=True)} & OPTIONAL


def test_functional_knows_nothing_of_lightning():
    for path in FILES:
        if "functional" in path.parts:
            names = {name.split(".")[0] for name in imports(path, top_level_only=False)}
            assert not names & {"lightning", "pytorch_lightning", "transformers"}, path


def test_callbacks_and_module_meet_in_the_base_only():
    for path in FILES:
        names = imports(path, top_level_only=False)
        if path.parent.name == "callbacks":
            assert "lit_qrl.module" not in names, path
        if path.name == "module.py" and path.parent.name == "lit_qrl":
            callbacks = {name for name in names if name.startswith("lit_qrl.callbacks")}
            assert all(name.startswith("lit_qrl.callbacks.base") for name in callbacks), callbacks


def test_importing_the_package_loads_no_optional_library():
    code = "import sys, lit_qrl.types; sys.exit(any(m in sys.modules for m in ('vllm', 'lightning', 'datasets')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_files_stay_readable():
    assert {str(path): n for path in FILES if (n := len(path.read_text().splitlines())) > 400} == {}
