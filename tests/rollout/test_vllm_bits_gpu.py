"""On a GPU of compute capability 9.0 with vLLM 0.26: learner equals sampler, and a run its repetition, bit by bit."""

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from lit_qrl.callbacks import AIS
from lit_qrl.errors import ConfigError
from lit_qrl.precision import PackedLoRA, QATAligned
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.run.test_determinism import left_as_found, rows  # noqa: F401  a fixture
from tests.tables import csv_rows
from tests.tiny_run import fit, model_folder, parameters_of

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def engine(**options):
    return VLLMEngine(max_num_seqs=64, gpu_memory_utilization=0.1, kv_cache_gib=1.0, quick_start=True, **options)


@pytest.mark.parametrize("plugin", [None, "fp8_row", "fp8_block"])
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("head", [64, 96, 128, 256])
def test_the_log_ratio_of_every_token_is_zero(tmp_path, plugin, kind, head):
    if kind is Qwen3Config and head % 128:
        pytest.skip("refused: norms over such heads are not the learner's")
    if plugin == "fp8_block" and 2 * head % 128:
        pytest.skip("refused: keys do not divide into blocks")
    if torch.cuda.get_device_capability() != (9, 0):  # whose kernels the mode has
        with pytest.raises(ConfigError, match=r"compute capability 9\.0"):
            engine(batch_invariant=True).validate(SamplerSpec())
        return
    learn_exactly(tmp_path, kind, head, plugin and QATAligned(plugin))


def learn_exactly(tmp_path, kind, head, plugin, lora=None, published="auto"):
    """Make a run of three iterations, of which every token's ratio must be 1."""
    model_folder(tmp_path / "model", config_class=kind, head_dim=head, **SIZES)
    options = {"plugins": [plugin]} if plugin else {"precision": "bf16-true"}
    sizes = {"prompts_per_iteration": 40, "group_size": 8, "mini_batches": 2, "micro_batches": 2}
    _, _, data = fit(
        tmp_path,
        callbacks=[AIS()],
        format="auto",
        policy={"dtype": "bf16", "gradient_checkpointing": True, "lora": lora},
        publisher={"lora": published},
        engine=engine(batch_invariant=True),
        trainer={"accelerator": "gpu", "max_epochs": 3, **options},
        data=sizes,
    )
    data.engine.close()
    found = [row for row in csv_rows(tmp_path / "run" / "metrics.csv") if row["mismatch/ratio_max"]]
    assert len(found) == 3
    for row in found:
        assert float(row["mismatch/ratio_max"]) == float(row["mismatch/ratio_min"]) == 1
        assert float(row["mismatch/abs_log_ratio"]) == 0
    assert any(float(row["update/grad_norm"] or 0) > 0 for row in found)  # none where all rewards of a group agree


@pytest.mark.parametrize(
    ("kind", "head", "plugin", "published"),
    [
        (LlamaConfig, 64, lambda: QATAligned("int4_group"), None),
        (Qwen3Config, 128, lambda: QATAligned("int4_group"), None),
        (Qwen3Config, 128, lambda: QATAligned("nvfp4"), None),
        (LlamaConfig, 64, None, "adapter"),
        (Qwen2Config, 64, None, "merged"),
        (LlamaConfig, 64, lambda: PackedLoRA("int4_group"), "adapter"),
        (Qwen3Config, 128, lambda: PackedLoRA("int4_group"), "adapter"),
        (Qwen3Config, 128, lambda: PackedLoRA("fp8_row"), "adapter"),
    ],
    ids=[
        "int4_group-64",
        "int4_group-128",
        "nvfp4-128",
        "lora_beside_bf16-64",
        "lora_merged_into_bf16-64",
        "lora_beside_int4_group-64",
        "lora_beside_int4_group-128",
        "lora_beside_fp8_row-128",
    ],
)
def test_so_it_is_of_weights_alone_in_few_bits_and_of_adapters(tmp_path, kind, head, plugin, published):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("refused, as above")
    lora = None
    if published is not None:  # trained from the start: with B at zero an adapter adds nothing
        lora = LoraConfig(r=8, lora_alpha=12, target_modules="all-linear", init_lora_weights=False)
    learn_exactly(tmp_path, kind, head, plugin and plugin(), lora, published or "auto")


def test_layers_computed_alike_leave_the_last_bits_of_the_head(tmp_path):
    found = {}
    for alike in (False, True):
        folder = tmp_path / str(alike)
        model_folder(folder / "model", head_dim=128, **SIZES)
        _, _, data = fit(
            folder,
            callbacks=[AIS()],
            format="auto",
            policy={"dtype": "bf16"},
            engine=engine(same_kernels=alike),
            trainer={"accelerator": "gpu", "max_epochs": 3, "plugins": [QATAligned("fp8_row")]},
            data={"prompts_per_iteration": 40, "group_size": 8},
        )
        data.engine.close()
        rows = csv_rows(folder / "run" / "metrics.csv")
        found[alike] = [float(row["mismatch/kl_k3"]) for row in rows if row["mismatch/kl_k3"]]
    assert len(found[True]) == 3
    assert sum(found[True]) < sum(found[False]) / 3


@pytest.mark.parametrize("kind", ["embedded", "vllm", "invariant"])
def test_two_deterministic_runs_are_equal_to_the_last_bit(tmp_path, kind):
    found = []
    for name in ("first", "second"):
        model_folder(tmp_path / name / "model", head_dim=128, **SIZES)
        made = TransformersEngine() if kind == "embedded" else engine(batch_invariant=kind == "invariant")
        _, module, data = fit(
            tmp_path / name,
            format="auto" if kind == "invariant" else "fp8_row",
            policy={"dtype": "bf16"},
            engine=made,
            trainer={"accelerator": "gpu", "deterministic": True, "max_epochs": 20, "precision": "bf16-true"},
        )
        data.engine.close()
        found.append((rows(tmp_path / name), parameters_of(module)))
    assert found[0][0] == found[1][0]
    assert found[0][1].equal(found[1][1])
