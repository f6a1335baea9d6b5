"""Every command as a user types it, on a GPU (`-m gpu`, about two minutes of an H100) or a CPU (`-m slow`).

What `export` and `quantize` write is then loaded by transformers and PEFT, and by vLLM where it is installed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.networks import build_network
from tests.tiny_run import command, model_folder
from tests.vllm_engines import SIZES

REPOSITORY = Path(__file__).resolve().parents[2]
LORA = json.dumps({"class_path": "peft.LoraConfig", "init_args": {"r": 8, "target_modules": "all-linear"}})
PACKED = json.dumps([{"class_path": "NVFP4LoRA"}])
LIMIT = 500
"""Seconds of one command; on a GPU alone each takes about ten."""

FIRST = {
    "fit": [],
    "fit_lora": ["--model.policy.lora", LORA],
    "fit_packed": ["--model.policy.lora", LORA, "--trainer.plugins", PACKED],
    "dry_run": ["--dry_run"],
}
"""Options of `fit`."""
EXPORTS = {
    "plain": ("fit", []),
    "masters": ("fit", ["--dtype", "fp32"]),
    "fp8": ("fit", ["--format", "fp8_row"]),
    "merged": ("fit_lora", []),
    "merged_fp8": ("fit_lora", ["--format", "fp8_row"]),
    "adapter": ("fit_lora", ["--adapter"]),
    "unpacked": ("fit_packed", ["--dtype", "bf16"]),
    "packed_again": ("fit_packed", ["--format", "nvfp4"]),
    "packed_adapter": ("fit_packed", ["--adapter"]),
}
"""Of which run, and with which options."""
ADAPTERS = ("adapter", "packed_adapter")
EVALUATIONS = ("validate", "test", "predict")
LOADERS = {
    "transformers": """
import sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel
device, base, folders, adapters = sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4].split(",")
tokens = torch.tensor([[2, 3, 4, 12, 5]], device=device)
for folder in [*folders, *adapters]:
    network = AutoModelForCausalLM.from_pretrained(base if folder in adapters else folder).to(device)
    if folder in adapters:
        network = PeftModel.from_pretrained(network, folder)
    assert network(tokens).logits.isfinite().all(), folder
    print("loaded", folder, flush=True)
""",
    "vllm": """
import sys
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
def main():
    device, base, folders, adapters = sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4].split(",")
    options = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28} if device == "cuda" else {}
    options |= {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4, "dtype": "bfloat16"}
    prompt, sampling = {"prompt_token_ids": [2, 3, 4, 12, 5]}, SamplingParams(max_tokens=4, ignore_eos=True)
    for folder in [*folders, base]:
        lora = {"enable_lora": True, "max_lora_rank": 8} if folder == base else {}
        llm = LLM(folder, **options, **lora)
        for number, adapter in enumerate(adapters if lora else [None], 1):
            request = LoRARequest(adapter, number, adapter) if adapter else None
            drawn = llm.generate([prompt], sampling, lora_request=request)[0].outputs[0].token_ids
            assert len(drawn) == 4, folder
            print("loaded", adapter or folder, flush=True)
        del llm
        cleanup_dist_env_and_memory()
if __name__ == "__main__":
    main()
""",
}


@pytest.fixture(
    scope="module", params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def ran(request, tmp_path_factory):
    """Run all commands, those at a time that need nothing of each other, and return what each said, and the place."""
    place, device = tmp_path_factory.mktemp(request.param), request.param
    cuda = "cuda" if device == "gpu" else "cpu"
    model = model_folder(
        place / "model", lambda **sizes: build_network(gain=1, dtype=torch.bfloat16, **{**sizes, **SIZES})
    )
    said: dict[str, subprocess.CompletedProcess[str]] = {}
    visible = {} if device == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **visible, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

    def run(name, *words, program=("-m", "lit_qrl.cli")):
        line = [sys.executable, *program, *map(str, words)]
        options = {"cwd": place, "env": environment, "text": True, "timeout": LIMIT, "check": False}
        said[name] = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)

    def together(*calls):
        with ThreadPoolExecutor(max_workers=min(6, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda call: run(*call), calls))

    def fit(name, options):
        (place / name).mkdir()
        words = command(place / name, model, "--trainer.accelerator", device, "--model.optimizer.lr", "1e-3", *options)
        return name, *words

    audit = ["audit", "--model", model, "--prompts", place / "fit/rows.jsonl", "--chat", "false", "--device", cuda]
    audit += ["--samples", 4, "--max_tokens", 8, "--formats", "bf16", "fp8_row"]
    fits = [fit(name, options) for name, options in FIRST.items()]
    quantize = ["quantize", "--model", model, "--format", "fp8_row", "--output", place / "quantized", "--device", cuda]
    together(*fits, ("quantize", *quantize), ("audit", *audit), ("audit_speed", *audit, "--speed"))
    evaluated = ["--config", place / "fit/run/config.yaml", "--ckpt_path", place / "fit/run/checkpoints/last.ckpt"]
    together(
        *(
            (name, "export", place / run / "run", "--output", place / name, *options)
            for name, (run, options) in EXPORTS.items()
        ),
        *((name, name, *evaluated, "--trainer.limit_val_batches", 1) for name in EVALUATIONS),
        ("report", "report", place / "fit/run"),
        ("audit_config", "audit", "--config", place / "fit/run/config.yaml", "--formats", "fp8_row", "--device", cuda),
        ("versions", "--versions"),
    )
    folders = ",".join(str(place / name) for name in (*EXPORTS, "quantized") if name not in ADAPTERS)
    served = (
        "plain",
        "unpacked",
        *(("fp8", "packed_again") if device == "gpu" else ()),
    )  # vLLM's CPU build has no others
    adapters = ",".join(str(place / name) for name in ADAPTERS)
    run("transformers", cuda, model, folders, adapters, program=("-c", LOADERS["transformers"]))
    if importlib.util.find_spec("vllm") is not None:
        script = place / "load.py"
        script.write_text(LOADERS["vllm"])
        run("vllm", cuda, model, ",".join(str(place / name) for name in served), adapters, program=(script,))
    return said, place


COMMANDS = (
    *FIRST, "quantize", "audit", "audit_speed", *EXPORTS, *EVALUATIONS, "report", "audit_config", "versions", *LOADERS
)  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_well(name, ran):
    said, place = ran
    if name == "vllm" and name not in said:
        pytest.skip("vLLM is not installed")
    done = said[name]
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Traceback" not in done.stdout, done.stdout[-4000:]
    if name in EXPORTS:
        assert (place / name / ("adapter_config.json" if name in ADAPTERS else "config.json")).is_file()
    if name == "transformers":
        assert done.stdout.count("loaded") == len(EXPORTS) + 1
