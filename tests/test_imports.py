"""The direction of imports: every package is one floor, and a floor imports only from those above it in this list."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for path in (ROOT / "lit_qrl").rglob("*.py") if path != ROOT / "lit_qrl" / "__init__.py")
ORDER = (
    "types errors seeding aliases shipped / run / report / functional / objective optim / formats / receipts / network"
    " / precision / policy / diffusion_policy / rollout / rewards / strategies / loop / data / module / publish"
    " / callbacks / quantize / cli"
)
FLOORS = tuple(tuple(floor.split()) for floor in ORDER.split(" / "))
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OPTIONAL = {"vllm", "transformer_engine", "bitsandbytes", "torchao"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Return the modules that a file imports, those under `if TYPE_CHECKING` and inside functions too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and top_level_only:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = inside & MODULES
            found.update(modules)
            if len(modules) < len(inside):
                found.add(node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name in MODULES}


def room(name: str) -> str:
    return name.split(".")[1]


def test_every_room_has_a_floor():
    assert {room(name) for name in MODULES} == set(FLOOR)


def test_imports_point_up_the_list():
    for path in FILES:
        own = room(name_of(path))
        wrong = {name for name in ours(path) if FLOOR[room(name)] > FLOOR[own]}
        assert not wrong, path
        beside = {name for name in ours(path) if FLOOR[room(name)] == FLOOR[own] and room(name) != own}
        assert own in FLOORS[0] or not beside, f"{path}: rooms of one floor do not import each other"


def test_no_circle_stands_anywhere():
    arrows = {name_of(path): ours(path) - {name_of(path)} for path in FILES}
    # A package's __init__ gathers what its files define; whoever imports the package means one of them.
    arrows = {name: targets for name, targets in arrows.items() if not is_package(name)}
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for target in arrows.get(name, ()):
            walk(target, [*trail, name])
        done.add(name)

    for name in arrows:
        walk(name, [])


def is_package(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).is_dir()


def test_the_check_sees_what_is_deferred_and_what_is_for_type_checkers(tmp_path):
    path = tmp_path / "seen.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from lit_qrl.module import GRPOModule\n"
        "def later():\n    from lit_qrl.callbacks import ais\n    import lit_qrl.policy\n"
    )
    assert ours(path) == {"lit_qrl.module", "lit_qrl.callbacks.ais", "lit_qrl.policy"}
    assert not {"lit_qrl.policy", "lit_qrl.callbacks.ais"} & imports(path, top_level_only=True)


def test_optional_libraries_are_imported_inside_functions():
    for path in FILES:
        if path.parent.name == "vllm" and path.name in ("transfer.py", "worker.py"):  # which vLLM itself loads
            continue
        assert not {name.split(".")[0] for name in imports(path, top_level_only=True)} & OPTIONAL, path


@pytest.mark.parametrize("name", ["functional", "formats"])
def test_the_maths_knows_nothing_of_lightning(name):
    for path in FILES:
        if room(name_of(path)) == name:
            assert not {one.split(".")[0] for one in imports(path)} & {"lightning", "transformers"}, path


def test_the_plugins_name_vllm_in_one_place():
    for path in FILES:
        if room(name_of(path)) == "precision" and "vllm_kernels" not in path.parts:
            assert "vllm" not in {one.split(".")[0] for one in imports(path)}, path


def test_importing_the_package_loads_no_optional_library():
    code = "import sys, lit_qrl.types; sys.exit(any(m in sys.modules for m in ('vllm', 'lightning', 'datasets')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_training_starts_without_what_it_does_not_run():
    code = """
import sys
from lit_qrl.cli import main
print(*{"torch", "jsonargparse", "yaml"} & {*sys.modules})
from lit_qrl.cli import training
print(*{"vllm", "datasets", "torchvision", "scipy"} & {*sys.modules})
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["", ""]
