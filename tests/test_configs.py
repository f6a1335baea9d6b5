"""Every YAML that ships is accepted by the command line, and fragments compose as they read."""

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lit_qrl.cli.config_files import config_files, expanded
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError
from tests.command_line import fit_parser

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
WHOLE = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("recipes/*.yaml")]
FRAGMENTS = [path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "recipes"]
PARTS = list(CONFIGS.glob("recipes/*/*.yaml"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
CORRECTIONS = sorted(CONFIGS.glob("correction/*.yaml"))
OTHERS = sorted(path for path in FRAGMENTS if path.parent.name != "correction")


@pytest.fixture(scope="module")
def parse():
    read = fit_parser()
    return lambda *paths: read.parse_args(arguments(*paths), _skip_validation=False).fit


def arguments(*paths):
    return expanded(["fit", *(f"--config={path}" for path in paths)])


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def accepted(parse, *paths):
    """Whether the files are parsed into a run; one that needs a library that is missing must say how to install it."""
    read = [Path(path).read_text() for path in config_files(arguments(*paths))]
    if find_spec("bitsandbytes") is None and any("bitsandbytes." in text for text in read):
        with pytest.raises(ConfigError, match=r"pip install 'lit-qrl\[bnb\]'"):
            parse(*paths)
        return True
    config = parse(*paths)
    return bool(config.data.task) and config.trainer.max_epochs > 0


def names(config):
    return [one.class_path.rpartition(".")[2] for one in config.trainer.callbacks or []]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_whole_configs_are_accepted(parse, path):
    assert accepted(parse, path)


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_fragments_are_accepted_after_the_quickstart(parse, path):
    assert accepted(parse, CONFIGS / "quickstart.yaml", path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_examples_are_accepted(parse, path, monkeypatch):
    monkeypatch.syspath_prepend(str(path.parent))
    assert accepted(parse, CONFIGS / "quickstart.yaml", path)


def test_every_part_is_in_a_recipe():
    listed = {Path(path) for recipe in WHOLE for path in config_files(arguments(recipe))}
    assert set(PARTS) <= listed


# A fragment that does not name the callbacks cannot change them; parsing all pairs would take minutes.
APPENDING = [path for path in OTHERS if "callbacks" in path.read_text()]


def test_other_fragments_only_append():
    for path in OTHERS:
        assert "callbacks:" not in path.read_text(), f"{path} would replace the corrections"
    assert APPENDING


@pytest.mark.parametrize("other", APPENDING, ids=lambda path: path.stem)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda path: path.stem)
def test_a_correction_replaces_the_list_and_everything_else_appends(parse, correction, other):
    corrected = names(parse(CONFIGS / "quickstart.yaml", correction))
    appended = names(parse(other, CONFIGS / "quickstart.yaml"))[:-1]
    assert names(parse(CONFIGS / "quickstart.yaml", correction, other)) == [*corrected, *appended]
    assert corrected == [one["class_path"] for one in yaml.safe_load(correction.read_text())["trainer"]["callbacks"]]


def test_no_base_file_sets_the_precision():
    for path in CONFIGS.glob("*.yaml"):
        assert "precision:" not in path.read_text()


DATA_PAGE = (ROOT / "docs" / "data.md").read_text()


def test_the_page_on_data_names_every_key_of_the_evaluation():
    keys = {name for name in inspect.signature(RolloutDataModule).parameters if name.startswith("evalua")}
    assert len(keys) == 8  # with a former name
    assert keys <= set(re.findall(r"`data\.(\w+)`", DATA_PAGE))
    assert {path.stem for path in CONFIGS.glob("task/eval_*.yaml")} <= set(re.findall(r"eval_\w+", DATA_PAGE))


@pytest.mark.parametrize("task", ["countdown", "sudoku", "gsm8k"])
def test_a_task_takes_no_file_of_the_one_before_it(parse, task):
    recipe = CONFIGS / "recipes" / "bf16_grpo_tis.yaml"
    assert parse(recipe).data.task.init_args.evaluation_path
    assert parse(recipe, CONFIGS / "task" / f"{task}.yaml").data.task.init_args.evaluation_path is None
