"""Write the tables of docs/one_gpu.md and docs/scale.md: memory by model, format and what is trained.

The sums are those of `--dry_run`.

    python docs/sizing.py

Models are built without weights; nothing needs a GPU.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import peft
import torch
from lightning.pytorch.plugins import Precision

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lit_qrl import formats  # noqa: E402  beside the checkout
from lit_qrl.callbacks import WeightPublisher  # noqa: E402
from lit_qrl.cli import dry_run  # noqa: E402
from lit_qrl.objective import GRPO  # noqa: E402
from lit_qrl.policy import CausalPolicy  # noqa: E402
from lit_qrl.precision import NVFP4LoRA  # noqa: E402
from lit_qrl.rollout import VLLMEngine  # noqa: E402
from lit_qrl.rollout.engine import SamplerSpec  # noqa: E402

PAGE, SCALE = ROOT / "docs" / "one_gpu.md", ROOT / "docs" / "scale.md"
LAYOUTS = "<!-- docs/sizing.py writes the layouts -->\n"
TABLE, COMPARISON = (f"<!-- docs/sizing.py writes {what} -->\n" for what in ("this table", "the comparison"))
END = "<!-- end -->\n"
GROUPS, GROUP, PROMPT, COMPLETION = 4, 8, 256, 768
"""The load that key-value cache and logits are counted for: 32 sequences of 1024 tokens."""
_SMALL = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}
_LARGE = {"vocab_size": 152064, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": _SMALL
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": _SMALL
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3B": _SMALL
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "7B": {"vocab_size": 152064, "num_key_value_heads": 4}
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "14B": _LARGE | {"intermediate_size": 13824, "num_hidden_layers": 48},
    "32B": _LARGE | {"intermediate_size": 27648, "num_hidden_layers": 64},
    "72B": _LARGE
    | {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""The shapes of Qwen2.5."""
ONE_GPU = tuple(SHAPES)[:-1]
GPU = torch.device("cuda")


class Row(NamedTuple):
    """What is trained, and what the sampler has; `together` GPUs hold one of its engines."""

    trained: str
    sampler: str
    optimizer: str = "AdamW"
    together: int = 1


ROWS = (
    Row("full", "bf16"),
    Row("full", "fp8_row"),
    Row("full", "fp8_row", "AdamW8bit"),
    Row("LoRA over bf16", "bf16"),
    Row("LoRA over bf16", "fp8_row"),
    Row("LoRA over nvfp4", "nvfp4"),
    Row("LoRA over nvfp4, shared", "nvfp4"),
)
MEASURED = (
    ("3B", Row("LoRA over bf16", "bf16"), 18.2),
    ("3B", Row("LoRA over nvfp4", "nvfp4"), 10.9),
    ("7B", Row("LoRA over bf16", "bf16"), 36.7),
    ("7B", Row("LoRA over nvfp4", "nvfp4"), 19.2),
    ("14B", Row("LoRA over bf16", "bf16"), 71.0),
    ("14B", Row("LoRA over nvfp4", "nvfp4"), 35.6),
    ("32B", Row("LoRA over nvfp4", "nvfp4"), 61.8),
    ("32B", Row("LoRA over nvfp4, shared", "nvfp4"), 38.8),
)
"""Peaks of the whole process in docs/studies/qerl.md, GiB, at 8 sequences of 256 + 1024 tokens."""


@cache
def learner(shape: str, adapted: bool) -> tuple[CausalPolicy, dry_run.Tensors]:
    """Return a policy of that shape, without weights, and its parameters."""
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16", **SHAPES[shape]}
    adapter = peft.LoraConfig(r=32, lora_alpha=64, target_modules="all-linear") if adapted else None
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "models" / "tiny-countdown" / name, folder)
        Path(folder, "config.json").write_text(json.dumps(config))
        policy = CausalPolicy(folder, dtype="bf16", lora=adapter, random_weights=True)
        trainer: Any = SimpleNamespace(strategy=None, precision="bf16-true")
        module: Any = SimpleNamespace(policy=policy)
        return policy, dry_run.tensors(module, trainer, GPU)


def parts(shape: str, row: Row, groups: int = GROUPS, completion: int = COMPLETION) -> dict[str, float]:
    """Return GiB by part, for so many groups of completions of that length."""
    policy, held = learner(shape, row.trained != "full")
    format = None if row.sampler == "bf16" else formats.get(row.sampler)
    publisher = WeightPublisher(row.sampler)
    publisher.spec = SamplerSpec(format=format)
    trainer: Any = SimpleNamespace(
        precision_plugin=NVFP4LoRA() if "nvfp4" in row.trained else Precision(),
        strategy=None,
        callbacks=[publisher],
    )
    data: Any = SimpleNamespace(
        engine=VLLMEngine(dtype="bf16", tensor_parallel_size=row.together),
        max_prompt_tokens=PROMPT,
        max_completion_tokens=completion,
        prompts_per_rank=groups,
        group_size=GROUP,
        mini_batches=1,
        micro_batches=1,
        parts=1,
        budget=None,
    )
    module: Any = SimpleNamespace(
        policy=policy,
        objective=GRPO(),
        master_weights=True,
        optimizer=lambda named: torch.optim.AdamW(dict(named).values()),
    )
    found = {
        part.name: part.size / dry_run.GIB for part in dry_run.parts(trainer, module, data, held, dry_run.Target(GPU))
    }
    if row.optimizer == "AdamW8bit":  # two states of one byte, as the test of docs/numerics.md counts
        found["optimizer states"] /= 4
    if row.trained.endswith("shared"):  # the packed layers exist once, in the engine
        found["weights"] -= held.count(held.quantizable) * NVFP4LoRA().format.bits_per_weight / 8 / dry_run.GIB
    return found


def lines(shapes: tuple[str, ...] = ONE_GPU) -> Iterator[str]:
    """Yield the table's lines."""
    yield f"| trained | sampler | optimizer | {' | '.join(shapes)} |"
    yield f"| --- | --- | --- |{' ---: |' * len(shapes)}"
    for row in ROWS:
        sums = (f"{sum(parts(shape, row).values()):.1f}" for shape in shapes)
        yield f"| {row.trained} | `{row.sampler}` | {row.optimizer} | {' | '.join(sums)} |"


def comparison() -> Iterator[str]:
    """Yield the lines of the table of sums against measured peaks."""
    yield "| model | trained | sum | measured | the rest |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for shape, row, measured in MEASURED:
        whole = sum(parts(shape, row, groups=1, completion=1024).values())
        yield f"| {shape} | {row.trained} | {whole:.1f} | {measured:.1f} | {measured - whole:.1f} |"


def per_gpu(shape: str, row: Row, gpus: int, layout: str) -> float:
    """Return GiB on each of so many GPUs that share 32 sequences, with a learner that is whole or in fp32 parts.

    A part is 16 bytes a trained weight: itself, its gradient and AdamW's two states. Beside it there are, whole and in
    bf16, two decoder layers (the next is fetched while one computes), what is no layer, and a sum in fp32. Codes of a
    packed base are on every GPU, or a part of them and one matrix in bf16.
    """
    found = parts(shape, row, groups=max(GROUPS // gpus, 1))
    if layout == "whole":
        return sum(found.values())
    _, held = learner(shape, row.trained != "full")
    codes = held.quantizable if "nvfp4" in row.trained else set()
    layers = {name for name in held.shapes if ".layers." in name} - set(codes)
    one, rest = held.count(layers) / SHAPES[shape]["num_hidden_layers"], held.count(set(held.shapes) - layers - codes)
    trained, whole = held.count(held.trained), held.count(set(held.shapes) - set(codes))
    kept = (4 * (whole - trained) + 16 * trained) / gpus + 2 * (2 * one + rest) + 4 * max(one, rest)
    packed = NVFP4LoRA().format.bits_per_weight / 8 * held.count(codes)
    matrix = 2 * SHAPES[shape]["hidden_size"] * SHAPES[shape]["intermediate_size"] if codes else 0
    kept += matrix + (packed / gpus if layout == "codes in parts" else packed)
    learners = ("weights", "adapters", "master bits", "gradients", "optimizer states")
    return kept / dry_run.GIB + sum(size for name, size in found.items() if name not in learners)


LAYOUT_ROWS = (
    ("`ddp`", "whole", ROWS[1], (2,)),
    ("`ShardedStrategy`", "parts", ROWS[0], (2, 4, 8, 64)),
    ("`ShardedStrategy`", "parts", ROWS[1], (2, 4, 8, 64)),
    ("`ShardedStrategy`", "parts", Row("full", "fp8_row", together=2), (2, 8)),
    ("`ShardedStrategy`", "parts", Row("full", "fp8_row", together=8), (8, 64)),
    ("`ShardedStrategy`", "parts", ROWS[4], (2, 4, 8)),
    ("`ShardedStrategy`", "parts", ROWS[5], (2, 8)),
    ("`ShardedStrategy`", "codes in parts", ROWS[5], (2, 8)),
)


def layouts(shapes: tuple[str, ...] = tuple(SHAPES)) -> Iterator[str]:
    """Yield the lines of the table of layouts."""
    yield f"| strategy | trained | sampler | GPUs | {' | '.join(shapes)} |"
    yield f"| --- | --- | --- | ---: |{' ---: |' * len(shapes)}"
    for name, layout, row, counts in LAYOUT_ROWS:
        for gpus in counts:
            sums = (
                "heads" if SHAPES[shape]["num_attention_heads"] % row.together
                else f"{per_gpu(shape, row, gpus, layout):.1f}"
                for shape in shapes
            )  # fmt: skip
            trained = row.trained.replace("bf16", "fp32") + (", codes in parts" if layout == "codes in parts" else "")
            sampler = f"`{row.sampler}`" + (f" over {row.together}" if row.together > 1 else "")
            yield f"| {name} | {trained} | {sampler} | {gpus} | {' | '.join(sums)} |"


def main() -> None:
    """Put the tables into their page."""
    for page, begin, made in ((PAGE, TABLE, lines()), (PAGE, COMPARISON, comparison()), (SCALE, LAYOUTS, layouts())):
        before, _, rest = page.read_text().partition(begin)
        page.write_text(before + begin + "\n" + "\n".join(made) + "\n\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
