"""Messages as the parser of jsonargparse words them, and the sentence that a user reads."""

import pytest
from jsonargparse import ArgumentParser

from lit_qrl.cli.parser_errors import readable
from lit_qrl.data.module import RolloutDataModule


def classes(key):
    return {"trainer.callbacks": ["AIS", "TokenVeto"], "data.engine": ["TransformersEngine", "VLLMEngine"]}.get(key, [])


CASES = {
    "unknown class": (
        'Parser key "trainer.callbacks":\n  - Expected a dot import path string: AISS',
        "trainer.callbacks: there is no class 'AISS'. Did you mean 'AIS'?",
    ),
    "unknown class in a mapping": (
        'Parser key "data.engine":\n  - Expected a dot import path string: {class_path: Transformer, init_args: {}}',
        "data.engine: there is no class 'Transformer'. Did you mean 'TransformersEngine'?",
    ),
    "unknown option": (
        "unrecognized arguments: --data.group_sizes 8",
        "--data.group_sizes is not an option of this command. Did you mean '--data.group_size'?",
    ),
    "unknown key of a class": (
        "Parser key \"model.objective\":\n  Key 'clip' is not expected. Subclass 'lit_qrl.objective.GRPO'",
        "model.objective: there is no option 'clip' of lit_qrl.objective.GRPO. See --help for the options.",
    ),
    "choice": (
        "Parser key \"data.long_prompt\":\n  Expected a Literal['drop', 'error']. Got value: erorr",
        "data.long_prompt: the value is not one of the choices. Expected: drop, error. Given: erorr. "
        "Did you mean 'error'?",
    ),
    "choices of several lists": (
        'Parser key "trainer.precision":\n  Does not validate against any of the Union subtypes\n'
        "  Subtypes: [typing.Literal[64, 32], typing.Literal['bf16-true', '64'], <class 'NoneType'>]\n"
        "  Errors:\n    - Expected a <class 'int'>\n    - Expected a typing.Literal['bf16-true', '64']\n"
        "  Given value: bf17",
        "trainer.precision: the value is not one of the choices. Expected: 64, 32, bf16-true. Given: bf17.",
    ),
    "class of a kind without names of its own": (
        'Parser key "trainer.profiler":\n  - Expected a dot import path string: Slow',
        "trainer.profiler: there is no class 'Slow'. Give it with its module, such as package.module.Class.",
    ),
    "option of an abstract class": (
        'Parser key "trainer.logger":\n  - Expected an instantiatable class, but a.Logger is abstract\n'
        "  Given value: NestedArg(key='save_dir', val='x')",
        "trainer.logger: the option 'save_dir' is of a class that is not chosen. Set trainer.logger.class_path first.",
    ),
    "option of an adapter": (
        "Parser key \"lora\":\n  Subtypes: [<class 'peft.config.PeftConfig'>, <class 'NoneType'>]\n  Errors:\n"
        "    - there is no option 'r'. See --help for the options.\n  Given value: NestedArg(key='r', val='3')",
        "lora: there is no option 'r'. If no class is chosen yet, set lora.class_path first (such as peft.LoraConfig); "
        "else see --help for its options.",
    ),
    "type": (
        "Parser key \"data.group_size\":\n  Expected a <class 'int'>. Got value: eight",
        "data.group_size: the value has the wrong type. Expected: int. Given: eight.",
    ),
    "several types": (
        "Parser key \"a.b\":\n  - Expected a <class 'int'>. Got value: x\n  - Expected a <class 'NoneType'>",
        "a.b: the value has the wrong type. Expected: int or null. Given: x.",
    ),
    "library that has an extra": (
        "Parser key \"model.optimizer\":\n  No module named 'bitsandbytes.optim'",
        "model.optimizer: No module named 'bitsandbytes.optim'. Install it: pip install 'lit-qrl[bnb]'.",
    ),
    "library that has none": (
        "Parser key \"model.optimizer\":\n  No module named 'nosuch'",
        "model.optimizer: No module named 'nosuch'. Check the class path.",
    ),
    "file": ("File does not exist: 'nope.yaml'", "the file 'nope.yaml' does not exist. Check the path."),
    "required": (
        'Key "data.task" is required but its value is None',
        "data.task is required but was not given. Add it to a --config file or the command line.",
    ),
    "required of a command": (
        "the following arguments are required: fit.model.policy, fit.data.task",
        "model.policy, data.task: required, but not given. Add them to a --config file or the command line, or start "
        "from a whole one: lit-qrl fit --config configs/quickstart.yaml.",
    ),
    "no mapping": (
        "Unexpected config: x",
        "A --config file holds no keys. Expected: YAML such as `data: {group_size: 8}`. Given: x.",
    ),
    "paragraph of a class's own parser": (
        'Parser key "trainer.callbacks":\n  power: the value has the wrong type. Expected: float.',
        "trainer.callbacks.power: the value has the wrong type. Expected: float.",
    ),
    "anything else": ('Parser key "x":\n  - Something odd happened', "x: Something odd happened."),
}


@pytest.mark.parametrize("case", CASES)
def test_a_message_becomes_one_sentence(case):
    message, expected = CASES[case]
    assert readable(message, classes, ["--data.group_size", "--data.passes"]) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.group_size=eight"], ["data.group_size", "int", "eight"]),
        (["--data.long_prompt=cut"], ["data.long_prompt", "drop, error", "cut"]),
        (["--data.seed=now"], ["data.seed", "int or null", "now"]),
        (["--data.sed=1"], ["--data.sed is not an option", "Did you mean '--data.seed'?"]),
    ],
)
def test_the_library_s_own_messages_are_understood(arguments, words):
    """Written by the installed jsonargparse, so that another wording in a later version is noticed."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutDataModule, "data", skip={"task", "engine"})
    options = [option for action in parser._actions for option in action.option_strings]
    with pytest.raises(Exception) as caught:
        parser.parse_args(arguments)
    text = readable(str(caught.value), lambda key: [], options)
    assert "\n" not in text
    for word in words:
        assert word in text
