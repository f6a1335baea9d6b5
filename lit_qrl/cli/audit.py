"""`lit-qrl audit`: how far a model's sampler would be from its learner in each number format, without any training."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_qrl.errors import ConfigError

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat
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


def audit(
    *,
    model: str,
    prompts: str,
    prompt_column: str = "question",
    split: str = "train",
    subset: str | None = None,
    chat: bool = True,
    formats: Sequence[str] = (),
    samples: int = 32,
    completions: int = 4,
    max_prompt_tokens: int = 512,
    max_tokens: int = 256,
    temperature: float = 1.0,
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    device: str = "auto",
    seed: int = 0,
    out: Path | None = None,
) -> dict[str, dict[str, float]]:
    """Measure the mismatch of each number format for a model: sample with quantized weights, score with plain ones.

    Examples:
      lit-qrl audit --model models/tiny-countdown --prompts problems.jsonl --chat false
      lit-qrl audit --model Qwen/Qwen2.5-1.5B-Instruct --prompts openai/gsm8k --subset main --formats fp8_row nvfp4

    d is the log-ratio learner / sampler per token, in nats, on completions that the sampler draws. The first row is the
    learner's own arithmetic in the engine: what no format can fall below. Bits are per weight of the whole
    model. AIS is in full force from a mean |d| of its `saturation`; docs/metrics.md says what the columns mean and when
    to worry. The odds below the table are how often runs of the study in docs/evidence.md ended 0.05 or more below a
    bf16 sampler at such a mean |d|, by what corrected them.

    Args:
        model: folder, or name on the hub.
        prompts: JSONL, JSON, CSV or Parquet file, or data set.
        prompt_column: of the problem's text.
        split: of a data set.
        subset: configuration of a data set.
        chat: pose chat messages.
        formats: number formats of the sampler (default: all but fp16, fp32, nf4 and int3_channel).
        samples: prompts.
        completions: of each prompt.
        max_prompt_tokens: longer ones are left out.
        max_tokens: of a completion.
        temperature: of sampler and learner.
        dtype: of the learner.
        device: auto takes a GPU if there is one.
        seed: of the completions.
        out: file to write every metric into, as JSON.

    Returns:
        metrics by name, by format; what is printed as one row for each format.

    Raises:
        ConfigError: for arguments, a model or prompts that cannot be used.
    """
    positive = {
        "samples": samples,
        "completions": completions,
        "max_prompt_tokens": max_prompt_tokens,
        "max_tokens": max_tokens,
    }
    for name, count in positive.items():
        if count < 1:
            raise ConfigError(f"--{name} is too small.", expected="at least 1", given=count)
    if temperature <= 0:
        raise ConfigError("--temperature is out of range.", expected="above 0", given=temperature)
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError("--out cannot be written.", expected="a file in a folder that exists", given=out)

    import torch
    from transformers.utils.logging import disable_progress_bar

    from lit_qrl.formats import get
    from lit_qrl.formats.support import names_where
    from lit_qrl.network.structure import check_positions, outline_of
    from lit_qrl.types import SamplingParams

    disable_progress_bar()
    chosen = [get(name) for name in formats or names_where(lambda row: row.audited)]
    rows = _rows(prompts, split, subset, prompt_column)
    policy, engine = _sides(model, dtype, max_tokens)
    encoded = [policy.encode([{"role": "user", "content": row}] if chat else row) for row in rows]
    encoded = [ids for ids in encoded if len(ids) <= max_prompt_tokens][:samples]
    if not encoded:
        raise ConfigError("Every prompt is longer than --max_prompt_tokens.", given=max_prompt_tokens)
    check_positions(policy.config, max(map(len, encoded)), max_tokens, "Lower --max_tokens.")
    place = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    engine.check_model(outline_of(policy))
    with torch.device(place):  # weights of half precision are kept so on an accelerator
        policy.configure()
    policy.to(place).eval()
    chosen = list(_fitting(chosen, policy.network))
    print(f"{len(encoded)} prompts x {completions} completions of up to {max_tokens} tokens\n")
    print(f"{'format':<14}{'bits':>6}{'tokens':>8}" + "".join(f"{title:>11}" for title in COLUMNS), flush=True)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_token_ids=policy.stop_token_ids)
    results: dict[str, dict[str, float]] = {}
    for title, metrics in measured(policy, encoded, chosen, sampling, completions, seed, engine):
        results[title] = metrics
        figures = "".join(f"{metrics[key]:>11.3g}" for key in COLUMNS.values())
        print(f"{title:<14}{metrics['bits']:>6.3g}{metrics['tokens']:>8.0f}{figures}", flush=True)
    print("\n" + "\n".join(odds_of_loss(results)))
    if out is not None:
        out.write_text(json.dumps({"model": model, "formats": results}, indent=2) + "\n")
    return results


def odds_of_loss(results: dict[str, dict[str, float]]) -> list[str]:
    """Return lines that say of each format how likely a run is to lose by it, and with which correction least.

    Args:
        results: metrics by format, the learner's own arithmetic among them.
    """
    from lit_qrl.functional.loss_models import AUDIT
    from lit_qrl.functional.loss_odds import CORRECTIONS, LOSS, audit_inputs

    lines = [f"Odds of a loss of {LOSS:g} or more, in the study of docs/evidence.md at such a mean |d|:"]
    lines += [f"{'format':<14}" + "".join(f"{name:>12}" for name in CORRECTIONS)]
    lowest, highest = math.exp(AUDIT.lowest[0]), math.exp(AUDIT.highest[0])
    for title, metrics in results.items():
        if title == "learner":
            continue
        distance = metrics["abs_log_ratio"]
        # the odds rise with the distance, so those of the nearest that was run are a bound
        sign = "<" if distance < lowest else ">" if distance > highest else ""
        near = min(max(distance, lowest), highest)
        odds = {name: AUDIT.probability(audit_inputs(near, *given)) for name, given in CORRECTIONS.items()}
        best = min(odds, key=odds.__getitem__)
        advice = "" if odds["none"] < 0.5 else f"  {best}-level weights" if odds[best] < 0.5 else "  align the learner"
        lines.append(f"{title:<14}" + "".join(f"{f'{sign}{one:.0%}':>12}" for one in odds.values()) + advice)
    return lines


def _rows(prompts: str, split: str, subset: str | None, column: str) -> list[str]:
    from lit_qrl.data.sources import check_columns, read_rows

    rows = read_rows(prompts, split, subset)
    check_columns(rows, [column], prompts)
    return [str(row[column]) for row in rows]


def _sides(model: str, dtype: Any, max_tokens: int) -> tuple[Any, Any]:
    """Return the policy and the engine for a model, a causal or a masked-diffusion one."""
    from lit_qrl.diffusion_policy import DiffusionPolicy
    from lit_qrl.network.denoising import is_denoiser
    from lit_qrl.network.folder import resolve_model
    from lit_qrl.policy import CausalPolicy
    from lit_qrl.rollout import DiffusionEngine, TransformersEngine
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.types import SamplingParams

    if not is_denoiser(resolve_model(model, weights=False)):
        return CausalPolicy(model, dtype=dtype), TransformersEngine()
    engine = DiffusionEngine(block=min(32, max_tokens))
    engine.validate(SamplerSpec(sampling=SamplingParams(max_tokens=max_tokens)))
    return DiffusionPolicy(model, dtype=dtype), engine


def _fitting(chosen: "Sequence[NumberFormat]", network: Any) -> "Iterator[NumberFormat]":
    """Yield the formats that the model's layers fit, and say which are left out."""
    from lit_qrl.formats import Dense
    from lit_qrl.network.linears import check_quantizable, quantizable_layers
    from lit_qrl.precision.base import check_shapes

    layers = quantizable_layers(network)
    for format in chosen:
        try:
            if not isinstance(format, Dense):
                check_quantizable(network, format.name)
                check_shapes(format, layers)
        except ConfigError as error:
            print(f"{format.name} is left out: {error.what}")
            continue
        yield format


def measured(
    policy: Any,
    prompts: Sequence[Sequence[int]],
    formats: "Sequence[NumberFormat]",
    sampling: "SamplingParams",
    n: int,
    seed: int,
    engine: Any = None,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each format's name and its metrics, the learner's own arithmetic first.

    Args:
        policy: with its weights.
        prompts: token ids.
        formats: of the sampler's linear layers.
        sampling: length, temperature and stop tokens.
        n: completions of each prompt.
        seed: of the completions.
        engine: that samples; None is `TransformersEngine`.
    """
    import torch

    from lit_qrl.functional.mismatch import mismatch_metrics
    from lit_qrl.loop.batching import assemble, deal_by_length
    from lit_qrl.precision.source import WeightSource, unchanged
    from lit_qrl.rollout.embedded.engine import TransformersEngine
    from lit_qrl.rollout.engine import SamplerSpec

    engine = engine or TransformersEngine()
    engine.setup(SamplerSpec(sampling=sampling, estimator=getattr(policy, "estimator", None)), policy)
    device = next(policy.parameters()).device
    parameters = sum(tensor.numel() for _, tensor in policy.named_weights())
    for version, format in enumerate((None, *formats)):
        tensors = WeightSource(policy, format).whole(unchanged, engine.plain_dtype)
        report = engine.load_weights(tensors, format, version)
        completions = engine.generate(prompts, n, seed)
        batch = assemble(prompts, completions, n, policy.pad_token_id).to(device)
        learner = torch.zeros_like(batch.sampler_logprobs)
        lengths = batch.total_length.tolist()
        with torch.no_grad():
            for part in deal_by_length(lengths, len(prompts)):
                rows = torch.tensor(part, device=device)
                piece = batch.select(rows)
                scores = policy(piece, sampling.temperature).logprobs.float()
                learner[rows, : piece.mask.shape[1]] = scores
        metrics = mismatch_metrics(learner, batch.sampler_logprobs, batch.mask)
        figures = {name: float(value) for name, value in metrics.items()}
        figures |= {"bits": 8 * report.bytes / parameters, "tokens": float(batch.mask.sum())}
        yield "learner" if format is None else format.name, figures
