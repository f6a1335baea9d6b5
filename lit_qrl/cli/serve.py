"""`lit-qrl serve`: vLLM's own server, with the flags by which it takes the weights of a run."""

import os
import shlex
import socket
from pathlib import Path
from typing import Any, Literal

from lit_qrl.errors import ConfigError


def serve(
    model: str,
    *,
    token_file: Path,
    format: str | None = None,
    exclude: list[str] | None = None,
    quantize_head: bool = False,
    max_model_len: int = 4096,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.9,
    engine_args: dict[str, Any] | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    device: str = "auto",
    certificate: Path | None = None,
    certificate_key: Path | None = None,
    show: bool = False,
) -> None:
    """Start `vllm serve` for runs on other hosts: it starts with random weights, and a run publishes its own.

    Examples:
      lit-qrl serve Qwen/Qwen2.5-1.5B --token_file token --format fp8_row
      lit-qrl serve models/tiny --token_file token --host 0.0.0.0 --port 9000 --device cuda:1 --show

    A run uses it by data.engine: RemoteVLLMEngine with data.engine.hosts and the same token_file. Every route but
    /health and /metrics asks for the token; traffic is encrypted only with --certificate.

    Args:
        model: the run's: a folder or a hub name; only its config is read.
        token_file: file with one line that run and server share; vLLM's API key.
        format: publisher.format of the run; none where it publishes plain weights.
        exclude: publisher.exclude of the run.
        quantize_head: publisher.quantize_head of the run.
        max_model_len: longest prompt and completion together, in tokens.
        dtype: of activations and plain tensors.
        max_num_seqs: sequences decoded at a time.
        gpu_memory_utilization: share of the GPU's memory.
        engine_args: further arguments of vLLM.
        host: address to listen at; the default takes connections of this host alone.
        port: to listen at.
        device: such as cuda:1 or cpu; auto is the first GPU, or the CPU.
        certificate: file of the TLS certificate.
        certificate_key: file of its key.
        show: print the command, and do not run it.

    Raises:
        ConfigError: for a token that is not there, a port in use, or an unknown device.
    """
    import torch
    from transformers import AutoConfig

    from lit_qrl import formats
    from lit_qrl.network.structure import outline
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.rollout.vllm.addresses import read_key, visible
    from lit_qrl.rollout.vllm.arguments import flags, llm_arguments
    from lit_qrl.rollout.vllm.base import DTYPES
    from lit_qrl.rollout.vllm.engine import VLLMEngine
    from lit_qrl.rollout.vllm.folder import keep, model_folder
    from lit_qrl.rollout.vllm.guard import KEY
    from lit_qrl.rollout.vllm.process import environment_of
    from lit_qrl.rollout.vllm.server import NEEDED, command
    from lit_qrl.types import SamplingParams

    key = read_key(token_file)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(f"cuda:{number}" for number in range(count))]
    device = known[min(count, 1)] if device == "auto" else device
    if device not in known:
        raise ConfigError("--device is not there.", expected=", ".join(known), given=device, remedy="Correct it.")
    _check_port(host, port)
    chosen = None if format is None else formats.get(format)
    plain, sampling = tuple(exclude or ()), SamplingParams(max_tokens=1)
    spec = SamplerSpec(sampling=sampling, format=chosen, exclude=plain, quantize_head=quantize_head)
    options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "gpu_memory_utilization": gpu_memory_utilization}
    engine = VLLMEngine(dtype=dtype, max_model_len=max_model_len, engine_args=engine_args, **options)
    engine.validate(spec)
    network = outline(AutoConfig.from_pretrained(model), dtype=DTYPES[dtype])
    engine.check_model(network)
    longest = max_model_len + 1
    folder = model_folder(network, chosen, spec.exclude, quantize_head, DTYPES[dtype], longest)
    engine.describe(spec, network)
    tls = {"--ssl-certfile": certificate, "--ssl-keyfile": certificate_key}
    environment = environment_of(deep_gemm=False, kv_cache_gib=None) | NEEDED
    environment["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else visible(int(device.partition(":")[2]))
    line = [
        *command(),
        str(folder),
        *flags(llm_arguments(engine, folder, DTYPES[dtype], longest)),
        *("--host", host, "--port", str(port)),
        *(part for flag, path in tls.items() if path is not None for part in (flag, str(path))),
    ]
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    print(f"{KEY}=$(cat {shlex.quote(str(token_file))}) {words} {shlex.join(line)}", flush=True)
    keep(folder)  # the server reads it, and this process is gone
    if not show:
        os.execvpe(line[0], line, {**os.environ, **environment, KEY: key})


def _check_port(host: str, port: int) -> None:
    """Raise `ConfigError` for an address that cannot be had, as when the port is in use."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:  # the latter for a port beyond 65535
        raise ConfigError(
            "vLLM's server cannot listen there.",
            expected="an address of this host and a port that nobody uses",
            given=f"{host}:{port} ({getattr(error, 'strerror', None) or error})",
            remedy="Choose another port; end the server that has it.",
        ) from error
