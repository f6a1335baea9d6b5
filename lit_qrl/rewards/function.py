"""A plain function as a reward, by the signature that TRL's users write."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from lit_qrl.errors import ConfigError, nearest
from lit_qrl.rewards.base import Reward, Sample, Score
from lit_qrl.rewards.service import Gathering, awaited
from lit_qrl.rewards.workers import Failure, WorkerPool, by_name, sent

Function = Callable[..., Any]
GIVEN = ("prompts", "completions", "references")
"""Parameters that are not columns."""
TIMEOUT, RETRIES = 60.0, 2
"""Defaults of what holds for calls of single samples."""
RESERVED = (*GIVEN, "prompt", "completion")
"""Columns that are not passed under their own names, as in TRL."""


class FunctionReward(Reward):
    """Calls `function(completions=…, prompts=…, **columns)` and takes the numbers that it returns.

    The function may be `async`. All arguments are lists with one entry for each sample; it gets those of `prompts`,
    `completions`, `references` (the gold answers) and the row's columns that it names, and with `**kwargs` all of
    them. It returns a number for each, or None for a sample that it leaves out.

    Args:
        function: `package.module.function`, or the function.
        weight: factor in the sum of rewards.
        name: of the metric; by default the function's.
        arguments: further arguments of the function, by name.
        completions: what a completion is: its `text`, or `messages`, a list with the assistant's message. `auto` is
            messages where a column of the row holds the prompt as messages, and text otherwise.
        concurrency: 0 calls the function once with all samples; a number calls it for each sample alone, so many at the
            same time, for a function that waits for a service or works long.
        processes: call it in processes of its own, which a limit can end whatever it does; what it writes to variables
            of its module stays there. By default where `concurrency` is set and another process can import the
            function; one that is `async`, in the main script or within another is called in this process.
        timeout: seconds for one of these calls; for `concurrency` alone, as are `retries`.
        retries: how often one of these calls is repeated when it raised or was late; the pause doubles each time.
        time_limit: seconds for all samples together.

    Raises:
        ConfigError: there is no such function, or an argument is out of range.

    >>> def shortness(completions, **kwargs):
    ...     return [-len(completion) for completion in completions]
    >>> FunctionReward(shortness)([Sample("", "abc"), Sample("", "a")])
    [-3, -1]
    """

    singly = "`concurrency: 1`"

    def __init__(
        self,
        function: str | Function,
        weight: float = 1.0,
        name: str = "",
        arguments: dict[str, Any] | None = None,
        completions: Literal["auto", "text", "messages"] = "auto",
        concurrency: int = 0,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        time_limit: float = 600.0,
        processes: bool | None = None,
    ) -> None:
        self.function = find_function(function) if isinstance(function, str) else function
        inner = getattr(self.function, "__qualname__", type(self.function).__name__)
        self.path = function if isinstance(function, str) else f"{getattr(self.function, '__module__', '')}.{inner}"
        self.name, self.weight = name or self.path.rpartition(".")[2], weight
        for key, value, least in (
            ("concurrency", concurrency, 0),
            ("retries", retries, 0),
            ("timeout", timeout, 1e-3),
            ("time_limit", time_limit, 1e-3),
        ):
            if not value >= least:
                raise ConfigError(f"{key} of {self.described} is too small.", expected=f">= {least:g}", given=value)
        if not concurrency and (timeout, retries) != (TIMEOUT, RETRIES):
            raise ConfigError(
                f"timeout and retries of {self.described} are for calls of single samples, and one call has all here.",
                expected="concurrency above 0 beside them",
                given=f"timeout {timeout:g}, retries {retries} and concurrency 0",
                remedy="Set concurrency, or time_limit for all samples together.",
            )
        self.arguments, self.completions = dict(arguments or {}), completions
        self.concurrency, self.timeout, self.retries, self.time_limit = concurrency, timeout, retries, time_limit
        self.failures = {}
        self.pool: WorkerPool | None = None
        if processes or (processes is None and concurrency and by_name(self.function)):
            if sent(self.function) is None:
                raise ConfigError(
                    f"{self.described} cannot be called in a process of its own.",
                    expected="a function of a module, which another process can import",
                    remedy="Move it to a file beside the script, or set `processes: false`.",
                )
            self.pool = WorkerPool(_Finished(self.function), timeout=timeout if concurrency else time_limit)
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):  # a builtin
            parameters = None
        self._takes_all = parameters is None or any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters or () if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._named = {one.name for one in named}
        free = [one.name for one in named if one.default is one.empty]
        self._required = [name for name in free if name not in (*self.arguments, *GIVEN)]

    @property
    def described(self) -> str:
        return f"Reward {self.name!r} (function {self.path})"

    def unscorable(self, sample: Sample) -> str | None:
        """Return that it asks for a gold answer where there is none, or None.

        Raises:
            ConfigError: it requires a parameter that is no column of the row.
        """
        missing = [name for name in self._required if name not in sample.columns]
        if missing:
            unknown = f"{missing[0]!r} is" if len(missing) == 1 else f"{', '.join(map(repr, missing))} are"
            raise ConfigError(
                f"{self.described} cannot be called: {unknown} no column of the rows, nor given to every reward.",
                expected=f"parameters among {', '.join(GIVEN)} and the columns {', '.join(sorted(sample.columns))}, "
                "or **kwargs for the rest",
                given=f"{self.name}{inspect.signature(self.function)}",
                remedy="Write it as `def score(completions, **kwargs)`, or with those names; `arguments` gives others.",
            )
        return "it asks for `references`" if sample.reference is None and "references" in self._named else None

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        self.failures = {}
        if self.concurrency:
            return Singly(self).scores(samples)
        if self.pool is None:
            return awaited(self.function(**self.arguments_for(samples)), self.time_limit or float("inf"))
        returned = self.pool.call(self.arguments_for(samples))
        if isinstance(returned, Failure):
            raise returned()
        return returned

    def begin(self) -> "Singly | None":
        """Return what calls the function for samples as they come, where it is called for each alone."""
        return Singly(self) if self.concurrency else None

    def close(self) -> None:
        """Kill the worker processes, if any; a later call starts new ones."""
        if self.pool is not None:
            self.pool.close()

    def arguments_for(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the arguments of a call for samples."""
        prompts, completions = [], []
        for sample in samples:
            messages = conversation(sample.columns)
            as_messages = messages is not None if self.completions == "auto" else self.completions == "messages"
            shown = messages or [{"role": "user", "content": sample.prompt}]
            prompts.append(shown if as_messages else sample.prompt)
            answer = [{"role": "assistant", "content": sample.completion}]
            completions.append(answer if as_messages else sample.completion)
        columns = list(dict.fromkeys(name for sample in samples for name in sample.columns))
        values = {name: [sample.columns.get(name) for sample in samples] for name in columns if name not in RESERVED}
        values |= {"prompts": prompts, "completions": completions, "references": [one.reference for one in samples]}
        if not self._takes_all:
            values = {name: value for name, value in values.items() if name in self._named}
        return {**values, **self.arguments}


class _Finished:
    """A function as a worker calls it: what it returns to be awaited or yields is there when it returns."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, arguments: dict[str, Any]) -> Any:
        return awaited(self.function(**arguments), float("inf"))


class Singly(Gathering):
    """A function at work on samples as they come, called for each alone, with the reward's own `concurrency`.

    Args:
        reward: with a `concurrency`.
    """

    def __init__(self, reward: FunctionReward) -> None:
        super().__init__(reward.concurrency, reward.timeout, reward.retries, apart=reward.pool is not None)
        self.reward, self._added = reward, set[int]()
        if reward.pool is not None:
            reward.pool.start()  # which imports the function, and counts as no call's time

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Take samples by their positions."""
        self._added.update(samples)
        self.begin({position: partial(self._call, sample) for position, sample in samples.items()})

    def _call(self, sample: Sample) -> Any:
        arguments = self.reward.arguments_for([sample])
        return self.reward.function(**arguments) if self.reward.pool is None else self.reward.pool.call(arguments)

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """Return what a call with all of them returns."""
        self.add({i: sample for i, sample in enumerate(samples) if i not in self._added})
        # so that the scores of those that are done are there before `time_limit`
        returned = self.end(0.95 * (self.reward.time_limit or float("inf")), self.reward.progress)
        self.reward.failures = {i: one.reason for i, one in enumerate(returned) if isinstance(one, Failure)}
        if len(self.reward.failures) == len(samples) > 0:
            raise RuntimeError(f"every call failed, the first with {self.reward.failures[0]}")
        return [None if isinstance(one, Failure) else _alone(one) for one in returned]


def _alone(returned: Any) -> Any:
    """Return the score of a call for one sample, which may come in a list."""
    listed = isinstance(returned, (list, tuple)) or getattr(returned, "ndim", 0) == 1
    return returned[0] if listed and len(returned) == 1 else returned


def conversation(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages that a row holds as its prompt, or None; `prompt` and `messages` before other columns.

    >>> conversation({"question": "1+1", "chat": [{"role": "user", "content": "1+1"}]})
    [{'role': 'user', 'content': '1+1'}]
    """
    for name in dict.fromkeys(("prompt", "messages", *columns)):
        value = columns.get(name)
        if isinstance(value, list) and value and all(isinstance(one, Mapping) and "role" in one for one in value):
            return [dict(one) for one in value]
    return None


def find_function(path: str) -> Function:
    """Return the function at `package.module.name`.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.

    >>> find_function("math.gcd")(12, 18)
    6
    """
    where, _, name = path.rpartition(".")
    try:
        module: Any = importlib.import_module(where)
    except ValueError as error:
        raise ConfigError(
            f"The reward function {path!r} has no module.", expected="package.module.function", given=path
        ) from error
    except Exception as error:
        raise ConfigError(
            f"The reward function {path!r} cannot be imported: {type(error).__name__}: {str(error).rstrip('.')}.",
            remedy="A file in the working directory is found by its name; else set PYTHONPATH.",
        ) from error
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"There is no function {name!r} in {where}.",
            remedy=nearest(name, known) if known else "The module has no function.",
        )
    if not callable(found) or inspect.isclass(found):
        raise ConfigError(
            f"{path} is no function.", expected="a function that returns scores", given=type(found).__name__
        )
    return found


def as_rewards(given: Sequence[Reward | Function]) -> list[Reward]:
    """Return a list of rewards, plain functions among them as `FunctionReward`.

    >>> def score(completions):
    ...     return [0.0] * len(completions)
    >>> as_rewards([score])[0].name
    'score'
    """
    return [one if isinstance(one, Reward) else FunctionReward(one) for one in given]
