import pytest
import torch

from lit_qrl import formats
from lit_qrl.quantize import quantize_checkpoint
from tests.cpu_kernels import skip_without_kernel
from tests.networks import build_tokenizer
from tests.vllm_engines import VOCABULARY, reference_logprobs, tiny_network

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "source"
    tiny_network(dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
    build_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["nvfp4", "int4_group"])
def test_vllm_reads_the_folder(name, source, tmp_path):
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from lit_qrl.rollout.vllm.arguments import EXTENSION
    from lit_qrl.rollout.vllm.process import kept_process_state, prepare_environment, shutdown, undone_on_failure
    from tests import vllm_cpu_shim

    prepare_environment(deep_gemm=False, kv_cache_gib=None)  # in this process, where the shim is
    vllm_cpu_shim.install()
    format = formats.get(name, **({"group_size": 32} if name == "int4_group" else {}))
    skip_without_kernel(format)
    generator = torch.Generator().manual_seed(0)
    quantize_checkpoint(source, tmp_path / "out", format, shard_bytes=300_000)
    with undone_on_failure(lambda: None), kept_process_state():  # vLLM takes `torch.set_num_threads` away
        llm = LLM(
            str(tmp_path / "out"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 * 2**20,
            disable_log_stats=True,
            distributed_executor_backend="uni",
            worker_extension_cls=EXTENSION,
        )
    prompt = torch.randint(3, VOCABULARY, (40,), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=1, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    tokens = list(answer.outputs[0].token_ids)
    got = torch.tensor([step[token].logprob for step, token in zip(answer.outputs[0].logprobs, tokens, strict=True)])
    shutdown(llm, owns_process_group=True)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    expected = reference_logprobs(network, prompt, tokens, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    away = (reference_logprobs(plain, prompt, tokens, dtype=torch.bfloat16) - expected).abs().mean()
    error = (got - expected).abs().mean()
    assert error < 0.03
    assert error < away / 3  # what the rounding itself moves
