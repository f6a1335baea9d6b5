"""`lit-qrl audit`: how far a model's sampler would be from its learner in each number format, without any training."""

import json
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_qrl.errors import ConfigError

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.types import SamplingParams


COLUMNS = {
    "mean |d|": "abs_log_ratio",
    "p99 |d|": "log_ratio_p99",
    "KL (k3)": "kl_k3",
    "E|dp|": "abs_prob_diff",
    "ESS": "ess_ratio",
    "chi2/seq": "chi2_sequence",
    "ppl ratio": "ppl_ratio",
}


SPEED_COLUMNS = {"tokens/s": "tokens_per_second", "publish s": "publish_seconds"}
REPEATS = 2
"""Timed rollouts of each format, of which the fastest counts."""
NOISE = 0.03
"""Two rollouts of the same differ by as much."""


def audit(
    *,
    model: str | None = None,
    prompts: str | None = None,
    config: Sequence[str] = (),
    prompt_column: str = "question",
    split: str = "train",
    subset: str | None = None,
    chat: bool = True,
    formats: Sequence[str] = (),
    speed: bool = False,
    samples: int | None = None,
    completions: int | None = None,
    max_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    device: str = "auto",
    seed: int = 0,
    out: Path | None = None,
) -> dict[str, dict[str, float]]:
    """Measure the mismatch and the speed of each number format for a model: sample quantized, score plain.

    Examples:
      lit-qrl audit --model models/tiny-countdown --prompts problems.jsonl --chat false
      lit-qrl audit --model Qwen/Qwen2.5-1.5B-Instruct --prompts openai/gsm8k --subset main --formats fp8_row nvfp4
      lit-qrl audit --config configs/quickstart.yaml --speed --formats bf16 fp8_row nvfp4:four_over_six

    With --config it measures what that run would do: its policy, its engine (vLLM too, started once for each format),
    its first prompts, as many of them and of completions as an iteration has, and its lengths. Otherwise the embedded
    engine draws.

    d is the log-ratio learner / sampler per token, in nats, on completions that the sampler generates. The first row is
    the learner's own arithmetic in the engine: no format can be lower. Bits are per weight of the whole
    model. AIS is in full force from a mean |d| of its `saturation`; docs/metrics.md says what the columns mean and when
    to worry.

    --speed adds tokens/s of the whole rollout and the seconds of a publish, and says which format makes the two
    shortest together, and at what mean |d|. A rollout of the same shape comes before the timed ones.

    Args:
        model: folder, or name on the hub.
        prompts: JSONL, JSON, CSV or Parquet file, or data set.
        config: the files that you would give to `fit --config`, instead of model and prompts.
        prompt_column: column with the problem's text.
        split: of a data set.
        subset: configuration of a data set.
        chat: pose chat messages.
        formats: number formats of the sampler, options behind a colon, as int4_group:group_size=64 (default: all but
            fp16, fp32, mxfp8, nf4 and int3_channel).
        speed: also measure tokens/s.
        samples: prompts (default: 32, or the run's).
        completions: of each prompt (default: 4, or the run's).
        max_prompt_tokens: longer ones are left out (default: 512, or the run's).
        max_tokens: of a completion (default: 256, or the run's).
        temperature: of sampler and learner (default: 1, or the run's).
        dtype: of the learner, without config.
        device: auto takes a GPU if there is one.
        seed: of the completions.
        out: file to write every metric into, as JSON.

    Returns:
        metrics by name, by format; what is printed as one row for each format.

    Raises:
        ConfigError: for arguments, a model or prompts that cannot be used.
    """
    sizes: dict[str, Any] = {
        "samples": samples,
        "completions": completions,
        "max_prompt_tokens": max_prompt_tokens,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    sizes = {name: size for name, size in sizes.items() if size is not None}
    for name, size in sizes.items():
        if size <= 0:
            raise ConfigError(f"--{name} is too small.", expected="above 0", given=size)
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError("--out cannot be written.", expected="a file in a folder that exists", given=out)
    if bool(config) == bool(model or prompts) or not (config or (model and prompts)):
        raise ConfigError(
            "audit has no model and prompts, or has them twice.",
            expected="--model and --prompts, or --config alone",
            given=", ".join(n for n, v in {"--model": model, "--prompts": prompts, "--config": config}.items() if v)
            or "none of them",
            remedy="See lit-qrl audit --help.",
        )

    import torch
    from transformers.utils.logging import disable_progress_bar

    from lit_qrl import formats as known
    from lit_qrl.formats.support import names_where
    from lit_qrl.network.structure import check_positions
    from lit_qrl.run.console import kept_from_the_screen

    disable_progress_bar()
    chosen = {name: known.get(name) for name in formats or names_where(lambda row: row.audited)}
    if config:
        audited = of_run(config, **sizes)
    else:
        assert model is not None
        assert prompts is not None
        audited = of_model(model, dtype, _rows(prompts, split, subset, prompt_column), chat, **sizes)
    policy, encoded, n, sampling = audited.policy, audited.prompts, audited.completions, audited.sampling
    remedy = "Lower data.max_completion_tokens." if config else "Lower --max_tokens."
    check_positions(policy.config, max(map(len, encoded)), sampling.max_tokens, remedy)
    spec = audited.spec()
    audited.load(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    chosen = dict(fitting(chosen, policy.network, audited.engine, spec))
    print(f"{len(encoded)} prompts x {n} completions of up to {sampling.max_tokens} tokens. {policy.ending}")
    print(f"drawn by {type(audited.engine).__name__}\n" if config else "")
    width = max(14, *(len(title) + 2 for title in chosen)) if chosen else 14
    columns = {**COLUMNS, **(SPEED_COLUMNS if speed else {})}
    print(f"{'format':<{width}}{'bits':>6}{'tokens':>8}" + "".join(f"{title:>11}" for title in columns), flush=True)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as logs, kept_from_the_screen(Path(logs)), closing(audited.engine):
        for title, metrics in measured(audited, chosen, spec, seed, speed):
            results[title] = metrics
            figures = "".join(f"{_cell(metrics[key]):>11}" for key in columns.values())
            print(f"{title:<{width}}{metrics['bits']:>6.3g}{metrics['tokens']:>8.0f}{figures}", flush=True)
    if speed:
        dense = {"learner", *(name for name, format in chosen.items() if isinstance(format, known.Dense))}
        print(f"\n{verdict(results, dense, f'{len(encoded)} x {n} completions')}")
    if out is not None:
        said = {"config": list(config)} if config else {"model": model}
        out.write_text(json.dumps({**said, "formats": results}, indent=2) + "\n")
    return results


def _cell(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def verdict(results: dict[str, dict[str, float]], dense: Collection[str], batch: str) -> str:
    """Return which format makes a rollout and its publish shortest, and what it costs in mean |d|.

    Args:
        results: metrics by format, tokens/s and seconds of a publish among them.
        dense: the names of those that round nothing to 8 or 4 bits; others are held against the fastest of them.
        batch: what was drawn, in words.
    """
    tokens = max(metrics["tokens"] for metrics in results.values())
    seconds = {
        name: tokens / metrics["tokens_per_second"] + metrics["publish_seconds"] for name, metrics in results.items()
    }
    plain = min(dense & results.keys(), key=seconds.__getitem__)
    others = [name for name in results if name not in dense]
    if not others:
        return f"No format of 8 or 4 bits was measured beside {plain}."
    best = min(others, key=seconds.__getitem__)
    gain = seconds[plain] / seconds[best]
    cost = (
        f"rollout and publish take {seconds[best]:.3g} s instead of {seconds[plain]:.3g}, mean |d| is "
        f"{results[best]['abs_log_ratio']:.3g} instead of {results[plain]['abs_log_ratio']:.3g}."
    )
    if gain < 1 + NOISE:
        return f"At {batch} no format is faster than {plain}. The nearest is {best}: {cost}"
    return f"At {batch} {best} is the fastest, {gain:.2f} times {plain}: {cost}"


def _rows(prompts: str, split: str, subset: str | None, column: str) -> list[str]:
    from lit_qrl.data.sources import check_columns, read_rows

    rows = read_rows(prompts, split, subset)
    check_columns(rows, [column], prompts)
    return [str(row[column]) for row in rows]


def measured(
    audited: "Audited", formats: "Mapping[str, NumberFormat]", spec: "SamplerSpec", seed: int, speed: bool = False
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each format's name and its metrics, the learner's own arithmetic first.

    Args:
        audited: what draws and scores, with its weights.
        formats: of the sampler's linear layers, by name.
        spec: of the sampler, without a format.
        seed: of the completions.
        speed: also time rollouts and a publish.
    """
    import torch

    from lit_qrl.functional.mismatch import mismatch_metrics
    from lit_qrl.loop.batching import assemble, deal_by_length
    from lit_qrl.precision.source import WeightSource, unchanged

    policy, engine, prompts, n = audited.policy, audited.engine, audited.prompts, audited.completions
    device = next(policy.parameters()).device
    parameters = sum(tensor.numel() for _, tensor in policy.named_weights())
    autocast = torch.autocast(device.type, spec.compute_dtype or torch.bfloat16, enabled=spec.compute_dtype is not None)

    def publish(format: "NumberFormat | None", version: int) -> tuple[float, Any]:
        begun = time.perf_counter()
        source = WeightSource(policy, format)
        tensors = engine.arranged(source.whole(unchanged, source.plain_dtype(engine.plain_dtype)))
        report = engine.load_weights(tensors, format, version)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun, report

    sides: dict[str, NumberFormat | None] = {"learner": None, **formats}
    for version, (name, format) in enumerate(sides.items()):
        if not version or engine.single_format:  # which holds the format that it was started with
            engine.close()
            engine.setup(replace(spec, format=format), policy)
        seconds, report = publish(format, version)
        completions = engine.generate(prompts, n, seed)
        batch = assemble(prompts, completions, n, policy.pad_token_id).to(device)
        learner = torch.zeros_like(batch.sampler_logprobs)
        lengths = batch.total_length.tolist()
        with torch.no_grad(), autocast:
            for part in deal_by_length(lengths, len(prompts)):
                rows = torch.tensor(part, device=device)
                piece = batch.select(rows)
                scores = policy(piece, spec.sampling.temperature).logprobs.float()
                learner[rows, : piece.mask.shape[1]] = scores
        metrics = mismatch_metrics(learner, batch.sampler_logprobs, batch.mask)
        figures = {key: float(value) for key, value in metrics.items()}
        figures |= {"bits": 8 * report.bytes / parameters, "tokens": float(batch.mask.sum())}
        if speed:  # kernels are compiled by now
            seconds, _ = publish(format, version)
            rates = [_tokens_per_second(engine, prompts, n, seed + 1 + turn) for turn in range(REPEATS)]
            figures |= {"tokens_per_second": max(rates), "publish_seconds": seconds}
        yield name, figures


def _tokens_per_second(engine: Any, prompts: Sequence[Sequence[int]], n: int, seed: int) -> float:
    """Return the rate of one rollout; what is drawn lies on the host when it ends."""
    begun = time.perf_counter()
    drawn = engine.generate(prompts, n, seed)
    return sum(len(one.token_ids) for one in drawn) / (time.perf_counter() - begun)


SPARE = 8
"""Rows that are read for each prompt that is wanted: long ones are left out."""
PRECISIONS = {"bf16-true": "bfloat16", "16-true": "float16", "bf16-mixed": "bfloat16", "16-mixed": "float16"}


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
        from lit_qrl.rollout.engine import SamplerSpec

        truncated = self.sampling.truncated
        if truncated and not self.engine.records_kept:
            raise ConfigError(
                "top_p or top_k is set, and this engine does not report which tokens it kept.",
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


def of_model(model: str, dtype: Any, rows: Sequence[str], chat: bool, **sizes: Any) -> Audited:
    """Return a model beside its embedded engine, with 32 prompts × 4 completions of 256 tokens unless told otherwise.

    Args:
        model: folder, or name on the hub; causal, or of masked diffusion.
        dtype: of the learner.
        rows: texts of the prompts.
        chat: pose them as chat messages.
        **sizes: what is drawn, as the options of `audit`.

    Raises:
        ConfigError: where every prompt is too long.
    """
    from lit_qrl.diffusion_policy import DiffusionPolicy
    from lit_qrl.network.denoising import is_denoiser
    from lit_qrl.network.folder import resolve_model
    from lit_qrl.policy import CausalPolicy
    from lit_qrl.rollout import DiffusionEngine, TransformersEngine
    from lit_qrl.types import SamplingParams

    max_tokens, limit = sizes.get("max_tokens", 256), sizes.get("max_prompt_tokens", 512)
    denoises = is_denoiser(resolve_model(model, weights=False))
    policy: CausalPolicy = (DiffusionPolicy if denoises else CausalPolicy)(model, dtype=dtype)
    encoded = policy.encode_all([[{"role": "user", "content": row}] if chat else row for row in rows])
    encoded = [ids for ids in encoded if len(ids) <= limit][: sizes.get("samples", 32)]
    if not encoded:
        raise ConfigError("Every prompt is longer than --max_prompt_tokens.", given=limit)
    return Audited(
        policy=policy,
        engine=DiffusionEngine(block=min(32, max_tokens)) if denoises else TransformersEngine(),
        prompts=encoded,
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=sizes.get("temperature", 1.0), stop_token_ids=policy.stop_token_ids
        ),
        completions=sizes.get("completions", 4),
    )


def of_run(files: Sequence[str], **sizes: Any) -> Audited:
    """Return the parts of the run that `lit-qrl fit` would make of these files; what `sizes` says comes before them.

    Args:
        files: of the configuration.
        **sizes: what is drawn, as the options of `audit`.

    Raises:
        ConfigError: for files that `fit` would refuse, a task of several turns, or a plugin whose learner computes
            in a number format.
    """
    from lit_qrl.data.problems import admit
    from lit_qrl.loop.turns import TakesTurns
    from lit_qrl.precision.base import QuantizedPrecision
    from lit_qrl.types import SamplingParams

    data, policy, trainer = _parts(files)
    if isinstance(data.task, TakesTurns):
        raise ConfigError(
            "audit generates one answer to each prompt.",
            expected="a task of one turn",
            given=type(data.task).__name__,
            remedy="Give --model and --prompts instead of --config.",
        )
    for plugin in trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]:
        if isinstance(plugin, QuantizedPrecision):
            raise ConfigError(
                "audit measures how far samplers are from a learner that computes in its own dtype.",
                expected="a run without a precision plugin",
                given=type(plugin).__name__,
                remedy="Leave the plugin's file out of --config.",
            )
    wanted = sizes.get("samples", data.prompts_per_iteration)
    limit = sizes.get("max_prompt_tokens", data.max_prompt_tokens)
    data.task.setup()
    rows = data.task.train_rows()
    rows = [rows[number] for number in range(min(len(rows), SPARE * wanted))]
    problems = admit(rows, data.task, policy, "training", limit, "drop")[:wanted]
    sampling = SamplingParams(
        max_tokens=sizes.get("max_tokens", data.max_completion_tokens),
        temperature=sizes.get("temperature", data.temperature),
        top_p=data.top_p,
        top_k=data.top_k,
        stop_token_ids=policy.stop_token_ids,
    )
    return Audited(
        policy=policy,
        engine=data.engine,
        prompts=[problem.prompt_ids for problem in problems],
        sampling=sampling,
        completions=sizes.get("completions", data.group_size),
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
