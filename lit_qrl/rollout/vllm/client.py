"""vLLM in processes of its own: a client of `vllm serve`, of as many as there are, behind the contract of an engine."""

import base64
import json
import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError, listed
from lit_qrl.formats.base import NumberFormat
from lit_qrl.receipts.clock import Clock
from lit_qrl.receipts.ledger import Fault, PublishError, PublishReport, ReceivedLedger, RefusedError, TensorReceipt
from lit_qrl.rollout.engine import (
    EngineDiedError,
    EnginePolicy,
    SamplerSpec,
)
from lit_qrl.rollout.vllm import folder, requests, same_kernels
from lit_qrl.rollout.vllm.addresses import Address, address_towards, addresses, visible
from lit_qrl.rollout.vllm.arguments import flags, llm_arguments
from lit_qrl.rollout.vllm.base import VLLM
from lit_qrl.rollout.vllm.errors import SHAPES
from lit_qrl.rollout.vllm.installation import installed_version
from lit_qrl.rollout.vllm.process import environment_of
from lit_qrl.rollout.vllm.server import Server
from lit_qrl.rollout.vllm.ways import Broadcast, DeviceMemory, Files, Named, Packed, Sender, chunks
from lit_qrl.types import Completion

Transfer = Literal["auto", "files", "ipc", "nccl"]
TICK = 0.5
"""Seconds between two looks at how far the servers are."""
AT_ONCE = 512
"""Requests that one server has under way, those that wait for a place in its batch among them."""
FILES, OTHERS = 65536, 256
"""Open files that a run allows itself, as far as the system does, and how many of them are no requests."""
SAYS_VERSIONS = (0, 32)
"""The version of vLLM from which a server says which weights drew which token."""


class RemoteVLLMEngine(VLLM):
    """Holds vLLM in servers of its own (`vllm serve`), which a run starts or finds: on other devices, or other hosts.

    Completions are dealt to the servers by outstanding tokens, and a completion's randomness comes from its prompt's
    position, so neither their number nor their speed changes what is drawn. A publish goes to all of them; each
    computes the receipts of what it holds. A server that dies, or is silent, is started again while the others go on;
    what they have drawn is kept, and its prompts are drawn again with the same seeds after the publish to the new one.
    One of `hosts` is waited for, a minute, until whatever looks after it there has started it again.

    Args:
        devices: of this host, a server for each: numbers of GPUs, or `cpu`; `auto` is the GPUs that the learner
            leaves, and one server on the CPU where it has none itself. Several may share one (`[0, 0]`), the learner's
            too: give each its part of the memory by `gpu_memory_utilization`.
        hosts: addresses of servers that run already (`lit-qrl serve`), `host:port` or `https://host:port`, instead of
            devices.
        token_file: with the key of those servers.
        ca_file: certificates by which theirs are trusted; None are the system's.
        transfer: how weights travel: `files` in a folder that both see, `ipc` memory of the learner's GPU on one host,
            `nccl` one broadcast to the GPUs of all; `auto` is `ipc` to servers on GPUs that the run has started, else
            files.
        folder: of those files; None is the memory of this host, and its disk where that is full.
        silence: seconds without a word between two steps, or of a publish, after which a server counts as dead.
        **options: of `VLLMEngine`, with which vLLM is started in each.
    """

    overlaps = True

    def __init__(
        self,
        devices: Literal["auto"] | list[int | str] = "auto",
        hosts: list[str] | None = None,
        token_file: str | None = None,
        transfer: Transfer = "auto",
        ca_file: str | None = None,
        folder: str | None = None,
        silence: float = 20.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.devices, self.hosts, self.token_file = devices, hosts, token_file
        self.ca_file, self.folder, self.silence = ca_file, folder, silence
        self.transfer: Transfer = transfer
        own = "Leave it out, or set data.engine to VLLMEngine."
        refuse(
            (self.draws_together, "tensor_parallel_size", own),
            (self.batch_invariant, "batch_invariant", own),
            (self.same_kernels is True, "same_kernels", own),
            (self.sleep_level > 0, "sleep_level", "Leave it at 0: the GPU is the server's alone."),
            (transfer == "ipc" and bool(hosts), "CUDA handles of another host (transfer: ipc)", "Leave transfer out."),
        )
        found = installed_version()
        self._says_versions = found is None or found[0][:2] >= SAYS_VERSIONS
        self.servers: list[Server] = []
        self._sender: Sender | None = None
        self._until: Callable[[], None] | None = None
        self._paused = False

    # ------------------------------------------------------------------------------------------------- start and end

    def validate(self, spec: SamplerSpec) -> None:
        """Check what can be known before weights are loaded, and find the servers that run already.

        Raises:
            ConfigError: also for a server that cannot be reached, knows another key, or is of another version.
        """
        self.spec = spec
        here, says = "Set data.engine to VLLMEngine.", ".".join(map(str, SAYS_VERSIONS))
        refuse(
            (spec.kept, "the tokens among which one was drawn (top_p or top_k with a learner that masks)", here),
            (spec.adapter is not None, "an adapter apart from its base", f"Set publisher.lora to merged. {here}"),
            (spec.routes, "the experts that its tokens took", f"Leave out RouterReplay. {here}"),
            (
                spec.in_flight != "none" and not self._says_versions,
                "which weights drew which token",
                f"Install vLLM {says} or later, or leave data.in_flight_updates out.",
            ),
        )
        found = addresses(self.devices, self.hosts, self.token_file, spec.learners, self.ca_file)
        places = [*(one.name for one in found), *(f"cuda:{number}" for number in spec.learners.devices)]
        if self.transfer == "nccl" and not self.hosts and len(set(places)) < len(places):
            raise ConfigError(
                "NCCL takes one process of each GPU.",
                expected="data.engine.transfer: ipc or files where servers share a GPU, the learner's too",
                given=f"nccl, and data.engine.devices: {listed(map(str, self.devices))}",
                remedy="Leave transfer out.",
            )
        if not self.hosts:
            super().validate(spec)
        if not self.servers:
            self.servers = [Server(one, self.silence) for one in found]
        for server in self.servers if self.hosts else ():
            server.open()
            server.ready = False  # `setup` sees whether it has the run's model

    def check_model(self, network: nn.Module) -> None:
        """Raise `ConfigError` for a model that the installed vLLM lacks or this host cannot run."""
        if not self.hosts:
            super().check_model(network)

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        """Start the servers that are not there, and connect them; the others keep what they hold."""
        self.spec, self.policy = spec, policy
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
        if 0 <= soft < most:  # each request that is under way is a socket, and 1,024 is the usual limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if not self.servers:
            self.validate(spec)
        self.plain_dtype = dtype = self.choose_dtype(spec, policy.network)
        longest = self.longest()
        if self._folder is None:
            layers = spec.exclude, spec.quantize_head
            self._folder = folder.model_folder(policy.network, spec.format, *layers, dtype, longest)
        arguments = llm_arguments(self, self._folder, dtype, longest)
        same_kernels.chosen(self.same_kernels, spec, policy.network, dtype, arguments, same_kernels.APART)
        for server in self.servers:
            environment = environment_of(self.deep_gemm, self.kv_cache_gib) | self._seen(server.address)
            server.arguments, server.environment = [str(self._folder), *flags(arguments)], environment
            server.timeout = self.start_timeout
            server.start()
        for server in self.servers:
            if not server.ready:
                self._check_model_of(server, server.open(), longest)
                server.version = -1
                self._leave()  # who was in a group with it is alone now
        if self._sender is None:
            self._join()

    def _seen(self, address: Address) -> dict[str, str]:
        """Return which GPUs a server that the run starts sees: its own, then this process's, whose memory it opens."""
        if not address.started:
            return {}
        if address.name == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        own = int(address.name.removeprefix("cuda:"))
        learners = self.spec.learners
        return {"CUDA_VISIBLE_DEVICES": visible(own, *learners.devices[learners.local[0] :][:1])}

    def _beside(self) -> bool:
        """Return whether the servers are on the learner's own GPU."""
        own = {f"cuda:{number}" for number in self.spec.learners.devices}
        return any(server.address.name in own for server in self.servers)

    def _check_model_of(self, server: Server, found: Mapping[str, Any], longest: int) -> None:
        assert self._folder is not None
        own = json.loads((self._folder / "config.json").read_text())
        ignored = {"transformers_version", "_name_or_path", "max_position_embeddings"}
        other = [key for key in own.keys() | found["config"].keys() if own.get(key) != found["config"].get(key)]
        differing = sorted(set(other) - ignored)
        if differing or found["longest"] < longest or found["workers"] > 1:
            given = f"another {listed(differing, 4)}" if differing else f"{found['longest']} tokens"
            raise ConfigError(
                f"The vLLM server at {server.address.name} was started for another model, format or length.",
                expected=f"the run's model and publisher.format, sequences of {longest} tokens, and one GPU",
                given=given if found["workers"] == 1 else f"{found['workers']} GPUs",
                remedy="Start it by `lit-qrl serve` with the model, --format and --max_model_len of the run.",
            )

    def _join(self) -> None:
        """Get ready to send."""
        way = self.transfer
        on_gpus = all(server.address.name.startswith("cuda") for server in self.servers)
        if way == "auto":
            way = "ipc" if on_gpus else "files"
        if way == "nccl":
            self._sender = self._meet()
            return
        self._sender = DeviceMemory(seen_as=0 if self._beside() else 1) if way == "ipc" else Files(self.folder)
        self._ask_all("/init_weight_transfer_engine", {"init_info": {}})

    def _meet(self) -> Sender:
        import socket

        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        there = next((urlsplit(one.address.name).hostname for one in self.servers if not one.address.started), None)
        address, size = address_towards(there or "127.0.0.1"), 1 + len(self.servers)
        groups = [{"init_info": {"group": [address, port, 1 + i, size]}} for i in range(len(self.servers))]
        meet = partial(Broadcast, address, port, size, torch.device("cuda", torch.cuda.current_device()))
        return self._ask_all("/init_weight_transfer_engine", groups, meanwhile=meet)

    def _leave(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def discard(self) -> None:
        """Give up the servers that died, of which the rest hears nothing; they were started again already."""
        if all(server.ready for server in self.servers):  # all are to begin anew, maybe with another format
            for server in self.servers:
                server.close()
            self._remove_folder()

    def close(self) -> None:
        """End the servers that the run started, and give back what it made."""
        servers, self.servers = self.servers, []
        for server in servers:
            server.close()
        self._leave()
        self._kept, self._usable = (None, {}), False
        self._remove_folder()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Start a server again at once that dies of what is asked inside."""
        try:
            yield
        except EngineDiedError:
            self._usable = False
            for server in self.servers:
                if not server.ready:
                    server.restart()
            raise

    def _ask_all(
        self, path: str, body: Any = None, timeout: float | None = None, meanwhile: Callable[[], Any] = lambda: None
    ) -> Any:
        """Ask all servers at the same time, a list being one body for each; return what was done `meanwhile`."""
        bodies = body if isinstance(body, list) else [body] * len(self.servers)
        with ThreadPoolExecutor(len(self.servers)) as pool:
            answers = pool.map(lambda one, sent: one.post(path, sent, timeout or self.silence), self.servers, bodies)
            done = meanwhile()
        list(answers)
        return done

    # ----------------------------------------------------------------------------------------------------- publishing

    def load_weights(
        self, tensors: Iterator[tuple[str, Tensor]], format: NumberFormat | None, version: int
    ) -> PublishReport:
        """Replace the weights of all servers; each answers with its receipts, and a difference between them is a fault.

        Raises:
            PublishError: where a layer came only in part, or vLLM's loader refuses a tensor.
        """
        clock, until = Clock(), self._until
        self._until = None
        assert self._sender is not None
        done = False
        with self._asked(), ExitStack() as first:
            for server in self.servers:
                if "publish" not in server.done:  # of later ones each part answers in time
                    first.enter_context(server.watched("publish"))
            try:
                packed = self._packed(chunks(tensors), clock)
                if until is not None:
                    if isinstance(self._sender, Files):  # all lie beside the engines before those stand still
                        packed = list(packed)
                    until()
                self._usable = False
                self._ask_all("/start_weight_update")
                for one in packed:
                    self._post_part(one, version, clock)
                with clock.part("await"):
                    stamp = {"weight_version": str(version)} if self._says_versions else None
                    self._ask_all("/finish_weight_update", stamp, self._patience())
                    outcomes = [server.call("outcome_json", timeout=self._patience()) for server in self.servers]
                done = True
            finally:
                if not done:
                    self._abandon()
        ledgers = [self._ledger(outcome, version) for outcome in outcomes]
        received = ledgers[0]
        if self._poisoned and not self._paused:  # a page keeps NaN until it is overwritten
            self._ask_all("/collective_rpc", {"method": "clear_kv_cache"})
            self._poisoned = False
        received.prefix_reset = all(list(map(self._forget_prefixes, self.servers)))
        received.faults += between(ledgers, [server.address.name for server in self.servers])
        self._usable, self.version = True, version
        for server in self.servers:
            server.version = version
        return PublishReport(
            version=version,
            bytes=received.bytes,
            layers=outcomes[0]["layers"],
            received=received,
            parts=dict(clock.seconds),
        )

    def _packed(self, parts: Iterator[list[Named]], clock: Clock) -> Iterator[Packed]:
        assert self._sender is not None
        for part in parts:
            with clock.part("send"):
                packed = self._sender.pack(part)
            yield packed

    def _post_part(self, packed: Packed, version: int, clock: Clock) -> None:
        assert self._sender is not None
        body = {"update_info": {"version": version, "packed": packed}}
        with clock.part("await"):
            self._ask_all("/update_weights", body, self._patience(), partial(self._sender.send, packed))
        self._sender.taken(packed)

    def _patience(self) -> float:
        """Seconds for a part of a publish: the first compiles kernels."""
        return self.silence if all("publish" in server.done for server in self.servers) else self.start_timeout

    def _abandon(self) -> None:
        for server in self.servers:
            with suppress(Exception):  # whoever asks it next hears of a death
                server.call("abandon_update")

    def _ledger(self, outcome: Mapping[str, Any], version: int) -> ReceivedLedger:
        """Return the ledger of a server's answer.

        Raises:
            PublishError: where a layer came only in part.
            RefusedError: where vLLM's loader refused a tensor.
            EngineDiedError: where vLLM failed otherwise.
        """
        if "error" not in outcome:
            return ReceivedLedger.heard(outcome)
        self._abandon()
        for server in self.servers:
            self._forget_prefixes(server)
        kind, said = outcome["error"], outcome["said"]
        if kind == "FileNotFoundError":
            raise ConfigError(
                "A server does not see the files through which its weights come.",
                expected="data.engine.folder: a folder that run and servers see under the same name",
                given=said,
                remedy="Set it, or transfer: nccl.",
            )
        if kind == "PublishError":
            raise PublishError([Fault(*one) for one in outcome["faults"]], version)
        if kind in ("RuntimeError", "MemoryError", "OutOfMemoryError") and not SHAPES.search(said):
            for server in self.servers:
                server.restart()
            raise EngineDiedError(f"vLLM failed while loading: {kind}: {said}")
        raise RefusedError(said if kind == "RefusedError" else f"vLLM's own loader raised {kind}: {said}", version)

    def _forget_prefixes(self, server: Server) -> bool:
        """Return whether no key or value of older weights is found any more; running requests keep theirs."""
        if self._paused and self.spec.in_flight == "keep":
            return True
        running = {"reset_running_requests": "true"} if self._paused else {}
        answer = server.post("/reset_prefix_cache", None, self.silence, **running)
        # 0.26 does not say it, but prefixes are apart by version all the same: requests are salted by it.
        return bool(answer.get("success", True))

    @contextmanager
    def staged(self, until: Callable[[], None]) -> Iterator[None]:
        """Let the first stream within be sent while the servers draw; see `Pauses` of `rollout/engine.py`."""
        self._until = until
        try:
            yield
        finally:
            self._until = None

    def read_receipts(self, names: Sequence[str]) -> dict[str, TensorReceipt]:
        """Return the receipts of what reads back from the first server under the names."""
        told = self.servers[0].call("receipts_json", json.dumps(list(names)))
        return {name: TensorReceipt.heard(one) for name, one in told.items()}

    def read_columns(self, layer: str, columns: Sequence[int]) -> Tensor | None:
        """Return columns ("out columns") of a layer's weight as the first server's GEMM multiplies with them."""
        found = self.servers[0].call("columns_json", layer, json.dumps(list(columns)))
        if not found:
            return None
        flat = torch.frombuffer(bytearray(base64.b64decode(found["bytes"])), dtype=getattr(torch, found["dtype"]))
        return flat.reshape(found["shape"])

    # ----------------------------------------------------------------------------------------------- weights in flight

    def pause(self) -> None:
        """Let all servers stand still between two steps, so that they take weights with completions under way."""
        self._paused = True
        for server in self.servers:
            with suppress(EngineDiedError):  # whoever draws hears of it
                server.post("/pause", None, self.silence, mode="keep", clear_cache="false")

    def resume(self, whole: bool = True) -> None:
        """Let all go on; what was under way is given up where nobody knows what the servers hold."""
        self._paused = False
        for server in self.servers:
            with suppress(EngineDiedError):
                if whole:
                    server.post("/resume", None, self.silence)
                else:
                    server.died("a publish to it failed while it drew")

    # ----------------------------------------------------------------------------------------------------- generation

    def _draw(self, kind: str, more: requests.More, take: Callable[[dict[int, Any]], None]) -> None:
        """Draw by all servers at the same time: a group by the one that was dealt the fewest tokens until then.

        A server that dies ends its own requests; those of the others are done before its death is raised.
        """
        dealt, places = dict.fromkeys(self.servers, 0), dict[int, Server]()
        deaths: list[EngineDiedError] = []
        pools: dict[Server, ThreadPoolExecutor] = {}
        under_way: set[Future[tuple[int, Any]]] = set()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # each request that is under way is a socket
        at_once = AT_ONCE if most < 0 else min(AT_ONCE, max((most - OTHERS) // len(self.servers), 1))
        with ExitStack() as stack:
            try:
                while (asked := None if deaths else more(bool(under_way))) is not None or under_way:
                    for one in asked or ():
                        server = places.setdefault(one.group, min(self.servers, key=dealt.__getitem__))
                        dealt[server] += len(one.tokens) + (one.sampling.max_tokens if one.sampling else 1)
                        if server not in pools:
                            stack.enter_context(server.watched(kind))
                            pools[server] = ThreadPoolExecutor(at_once, f"draw {server.address.name}")
                            stack.callback(pools[server].shutdown, wait=False, cancel_futures=True)
                        under_way.add(pools[server].submit(self._answer, server, one))
                    done, under_way = wait(under_way, TICK if asked is None else TICK / 10, FIRST_COMPLETED)
                    for future in done:
                        try:
                            key, answer = future.result()
                        except EngineDiedError as error:
                            deaths.append(error)
                        else:
                            take({key: self._noted(answer)})
            except BaseException:  # the run is interrupted, and nobody waits for what is drawn
                for server in pools:
                    server.hang_up()
                raise
        if deaths:
            with self._asked():
                raise deaths[0]

    def _answer(self, server: Server, asked: requests.Asked) -> tuple[int, Any]:
        version = self.version
        body = {
            "token_ids": list(asked.tokens),
            "sampling_params": requests.options_of(asked),
            "cache_salt": f"version {version}",  # by which no prefix of other weights is found
        }
        answer = server.post("/inference/v1/generate", body)
        try:
            if asked.sampling is not None:
                return asked.key, completion_of(answer["choices"][0], version)
            found = zip(answer["prompt_logprobs"], asked.tokens, strict=True)
            values = [tokens[str(token)]["logprob"] for tokens, token in found if tokens is not None]
        except (LookupError, TypeError, ValueError) as error:
            raise server.died(f"its answer lacks what was asked for: {type(error).__name__}: {error}") from error
        return asked.key, torch.tensor([math.nan if one is None else one for one in values], dtype=torch.float32)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return what `VLLM.score` does; vLLM scores in steps like any others, so what stands goes on meanwhile."""
        standing = self._paused
        if standing:
            self.resume()
        try:
            return super().score(sequences)
        finally:
            if standing:
                self.pause()


def refuse(*rows: tuple[bool, str, str]) -> None:
    """Raise `ConfigError` for what is used and a server does not know or say, of (used, what, remedy)."""
    for used, what, remedy in rows:
        if used:
            raise ConfigError(
                f"The server of this vLLM does not know or say {what}.", expected="a run without", remedy=remedy
            )


# ------------------------------------------------------------------------------------------------------------- answers


def completion_of(choice: Mapping[str, Any], version: int) -> Completion:
    """Return the completion of a server's answer.

    Args:
        choice: of the answer.
        version: of the weights, where the answer does not say it.

    Raises:
        LookupError, TypeError, ValueError: for what is no whole completion.

    >>> spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    >>> content = [{"logprob": -0.5}, {"logprob": -0.25}]
    >>> made = completion_of({"token_ids": [7, 8], "logprobs": {"content": content}, "weight_versions": spans}, 3)
    >>> made.token_ids, made.logprobs, made.versions
    ([7, 8], [-0.5, -0.25], [3, 4])
    """
    tokens = list(choice["token_ids"])
    spans = choice.get("weight_versions") or []
    known = [one for one in spans if one["version"].isdecimal()]
    versions = [int(one["version"]) for one in known for _ in range(one["start"], one["end"])]
    logprobs, ended = choice["logprobs"]["content"], choice.get("finish_reason")
    if not 0 < len(tokens) == len(logprobs) or ended in ("abort", "error"):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probs, ended by {ended}")
    return Completion(
        token_ids=tokens,
        # JSON has no NaN, so null is one: of weights that went wrong, not of a server
        logprobs=[math.nan if one["logprob"] is None else one["logprob"] for one in logprobs],
        finish_reason="stop" if ended == "stop" else "length",
        version=versions[0] if len(versions) == len(tokens) > 0 else version,
        versions=versions if len(versions) == len(tokens) > 0 else None,
    )


def between(ledgers: Sequence[ReceivedLedger], names: Sequence[str]) -> list[Fault]:
    """Return a fault for whatever another server holds otherwise than the first.

    Args:
        ledgers: of the same stream, one of each server.
        names: of the servers.
    """
    held, faults = ledgers[0].receipts(), []
    for other, name in zip(ledgers[1:], names[1:], strict=True):
        receipts, place = other.receipts(), f"the server at {name}, beside that at {names[0]}"
        faults += [Fault(one.kind, one.name, one.detail or place) for one in other.faults]
        for key in dict.fromkeys([*held, *receipts]):
            if held.get(key) != receipts.get(key):
                kind = "missing" if key not in receipts else "extra" if key not in held else "different"
                faults.append(Fault(kind, key, place))
        if other.version != ledgers[0].version:
            faults.append(Fault("version", "the engine", place))
    return faults
