import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lit_qrl.cli.stand_ins import HEAVY, stand_ins

ROOT = Path(__file__).parents[2]
PRINT = """
import contextlib, io, sys
from lit_qrl.cli.main import main
sys.argv[1:] = {words!r}
printed = io.StringIO()
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
    main({args})
heavy = {heavy!r}
print([name for name in heavy if name in sys.modules], file=sys.stderr)
print(printed.getvalue())
"""
AFTERWARDS = """
import transformers, torch._dynamo
assert transformers.AutoConfig.from_pretrained, torch._dynamo.config
"""
WORDS = ["fit", "--config", "configs/quickstart.yaml", "--print_config"]
LOADED = (*HEAVY, "bitsandbytes", "datasets", "matplotlib.pyplot", "sympy", "torch._inductor.compile_fx", "vllm")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library in which things are of each kind, and a module that uses it."""
    (tmp_path / "alibrary").mkdir()
    (tmp_path / "alibrary/__init__.py").write_text(
        "made = []\nclass Base:\n    register = made.append\nclass Derived(Base): pass\nTABLE = {1: 2}\n"
    )
    (tmp_path / "alibrary/part.py").write_text("from alibrary import Base\nclass Deep(Base): pass\n")
    (tmp_path / "itsuser.py").write_text(
        "from alibrary import Base, TABLE\nfrom alibrary.part import Deep\nimport alibrary.part as part\n"
        "class Mine(Deep):\n    def method(self, one: Base | None = None): ...\nBase.register(Mine)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith(("alibrary", "itsuser"))]:
        del sys.modules[name]


def test_a_library_is_named_without_being_loaded_and_loaded_when_looked_into(library):
    with stand_ins(["alibrary", "a_library_that_is_not_there"]):
        user = importlib.import_module("itsuser")
    assert "alibrary" not in sys.modules
    assert not issubclass(int, user.Base)  # nothing of the library is among its bases
    assert not isinstance(None, user.Base)
    assert "alibrary" not in sys.modules
    real = importlib.import_module("alibrary")
    assert issubclass(real.Derived, user.Base)
    assert isinstance(real.Derived(), user.Base)
    assert isinstance(user.Base(), real.Base)
    assert dict(user.TABLE.items()) == {1: 2}
    assert user.Mine.__bases__ == (user.Deep,)
    assert isinstance(user.Mine(), user.Mine)
    assert real.made == []  # what was called meanwhile went nowhere


def test_what_is_loaded_stays_what_it_is(library):
    real = importlib.import_module("alibrary")
    with stand_ins(["alibrary"]):
        user = importlib.import_module("itsuser")
    assert user.Base is real.Base
    assert real.made == [user.Mine]


def printed(words, args="", then=""):
    code = PRINT.format(words=words, args=args, heavy=LOADED) + then
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.strip().splitlines()[0]


def test_a_print_loads_no_library_that_takes_seconds():
    text, loaded = printed(WORDS, then=AFTERWARDS)  # and the libraries can be imported after it
    assert loaded == "[]"
    assert "class_path: lit_qrl.callbacks.AIS" in text
    assert "lora: null" in text


@pytest.mark.slow
def test_a_print_is_the_same_as_with_the_libraries():
    text, loaded = printed(WORDS, repr(WORDS))  # as another program's part it loads what it uses
    assert "'transformers'" in loaded
    assert text == printed(WORDS)[0]


@pytest.mark.slow
def test_a_print_with_an_adapter_loads_what_it_names():
    words = ["fit", "--config", "configs/quickstart.yaml", "--model.policy.lora", "peft.LoraConfig", "--print_config"]
    text, loaded = printed(words)
    assert "class_path: peft.LoraConfig" in text
    assert "'peft'" in loaded


def test_help_loads_no_library_that_takes_seconds():
    text, loaded = printed(["fit", "--help"])
    assert loaded == "[]"
    assert "lit_qrl.optim.MuonAdamW" in text
