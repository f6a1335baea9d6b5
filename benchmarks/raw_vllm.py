"""What vLLM's own `generate` draws from a real model, and what the host does meanwhile: the bound of a rollout.

    python benchmarks/raw_vllm.py MODEL train.jsonl                          # engine core in a process of its own
    python benchmarks/raw_vllm.py MODEL train.jsonl --in_process --quick     # as `VLLMEngine` runs it
    python benchmarks/raw_vllm.py MODEL train.jsonl --in_process --quick --profile
    half="python benchmarks/raw_vllm.py MODEL train.jsonl --prompts 16"
    $half & $half                                                            # two engines on one GPU

32 prompts of GSM8K × 8 completions of at most 400 tokens, each request with a seed, temperature 1; four times, of which
the first warms up. `--quick` leaves out vLLM's compilation; `--group` asks for 8 completions a request, without seeds.
`busy` is the mean of nvidia-smi's utilization, every 0.2 s. The same from the run's side is `tok/s` of `lit-qrl fit`.
"""

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "real" / "gsm8k.yaml"
SAMPLES, LONGEST = 8, 400


@contextlib.contextmanager
def watched(found: list[float]) -> Any:
    """Append the GPU's utilization to `found` every 0.2 s."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200", "-i", card]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        yield
        process.terminate()
        found.extend(float(line) for line in process.stdout or ())


def main() -> None:
    """Draw four times and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name of the hub")
    parser.add_argument("data", type=Path, help="JSONL with a column `question`")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--in_process", action="store_true", help="no process of its own for the engine's core")
    parser.add_argument("--quick", action="store_true", help="CUDA graphs for decoding, no compilation")
    parser.add_argument("--group", action="store_true", help="one request a prompt, without seeds")
    parser.add_argument("--profile", action="store_true", help="print the host's functions of the last time")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if args.in_process else "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    suffix = yaml.safe_load(RECIPE.read_text())["data"]["task"]["init_args"]["prompt_suffix"]
    rows = [json.loads(line) for line in args.data.read_text().splitlines()[: args.prompts]]
    quick = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} if args.quick else {}
    began = time.time()
    llm = LLM(
        args.model, dtype="bfloat16", max_model_len=720, gpu_memory_utilization=0.2, max_num_seqs=256,
        disable_log_stats=True, **quick,
    )  # fmt: skip
    print(f"started in {time.time() - began:.1f} s", flush=True)
    tokenizer = llm.get_tokenizer()
    prompts = []
    for row in rows:
        asked = [{"role": "user", "content": row["question"] + suffix}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
        prompts.append({"prompt_token_ids": list(ids)})
    common: dict[str, Any] = {"temperature": 1.0, "max_tokens": LONGEST, "logprobs": 0, "detokenize": False}
    for round in range(4):
        if args.group:
            given, params = prompts, [SamplingParams(n=SAMPLES, **common)] * len(prompts)
        else:
            given = [prompt for prompt in prompts for _ in range(SAMPLES)]
            params = [SamplingParams(seed=1000 * round + i, **common) for i in range(len(given))]
        busy: list[float] = []
        profiled = cProfile.Profile() if args.profile and round == 3 else None
        with watched(busy), profiled or contextlib.nullcontext():
            began = time.time()
            outputs = llm.generate(given, params, use_tqdm=False)
            seconds = time.time() - began
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        print(
            f"round {round}: {tokens / seconds:.0f} tokens/s, {seconds:.2f} s, {tokens} tokens, "
            f"busy {statistics.fmean(busy or [0.0]):.0f} %",
            flush=True,
        )
        if profiled is not None:
            pstats.Stats(profiled).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
