"""`lit-qrl serve`: the process of an engine, for runs on other hosts."""

import logging
from pathlib import Path

from lit_qrl.errors import ConfigError


def serve(
    *,
    token_file: Path,
    host: str = "127.0.0.1",
    port: int = 8765,
    device: str = "auto",
    once: bool = False,
) -> None:
    """Hold an engine for one run at a time; the run says which engine, and its weights come by publishing.

    Examples:
      lit-qrl serve --token_file token
      lit-qrl serve --token_file token --host 0.0.0.0 --port 9000 --device cuda:1

    A run uses it by data.engine: RemoteEngine with data.engine.hosts and the same token. What travels is not encrypted,
    and whoever knows the token can run code here: open the port to hosts that you trust alone.

    Args:
        token_file: file with one line that run and server share.
        host: address to listen at; the default takes connections of this host alone.
        port: to listen at; 0 takes any that is free.
        device: of the engine, such as cuda:1 or cpu; auto is the first GPU, or the CPU.
        once: end with the first run.

    Raises:
        ConfigError: for a token that is not there, a port in use, or an unknown device.
    """
    import os

    import torch

    from lit_qrl.rollout.remote import server, wire

    token = wire.read_token(token_file)
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(f"cuda:{number}" for number in range(count))]
    if device not in known:
        raise ConfigError("--device is not there.", expected=", ".join(known), given=device, remedy="Correct it.")
    if device == "cpu" and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would take a GPU that they see
    listener = wire.listen(host, port)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    where, number, *_ = listener.getsockname()
    print(f"Serving on {device} at {where}:{number}.", flush=True)
    server.serve(listener, token, server.use(device), once)
