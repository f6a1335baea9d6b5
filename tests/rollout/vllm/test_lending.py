import pytest
import torch
from peft import LoraConfig

from lit_qrl import formats
from lit_qrl.callbacks import AQNNoise, RLCallback
from lit_qrl.errors import ConfigError
from lit_qrl.precision import NVFP4LoRA
from lit_qrl.precision.packed_lora import PackedLinear
from lit_qrl.precision.vllm_kernels.borrowed import MarlinNVFP4
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.tiny_run import build, model_folder, parameters_of

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def lora():
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)


def test_only_the_known_layout_is_shared_and_nothing_that_sleeps(format_rows):
    with pytest.raises(ConfigError, match="nvfp4 on CPU"):
        VLLMEngine().check_sharing(formats.get("nvfp4"))
    format_rows("nvfp4", vllm_lends=("cpu", "cuda"))
    VLLMEngine().check_sharing(formats.get("nvfp4"))
    for name in ("mxfp4", "int4_group", "nf4"):
        with pytest.raises(ConfigError, match=name):
            VLLMEngine().check_sharing(formats.get(name))
    with pytest.raises(ConfigError, match="sleep_level"):
        VLLMEngine(sleep_level=1).check_sharing(formats.get("nvfp4"))
    assert VLLMEngine().stored_weight("model.layers.0.mlp.up_proj") is None


class Bits(RLCallback):
    """Keeps what the learner and the engine held when a rollout ended."""

    def __init__(self):
        self.tokens, self.mismatch, self.borrowed = [], [], []

    def on_rollout_end(self, trainer, module, batch):
        self.tokens.append(batch.tokens.clone())
        self.mismatch.append(float((module.score(batch) - batch.sampler_logprobs)[batch.mask].abs().mean()))
        layers = [part for part in module.policy.network.modules() if isinstance(part, PackedLinear)]
        self.borrowed.append((sum(layer.stored is not None for layer in layers), len(layers)))
        engine, network = module.data.engine, module.policy.network
        shared = {engine.live.locate_layer(f"model.layers.{i}.mlp.up_proj").module.weight.data_ptr() for i in (0, 1)}
        self.same_memory = {layer.stored.words.data_ptr() for layer in layers if layer.stored is not None} >= shared
        embedding = network.get_input_embeddings().weight
        self.same_embedding = embedding.data_ptr() == engine.read_back("model.embed_tokens.weight").data_ptr()


def run(folder, share, **options):
    model_folder(folder / "model", **SIZES)
    watch = Bits()
    trainer, module, data = build(
        folder,
        callbacks=[watch, AQNNoise(start=0.1, end=0.1, num_stages=2)],
        format="auto",
        policy={"lora": lora(), "dtype": "bf16"},
        publisher={"probe_every": 1},
        trainer={"max_epochs": 3, "plugins": [NVFP4LoRA(share_weights=share)]},
        **options,
    )
    data.engine = VLLMEngine(dtype="bf16", max_num_seqs=16, max_lora_rank=8)
    trainer.fit(module, datamodule=data)
    return module, watch


@pytest.mark.vllm
def test_a_run_over_a_shared_base_is_the_run_over_two_bit_for_bit(tmp_path):
    from tests import marlin_shim

    with marlin_shim.installed():
        two, apart = run(tmp_path / "two", share=False)
        one, watch = run(tmp_path / "one", share=True)
    assert watch.borrowed == [(14, 14)] * 3
    assert apart.borrowed == [(0, 14)] * 3
    assert watch.same_memory
    assert watch.same_embedding
    assert not apart.same_embedding
    assert watch.mismatch == apart.mismatch
    assert watch.mismatch[0] < 0.05  # of bf16 kernels; the noise begins at the second iteration
    assert watch.mismatch[1] > 0.05
    assert all(torch.equal(a, b) for a, b in zip(watch.tokens, apart.tokens, strict=True))
    assert torch.equal(parameters_of(one), parameters_of(two))


@pytest.mark.vllm
@pytest.mark.parametrize(("out", "inside"), [(64, 128), (192, 128), (128, 64)])
def test_the_layout_is_that_of_vllms_own_repacking(out, inside):
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import nvfp4_marlin_process_scales

    from tests.marlin_shim import repack

    weight = torch.randn(out, inside, generator=torch.Generator().manual_seed(0))
    format = formats.get("nvfp4")
    for amax in (None, weight.abs().amax() * 64):  # vLLM lifts scales that are far below E4M3's largest
        q = format.quantize(weight, amax)
        words = repack(q.codes.view(torch.int32).T.contiguous(), inside, out)
        permuted = marlin_permute_scales(q.scales.T.contiguous().bfloat16(), inside, out, 16)
        stored, factor = nvfp4_marlin_process_scales(permuted, a_dtype=torch.bfloat16)
        found = MarlinNVFP4(words, stored.view(torch.uint8), 0, out).matched(q)
        assert found is not None
        assert found.factor == factor
        assert torch.equal(found.dequantized(format, q.global_scale, torch.float32), format.dequantize(q))
    assert factor > 1
