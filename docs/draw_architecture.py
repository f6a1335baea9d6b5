"""Draw docs/figures/architecture.png from the code: the loop with its functions, and the rooms with their imports.

python docs/draw_architecture.py

What is drawn, but for the numbers of lines, is noted in the file: a test sees when the picture is no longer true.
"""

import ast
import hashlib
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
SMALL = 600
"""Of a room with fewer lines the picture does not say how many."""
sys.path.insert(0, str(ROOT))
from tests.test_imports import FILES, FLOORS, name_of, ours, room  # noqa: E402

INK, FAINT, PAPER, ACCENT, SOFT = "#1f2933", "#9aa5b1", "#ffffff", "#b4532a", "#f4ede4"
STEPS = (
    ("_publish", "callbacks/publisher.py", "the learner's weights, in the sampler's format"),
    ("roll_out", "loop/iteration.py", "x ~ D, y ~ π_sampler(· | x), rewards R"),
    ("score", "loop/iteration.py", "log π_learner_old(y | x), advantages A"),
    ("correct", "loop/correction.py", "weights w and keep, once per mini-batch"),
    ("deal", "loop/iteration.py", "micro-batches that pad little"),
    ("training_step", "module.py", "the objective's gradient, the optimizer's step"),
)
"""A function, the file that defines it, and what it does."""


def functions_of(path: Path) -> set[str]:
    """Return the names of all functions and methods that a file defines."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def checked_steps() -> list[tuple[str, str, str]]:
    """Return `STEPS`; raise where a function is not where the picture says."""
    for function, file, _ in STEPS:
        if function not in functions_of(ROOT / "lit_qrl" / file):
            raise SystemExit(f"{file} defines no {function}: correct STEPS.")
    return list(STEPS)


def box(axes: plt.Axes, x: float, y: float, width: float, height: float, color: str = PAPER) -> None:
    """Draw a room."""
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=INK, linewidth=1))


def arrow(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float], **options: object) -> None:
    """Draw an arrow."""
    settings = {"arrowstyle": "-|>", "mutation_scale": 11, "color": INK, "linewidth": 1.1, **options}
    axes.add_patch(FancyArrowPatch(start, end, **settings))


def draw_loop(axes: plt.Axes) -> None:
    """Draw one iteration, from top to bottom and back."""
    steps = checked_steps()
    axes.set_title("One iteration (one Lightning epoch)", loc="left", color=INK, fontsize=12, fontweight="bold")
    for index, (function, file, what) in enumerate(steps):
        y = 10 - 1.7 * index
        box(axes, 0.4, y, 5.4, 1.15, SOFT if index in (0, 1) else PAPER)
        axes.text(0.6, y + 0.78, function, fontsize=9, fontweight="bold", color=INK, va="center")
        axes.text(5.6, y + 0.78, file, fontsize=6.5, color=ACCENT, va="center", ha="right", family="monospace")
        axes.text(0.6, y + 0.33, what, fontsize=7, color=INK, va="center")
        if index:
            arrow(axes, (3.1, y + 1.7), (3.1, y + 1.15))
    bottom, top = 10 - 1.7 * (len(steps) - 1) + 0.55, 10.55
    arrow(axes, (5.8, bottom), (5.8, top), connectionstyle="bar,fraction=0.05", color=ACCENT)
    axes.text(6.5, (bottom + top) / 2, "next iteration", rotation=90, color=ACCENT, fontsize=9, va="center")
    axes.text(
        0.4, 11.45, "sampler's side shaded; hooks of callbacks: on_rollout_start, on_publish,", fontsize=6.5, color=INK
    )
    axes.text(0.4, 11.2, "on_generation_end, on_rollout_end, correct", fontsize=6.5, color=INK)
    axes.set(xlim=(0, 7), ylim=(0.8, 11.8))
    axes.axis("off")


def purpose(name: str) -> str:
    """Return the first line of a room's docstring."""
    file = ROOT / "lit_qrl" / name / "__init__.py"
    text = ast.get_docstring(ast.parse((file if file.exists() else ROOT / "lit_qrl" / f"{name}.py").read_text()))
    return (text or "").splitlines()[0]


def rooms_of() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Return the lines of each room, and the rooms that it imports from."""
    lines: dict[str, int] = {}
    uses: dict[str, set[str]] = {}
    for path in FILES:
        own = room(name_of(path))
        lines[own] = lines.get(own, 0) + len(path.read_text().splitlines())
        uses.setdefault(own, set()).update(room(name) for name in ours(path) if room(name) != own)
    return lines, uses


def drawn() -> str:
    """Return a digest of all that the picture says, but for numbers of lines."""
    uses = rooms_of()[1]
    floors = [[(name, sorted(uses[name])) for name in floor] + [purpose(floor[0])] for floor in FLOORS]
    return hashlib.sha256(repr((checked_steps(), floors)).encode()).hexdigest()


def draw_rooms(axes: plt.Axes) -> None:
    """Draw the floors, each room as wide as its code is long, and how many files import from another floor."""
    lines, uses = rooms_of()
    axes.set_title(
        "Rooms: each imports only from rooms above it", loc="left", color=INK, fontsize=12, fontweight="bold"
    )
    height = 0.42
    for floor, rooms in enumerate(FLOORS):
        y, x = 10.9 - 0.55 * floor, 0.2
        for name in rooms:
            told = lines[name] >= SMALL
            width = 0.22 + 0.12 * len(name) + (0.25 + 1.6 * (lines[name] / max(lines.values())) ** 0.5 if told else 0)
            box(axes, x, y, width, height, SOFT if name == "loop" else PAPER)
            axes.text(x + 0.1, y + height / 2, name, fontsize=6.8, color=INK, va="center", fontweight="bold")
            shown = f"{lines[name]}" if told else ""
            axes.text(x + width - 0.08, y + height / 2, shown, fontsize=6.5, color=FAINT, va="center", ha="right")
            x += width + 0.06
        wanted = {one for name in rooms for one in uses[name]}
        order = [name for above in FLOORS[:floor] for name in above if name in wanted]
        axes.text(5.6, y + height / 2 + 0.1, purpose(rooms[0]), fontsize=7.6, color=INK, va="center")
        axes.text(5.6, y + height / 2 - 0.12, ", ".join(order), fontsize=6.2, color=FAINT, va="center")
    axes.text(5.6, 11.45, "what it is for, and what it imports from", fontsize=8, color=FAINT)
    axes.text(0.2, 11.45, "room, with its lines if they are many", fontsize=8, color=FAINT)
    axes.set(xlim=(0, 11.6), ylim=(10.55 - 0.55 * (len(FLOORS) - 1), 11.8))
    axes.axis("off")


def main() -> None:
    """Draw and say where."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 8.2), width_ratios=(7, 10), facecolor=PAPER)
    draw_loop(left)
    draw_rooms(right)
    figure.tight_layout()
    target = ROOT / "docs" / "figures" / "architecture.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=110, metadata={"Source": drawn()})
    print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
