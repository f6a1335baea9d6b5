"""What `lit-qrl audit` measures: a policy, an engine and prompts, those of a run or as they are named."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lit_qrl.errors import ConfigError

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.types import SamplingParams

SPARE = 8
"""Rows that are read for each prompt that is wanted: long ones are left out."""
PRECISIONS = {"bf16-true": "bfloat16", "16-true": "float16", "bf16-mixed": "bfloat16", "16-mixed": "float16"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is drawn; None leaves it to the run, or is the command's default.

    Args:
        samples: prompts.
        completions: of each prompt.
        max_prompt_tokens: longer ones are left out.
        max_tokens: of a completion.
        temperature: of sampler and learner.
    """

    samples: int | None = None
    completions: int | None = None
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "completions", "max_prompt_tokens", "max_tokens"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"--{name} is too small.", expected="at least 1", given=count)
        if self.temperature is not None and self.temperature <= 0:
            raise ConfigError("--temperature is out of range.", expected="above 0", given=self.temperature)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The parts that draw and score.

    Args:
        policy: without weights.
        engine: that is not started.
        prompts: token ids.
        sampling: length, temperature and stop tokens.
        completions: of each prompt.
        precision: of the learner, as Lightning names it.
    """

    policy: Any
    engine: Any
    prompts: list[list[int]]
    sampling: "SamplingParams"
    completions: int
    precision: str = "32-true"

    def spec(self) -> "SamplerSpec":
        """Return what the engine is told, checked against it and the model; no weight is loaded.

        Raises:
            ConfigError: for what the engine cannot draw.
        """
        import torch

        from lit_qrl.network.structure import outline_of
        from lit_qrl.rollout.engine import ChecksModel, SamplerSpec

        truncated = self.sampling.truncated
        if truncated and not self.engine.records_kept:
            raise ConfigError(
                "The run's distribution is truncated, and the engine does not say which tokens it kept.",
                expected="data.top_p: 1 and data.top_k: 0, or TransformersEngine or VLLMEngine",
                given=type(self.engine).__name__,
            )
        mixed = "mixed" in self.precision
        spec = SamplerSpec(
            sampling=self.sampling,
            prompt_limit=max(map(len, self.prompts)),
            compute_dtype=getattr(torch, PRECISIONS[self.precision]) if mixed else None,
            estimator=getattr(self.policy, "estimator", None),
            kept=truncated,
        )
        self.policy.batch_invariant = self.engine.batch_invariant
        self.engine.validate(spec)
        if isinstance(self.engine, ChecksModel):
            self.engine.check_model(outline_of(self.policy))
        return spec

    def load(self, device: str) -> None:
        """Load the policy's weights onto a device, in the dtype that the learner holds them in."""
        import torch

        with torch.device(device):  # weights of half precision are kept so on an accelerator
            self.policy.configure()
        self.policy.to(device).eval()
        if self.precision in ("bf16-true", "16-true"):
            self.policy.to(getattr(torch, PRECISIONS[self.precision]))


def of_model(model: str, dtype: Any, rows: Sequence[str], chat: bool, sizes: Sizes) -> Audited:
    """Return a model beside its embedded engine, with 32 prompts × 4 completions of 256 tokens unless told otherwise.

    Args:
        model: folder, or name on the hub; causal, or of masked diffusion.
        dtype: of the learner.
        rows: texts of the prompts.
        chat: pose them as chat messages.
        sizes: what is drawn.

    Raises:
        ConfigError: where every prompt is too long.
    """
    from lit_qrl.diffusion_policy import DiffusionPolicy
    from lit_qrl.network.denoising import is_denoiser
    from lit_qrl.network.folder import resolve_model
    from lit_qrl.policy import CausalPolicy
    from lit_qrl.rollout import DiffusionEngine, TransformersEngine
    from lit_qrl.types import SamplingParams

    max_tokens, limit = sizes.max_tokens or 256, sizes.max_prompt_tokens or 512
    denoises = is_denoiser(resolve_model(model, weights=False))
    policy: CausalPolicy = (DiffusionPolicy if denoises else CausalPolicy)(model, dtype=dtype)
    encoded = [policy.encode([{"role": "user", "content": row}] if chat else row) for row in rows]
    encoded = [ids for ids in encoded if len(ids) <= limit][: sizes.samples or 32]
    if not encoded:
        raise ConfigError("Every prompt is longer than --max_prompt_tokens.", given=limit)
    return Audited(
        policy=policy,
        engine=DiffusionEngine(block=min(32, max_tokens)) if denoises else TransformersEngine(),
        prompts=encoded,
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=sizes.temperature or 1.0, stop_token_ids=policy.stop_token_ids
        ),
        completions=sizes.completions or 4,
    )


def of_run(files: Sequence[str], sizes: Sizes) -> Audited:
    """Return the parts of the run that `lit-qrl fit` would make of these files; what `sizes` says comes before them.

    Args:
        files: of the configuration.
        sizes: what is drawn.

    Raises:
        ConfigError: for files that `fit` would refuse, a task of several turns, or a plugin whose learner computes
            in a number format.
    """
    from lit_qrl.data.problems import admit
    from lit_qrl.loop.turns import TakesTurns
    from lit_qrl.precision.source import PublishingPrecision
    from lit_qrl.types import SamplingParams

    data, policy, trainer = _parts(files)
    if isinstance(data.task, TakesTurns):
        raise ConfigError(
            "audit draws one answer to each prompt.",
            expected="a task of one turn",
            given=type(data.task).__name__,
            remedy="Give --model and --prompts instead of --config.",
        )
    for plugin in trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]:
        if isinstance(plugin, PublishingPrecision):
            raise ConfigError(
                "audit measures how far samplers are from a learner that computes in its own dtype.",
                expected="a run without a precision plugin",
                given=type(plugin).__name__,
                remedy="Leave the plugin's file out of --config.",
            )
    wanted, limit = sizes.samples or data.prompts_per_iteration, sizes.max_prompt_tokens or data.max_prompt_tokens
    data.task.setup()
    rows = data.task.train_rows()
    rows = [rows[number] for number in range(min(len(rows), SPARE * wanted))]
    problems = admit(rows, data.task, policy, "training", limit, "drop")[:wanted]
    sampling = SamplingParams(
        max_tokens=sizes.max_tokens or data.max_completion_tokens,
        temperature=sizes.temperature or data.temperature,
        top_p=data.top_p,
        top_k=data.top_k,
        stop_token_ids=policy.stop_token_ids,
    )
    return Audited(
        policy=policy,
        engine=data.engine,
        prompts=[problem.prompt_ids for problem in problems],
        sampling=sampling,
        completions=sizes.completions or data.group_size,
        precision=str(trainer.precision or "32-true"),
    )


def _parts(files: Sequence[str]) -> tuple[Any, Any, Any]:
    """Return a run's data module, its policy, and the settings of its Trainer, which is not made, nor a folder."""
    from lit_qrl.cli.training import QRLCLI
    from lit_qrl.network.adapters import drop_loftq

    class Parts(QRLCLI):
        def before_instantiate_classes(self) -> None:
            config = self.config["fit"]
            self.dry_run = True
            drop_loftq(config.model.get("policy"))
            config.ckpt_path = config.trainer.callbacks = config.trainer.logger = None

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return None

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    cli = Parts.run(["fit", *(word for file in files for word in ("--config", file))])
    return cli.datamodule, cli.model.policy, cli.config_init["fit"].trainer


def fitting(
    chosen: "Mapping[str, NumberFormat]", network: Any, engine: Any, spec: "SamplerSpec"
) -> "Iterator[tuple[str, NumberFormat]]":
    """Yield names and formats that the model's layers and the engine take, and print which are left out.

    Args:
        chosen: formats by name.
        network: of the policy.
        engine: that draws.
        spec: of the sampler, without a format.
    """
    from lit_qrl.formats import Dense
    from lit_qrl.precision.base import check_layers

    for name, format in chosen.items():
        try:
            if not isinstance(format, Dense):
                check_layers(network, format, ())
            engine.validate(replace(spec, format=format))
        except ConfigError as error:
            print(f"{name} is left out: {error.what}")
            continue
        yield name, format
