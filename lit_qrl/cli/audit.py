"""`lit-qrl audit`: how far a model's sampler would be from its learner in each number format, without any training."""

import json
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_qrl.errors import ConfigError

if TYPE_CHECKING:
    from lit_qrl.cli.audited import Audited
    from lit_qrl.formats.base import NumberFormat
    from lit_qrl.rollout.engine import SamplerSpec

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

    d is the log-ratio learner / sampler per token, in nats, on completions that the sampler draws. The first row is the
    learner's own arithmetic in the engine: what no format can fall below. Bits are per weight of the whole
    model. AIS is in full force from a mean |d| of its `saturation`; docs/metrics.md says what the columns mean and when
    to worry.

    --speed adds tokens/s of the whole rollout and the seconds of a publish, and says which format makes the two
    shortest together, and at what mean |d|. A rollout of the same shape comes before the timed ones.

    Args:
        model: folder, or name on the hub.
        prompts: JSONL, JSON, CSV or Parquet file, or data set.
        config: YAML files of a run, as after `fit --config`, instead of model and prompts.
        prompt_column: of the problem's text.
        split: of a data set.
        subset: configuration of a data set.
        chat: pose chat messages.
        formats: number formats of the sampler, options behind a colon, as int4_group:group_size=64 (default: all but
            fp16, fp32, nf4 and int3_channel).
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
    from lit_qrl.cli.audited import Sizes, fitting, of_model, of_run

    sizes = Sizes(
        samples=samples,
        completions=completions,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        temperature=temperature,
    )
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
        audited = of_run(config, sizes)
    else:
        assert model is not None
        assert prompts is not None
        audited = of_model(model, dtype, _rows(prompts, split, subset, prompt_column), chat, sizes)
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
