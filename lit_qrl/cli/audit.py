"""`lit-qrl audit`: how far a model's sampler would be from its learner in each number format, without any training."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_qrl.cli.parser import CommandParser
from lit_qrl.errors import ConfigError

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat

COLUMNS = {
    "mean |d|": "abs_log_ratio",
    "p99 |d|": "log_ratio_p99",
    "KL (k3)": "kl_k3",
    "E|dp|": "abs_prob_diff",
    "ESS": "ess_ratio",
    "chi2/seq": "chi2_sequence",
    "ppl ratio": "ppl_ratio",
}
_EXAMPLES = """
examples:
  lit-qrl audit --model models/tiny-countdown --prompts problems.jsonl --chat false
  lit-qrl audit --model Qwen/Qwen2.5-1.5B-Instruct --prompts openai/gsm8k --subset main --formats fp8_row nvfp4

d is the log-ratio learner / sampler per token, in nats, on completions that the sampler draws. The first row is the
learner's own arithmetic in the engine: what no format can fall below. AIS is in full force from a mean |d| of its
`saturation`; docs/metrics.md says what the columns mean and when to worry.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = CommandParser(
        "audit",
        description="Measure the mismatch of each number format for a model: sample with the quantized weights, score "
        "with the plain ones.",
        epilog=_EXAMPLES,
    )
    made.add_argument("--model", required=True, metavar="MODEL", help="folder, or name on the hub")
    made.add_argument("--prompts", required=True, metavar="DATA", help="JSONL, JSON, CSV or Parquet file, or data set")
    made.add_argument("--prompt_column", default="question", metavar="NAME", help="default: question")
    made.add_argument("--split", default="train", help="of a data set (default: train)")
    made.add_argument("--subset", help="configuration of a data set")
    made.add_argument("--chat", choices=["true", "false"], default="true", help="pose chat messages (default: true)")
    made.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help="number formats of the sampler (default: all but fp16, fp32 and nf4)",
    )
    made.add_argument("--samples", type=int, default=32, metavar="N", help="prompts (default: 32)")
    made.add_argument("--completions", type=int, default=4, metavar="N", help="completions of each (default: 4)")
    made.add_argument("--max_prompt_tokens", type=int, default=512, metavar="N", help="longer ones are left out")
    made.add_argument("--max_tokens", type=int, default=256, metavar="N", help="of a completion (default: 256)")
    made.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    made.add_argument("--dtype", choices=["auto", "bf16", "fp16", "fp32"], default="auto", help="of the learner")
    made.add_argument("--device", default="auto", help="default: a GPU if there is one")
    made.add_argument("--seed", type=int, default=0, help="of the completions (default: 0)")
    made.add_argument("--out", type=Path, metavar="FILE", help="also write every metric as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one row for each format.

    Raises:
        ConfigError: for arguments, a model or prompts that cannot be used.
    """
    arguments = parser().parse_args(argv)
    for name in ("samples", "completions", "max_prompt_tokens", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is too small.", expected="at least 1", given=getattr(arguments, name))
    if arguments.temperature <= 0:
        raise ConfigError("--temperature is out of range.", expected="above 0", given=arguments.temperature)
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        raise ConfigError("--out cannot be written.", expected="a file in a folder that exists", given=arguments.out)

    import torch
    from transformers.utils.logging import disable_progress_bar

    from lit_qrl import formats
    from lit_qrl.formats.support import names_where
    from lit_qrl.network.structure import check_positions
    from lit_qrl.policy import CausalPolicy

    disable_progress_bar()
    chosen = [formats.get(name) for name in arguments.formats or names_where(lambda row: row.audited)]
    rows = _rows(arguments)
    policy = CausalPolicy(arguments.model, dtype=arguments.dtype)
    prompts = [policy.encode(row if arguments.chat == "false" else [{"role": "user", "content": row}]) for row in rows]
    prompts = [ids for ids in prompts if len(ids) <= arguments.max_prompt_tokens][: arguments.samples]
    if not prompts:
        raise ConfigError("Every prompt is longer than --max_prompt_tokens.", given=arguments.max_prompt_tokens)
    check_positions(policy.config, max(map(len, prompts)), arguments.max_tokens, "Lower --max_tokens.")
    name = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(name):  # weights of half precision are kept so on an accelerator
        policy.configure()
    policy.to(name).eval()
    chosen = list(_fitting(chosen, policy.network))
    print(f"{len(prompts)} prompts x {arguments.completions} completions of up to {arguments.max_tokens} tokens\n")
    print(f"{'format':<14}{'bits':>6}{'tokens':>8}" + "".join(f"{title:>11}" for title in COLUMNS), flush=True)
    results: dict[str, dict[str, float]] = {}
    for title, metrics in audit(policy, prompts, chosen, arguments):
        results[title] = metrics
        figures = "".join(f"{metrics[key]:>11.3g}" for key in COLUMNS.values())
        print(f"{title:<14}{metrics['bits']:>6.3g}{metrics['tokens']:>8.0f}{figures}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"model": arguments.model, "formats": results}, indent=2) + "\n")


def _rows(arguments: argparse.Namespace) -> list[str]:
    from lit_qrl.data.sources import check_columns, read_rows

    rows = read_rows(arguments.prompts, arguments.split, arguments.subset)
    check_columns(rows, [arguments.prompt_column], arguments.prompts)
    return [str(row[arguments.prompt_column]) for row in rows]


def _fitting(chosen: "Sequence[NumberFormat]", network: Any) -> "Iterator[NumberFormat]":
    """Yield the formats that the model's layers fit, and say which are left out."""
    from lit_qrl.network.linears import quantizable_linears
    from lit_qrl.precision.base import check_shapes

    layers = quantizable_linears(network)
    for format in chosen:
        try:
            check_shapes(format, layers)
        except ConfigError as error:
            print(f"{format.name} is left out: {error.what}")
            continue
        yield format


def audit(
    policy: Any, prompts: Sequence[Sequence[int]], formats: "Sequence[NumberFormat]", arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each format's name and its metrics, the learner's own arithmetic first.

    Args:
        policy: with its weights.
        prompts: token ids.
        formats: of the sampler's linear layers.
        arguments: `completions`, `max_tokens`, `temperature` and `seed`.
    """
    import torch

    from lit_qrl.functional.mismatch import mismatch_metrics
    from lit_qrl.loop.batching import assemble, deal_by_length
    from lit_qrl.network.linears import quantizable_linears
    from lit_qrl.network.stream import weight_stream
    from lit_qrl.rollout.embedded.engine import TransformersEngine
    from lit_qrl.types import SamplingParams

    sampling = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, stop_token_ids=policy.stop_token_ids
    )
    engine, layers = TransformersEngine(), quantizable_linears(policy.network)
    engine.setup(policy, policy.tokenizer, sampling)
    device, n = next(policy.parameters()).device, arguments.completions
    own = 8.0 * next(iter(layers.values())).weight.element_size()
    for version, format in enumerate((None, *formats)):
        tensors = weight_stream(policy.named_weights(), format, list(layers), dtype=engine.plain_dtype)
        engine.load_weights(tensors, format, version)
        completions = engine.generate(prompts, n, arguments.seed)
        batch = assemble(prompts, completions, n, policy.pad_token_id).to(device)
        learner = torch.zeros_like(batch.sampler_logprobs)
        lengths = (batch.prompt_length + batch.completion_length).tolist()
        with torch.no_grad():
            for part in deal_by_length(lengths, len(prompts)):
                rows = torch.tensor(part, device=device)
                piece = batch.select(rows)
                scores = policy(piece, arguments.temperature).logprobs.float()
                learner[rows, : piece.mask.shape[1]] = scores
        metrics = mismatch_metrics(learner, batch.sampler_logprobs, batch.mask)
        figures = {name: float(value) for name, value in metrics.items()}
        bits = own if format is None else format.bits_per_weight
        yield "learner" if format is None else format.name, {**figures, "bits": bits, "tokens": float(batch.mask.sum())}
