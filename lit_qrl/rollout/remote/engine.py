"""An engine in another process, or several of them, behind the contract of one in this."""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError, require_object
from lit_qrl.formats.base import NumberFormat
from lit_qrl.receipts.ledger import PublishReport
from lit_qrl.rollout.engine import (
    Dialogue,
    EngineDiedError,
    EnginePolicy,
    Finished,
    Progress,
    RolloutEngine,
    SamplerSpec,
)
from lit_qrl.rollout.pauses import Stand
from lit_qrl.rollout.remote.blueprint import blueprint
from lit_qrl.rollout.remote.dialogue import Dealt, GivenUpError
from lit_qrl.rollout.remote.places import places
from lit_qrl.rollout.remote.publishing import Sender, as_one
from lit_qrl.rollout.remote.replica import Replica
from lit_qrl.rollout.remote.transfer import Way
from lit_qrl.types import Completion, SamplingParams

ASKED = ("score", "estimate", "read_back", "read_columns")
"""What some engines do, and this one where those that it holds do: it asks the first of them."""
TICK = 0.5
"""Seconds between two looks at how far the replicas are."""


class RemoteEngine(RolloutEngine):
    """Holds its engines in processes of their own, which a run starts or finds: on other devices, or other hosts.

    Completions are dealt to the replicas by outstanding tokens, and a completion's randomness comes from its prompt's
    position, so neither their number nor their speed changes what is drawn. A publish goes to all of them; each
    computes the receipts of what it holds. A replica that dies is started again while the others go on; what they have
    drawn is kept, and its prompts are drawn again with the same seeds after the publish to the new one.

    Args:
        engine: what each process holds, such as `VLLMEngine`.
        devices: of this host, a process for each: numbers of GPUs, or `cpu`; `auto` is the GPUs that the learner
            leaves, and one process on the CPU where it has none itself.
        hosts: `host:port` of servers that run already (`lit-qrl serve`), instead of devices.
        token_file: of those servers.
        transfer: how weights travel: `memory` of the host that both processes see, `ipc` memory of the GPU on one,
            `socket` is the connection itself; `collective` and `nccl` send once to all replicas, from host to host or
            from GPU to GPU; `auto` is `ipc` to the GPUs of `devices`, and else memory where that is seen.
    """

    overlaps = True

    def __init__(
        self,
        engine: RolloutEngine,
        devices: Literal["auto"] | list[int | str] = "auto",
        hosts: list[str] | None = None,
        token_file: str | None = None,
        transfer: Literal["auto", "memory", "ipc", "socket", "collective", "nccl"] = "auto",
    ) -> None:
        require_object("data.engine.engine", engine, "TransformersEngine()")
        if transfer == "ipc" and hosts:
            raise ConfigError(
                "CUDA handles are of one host.",
                expected="data.engine.transfer: auto with data.engine.hosts",
                given="ipc",
                remedy="Leave transfer out.",
            )
        if engine.draws_together:
            raise ConfigError(
                "RemoteEngine holds an engine in each of its processes, and this one would be several processes.",
                expected="data.engine.engine.tensor_parallel_size: 1",
                remedy="Leave it out, or set data.engine to VLLMEngine, of the learner's processes.",
            )
        self.engine, self.devices, self.hosts, self.token_file = engine, devices, hosts, token_file
        self.transfer: Literal["auto", "memory", "ipc", "socket", "collective", "nccl"] = transfer
        self.single_format, self.kernels, self.denoises = engine.single_format, engine.kernels, engine.denoises
        self.batch_invariant, self.plain_dtype = engine.batch_invariant, engine.plain_dtype
        self.records_kept, self.hands_out = engine.records_kept, engine.hands_out
        self.takes_in_flight = engine.takes_in_flight
        self.spec = SamplerSpec()
        self.replicas: list[Replica] = []
        self._sender = Sender()
        self._until: Callable[[], None] | None = None
        self._kept: tuple[str, dict[int, list[Completion]]] = ("", {})
        # Protocols are asked for by their methods: it has those of the engines that it holds.
        for name in ASKED:
            if hasattr(engine, name):
                setattr(self, name, partial(self._ask_first, name))
        if hasattr(engine, "read_back"):
            self.read_receipts = partial(self._ask_first, "read_receipts")
        if hasattr(engine, "load_adapter"):
            self.load_adapter = partial(self._publish, "load_adapter")
            self.perturb = partial(self._publish, "perturb")
        for name in ("check_model", "check_routes", "converse"):
            if hasattr(engine, name):
                setattr(self, name, getattr(self, f"_{name}"))

    # ------------------------------------------------------------------------------------------------- start and end

    def validate(self, spec: SamplerSpec) -> None:
        """Start or find the processes, and let the first check the spec where it will run.

        Raises:
            ConfigError: also for a server that cannot be reached, knows another token, or is of another version.
        """
        self.spec = replace(spec, on_hang=None)  # a process that hangs ends, which the run hears of
        self._opened()[0].call("validate", self.spec)

    def _opened(self) -> list[Replica]:
        if not self.replicas:
            found = places(self.devices, self.hosts, self.token_file, self.spec.learners)
            self.replicas = [Replica(place, self.engine) for place in found]
        for replica in self.replicas:
            replica.start()
        for replica in self.replicas:
            replica.open()
        return self.replicas

    def _check_model(self, network: nn.Module) -> None:
        self._opened()[0].call("check_model", blueprint(network))

    def _check_routes(self, user: str) -> None:
        self._opened()[0].call("check_routes", user)

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        """Tell the processes of the model; those that are alive and have heard it keep what they hold."""
        self.spec = replace(spec, on_hang=None)
        self.engine.policy = policy  # pyright: ignore[reportAttributeAccessIssue]  # by which it arranges a stream
        model = blueprint(policy.network)
        for replica in self._opened():
            if not replica.ready:
                self.plain_dtype = replica.call("setup", self.spec, model)
                replica.ready = True

    def discard(self) -> None:
        """Give up the replicas that died, of which the rest hears nothing; they were started again already."""
        if not any(replica.dead for replica in self.replicas):
            for replica in self.replicas:  # an engine died in a process that lives
                replica.restart()

    def close(self) -> None:
        replicas, self.replicas = self.replicas, []
        for replica in replicas:
            replica.close()
        self._sender.close()
        self._kept = ("", {})

    # ----------------------------------------------------------------------------------------------------- publishing

    def arranged(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return self.engine.arranged(tensors)

    def load_weights(
        self, tensors: Iterator[tuple[str, Tensor]], format: NumberFormat | None, version: int
    ) -> PublishReport:
        return self._publish("load_weights", tensors, format, version)

    @torch.no_grad()
    def _publish(self, what: str, tensors: Iterator[tuple[str, Tensor]], *args: Any) -> PublishReport:
        ways: dict[Replica, Way] = {replica: self._way(replica) for replica in self.replicas}
        until, self._until = self._until, None
        if until is not None and not self._sender.joined(ways):
            until()
            until = None
        try:
            reports = self._sender.publish(ways, what, tensors, args, until)
        except EngineDiedError:
            for replica in self.replicas:
                if replica.dead:
                    replica.restart()
            raise
        self.version = args[-1]
        return as_one(reports, [replica.place.name for replica in self.replicas])

    @contextmanager
    def staged(self, until: Callable[[], None]) -> Iterator[None]:
        """Let the first stream within be sent while the replicas draw; see `Stages` of `publish/delivery.py`."""
        self._until = until
        try:
            yield
        finally:
            self._until = None

    @property
    def engines(self) -> int:
        return len(self.replicas)

    def follow(self, courses: Sequence[Sequence[Stand]]) -> None:
        for replica, course in zip(self.replicas, courses, strict=True):
            replica.follow(course)

    def pause(self) -> list[Stand]:
        """Let all replicas stand still between two steps, so that they take weights with completions under way."""
        try:
            for replica in self.replicas:
                with suppress(EngineDiedError):  # whoever asks it next hears of it
                    replica.want_pause()
            return [replica.await_pause() for replica in self.replicas]
        except BaseException:  # a signal, after which what is drawn comes to its end
            self.resume()
            raise

    def resume(self, whole: bool = True) -> None:
        """Let all go on; what was under way is given up where nobody knows what the replicas hold."""
        for replica in self.replicas:
            with suppress(EngineDiedError):
                replica.end_pause(whole)

    def _way(self, replica: Replica) -> Way:
        if self.transfer != "auto":
            return self.transfer
        if replica.place.started and replica.place.name.startswith("cuda"):
            return "ipc"
        return "memory" if replica.sees_memory else "socket"

    def _ask_first(self, what: str, *args: Any) -> Any:
        return self.replicas[0].call(what, *args)

    # ----------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        seed: int,
        progress: Progress | None = None,
        sampling: SamplingParams | None = None,
        positions: Sequence[int] | None = None,
        finished: Finished | None = None,
    ) -> list[Completion]:
        numbers = list(range(len(prompts)) if positions is None else positions)
        key = hashlib.sha256(pickle.dumps((self.version, prompts, n, seed, sampling, numbers))).hexdigest()
        kept = self._kept[1] if self._kept[0] == key else {}
        self._kept = (key, kept)
        missing = [i for i in range(len(prompts)) if i not in kept]
        limit = (sampling or self.spec.sampling).max_tokens
        shares = spread([len(prompts[i]) + n * limit for i in missing], len(self.replicas))
        told, one_at_a_time = [(0, 0)] * len(self.replicas), Lock()

        def ask(number: int) -> None:
            own = [missing[i] for i in shares[number]]
            given = [list(prompts[i]) for i in own], n, seed, sampling, [numbers[i] for i in own], finished is not None
            replica = self.replicas[number]

            def tell(done: int, tokens: int) -> None:
                told[number] = done, tokens

            def hand(done: Mapping[int, Completion]) -> None:
                if finished is not None:
                    with one_at_a_time:
                        finished({own[place // n] * n + place % n: one for place, one in done.items()})

            try:
                drawn = replica.draw(*given, progress=tell, finished=hand)
            except EngineDiedError:
                replica.restart()  # it gets ready while the others go on
                raise
            told[number] = len(drawn), sum(len(one.token_ids) for one in drawn)
            kept.update({i: drawn[k * n : (k + 1) * n] for k, i in enumerate(own)})

        def total() -> None:
            if progress is not None:
                progress(sum(done for done, _ in told), sum(tokens for _, tokens in told))

        together([partial(ask, number) for number, share in enumerate(shares) if share], total)
        self._kept = ("", {})
        return [one for i in range(len(prompts)) for one in kept[i]]

    def _converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw a dialogue: whole by the one replica, or the sequences dealt to all, each to the same one every turn."""

        def ask(replica: Replica, part: Dialogue, others: Dealt | None = None) -> None:
            try:
                replica.converse(part, sampling)
            except EngineDiedError:
                if others is not None:
                    others.give_up()
                replica.restart()
                raise
            except GivenUpError:
                return  # the one that died says why

        if len(self.replicas) == 1:
            ask(self.replicas[0], dialogue)
            return
        with Dealt(dialogue, len(self.replicas)) as dealt:
            calls = [partial(ask, replica, dealt.part(number), dealt) for number, replica in enumerate(self.replicas)]
            together(calls, lambda: None)


def spread(tokens: Sequence[int], replicas: int) -> list[list[int]]:
    """Return which prompts each replica draws: the largest first, each to the replica with the fewest tokens to come.

    Args:
        tokens: that each prompt and its completions may have.
        replicas: how many.

    >>> spread([10, 40, 10, 20], 2)
    [[1], [0, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    outstanding = [0] * replicas
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        least = outstanding.index(min(outstanding))
        shares[least].append(i)
        outstanding[least] += tokens[i]
    return [sorted(share) for share in shares]


def together(calls: Sequence[Callable[[], None]], tell: Callable[[], None]) -> None:
    """Make calls at the same time and wait for all; then raise what the first of them raised that failed.

    Args:
        calls: each blocks.
        tell: called now and then meanwhile, in this thread.
    """
    pool = ThreadPoolExecutor(max(len(calls), 1))
    try:
        futures = [pool.submit(call) for call in calls]
        while wait(futures, TICK).not_done:
            tell()
    finally:
        pool.shutdown(wait=False)  # an interrupted run closes the connections that they wait for
    tell()
    errors = [error for future in futures if (error := future.exception()) is not None]
    # What cannot be repeated comes first: a death is followed by another attempt.
    for error in sorted(errors, key=lambda error: isinstance(error, EngineDiedError)):
        raise error


class RemoteVLLMEngine(RemoteEngine):
    """`RemoteEngine` over `VLLMEngine`, with its defaults.

    Args:
        devices: as in `RemoteEngine`.
        hosts: as in `RemoteEngine`.
        token_file: as in `RemoteEngine`.
        transfer: as in `RemoteEngine`.
        **options: of `VLLMEngine`.
    """

    def __init__(
        self,
        devices: Literal["auto"] | list[int | str] = "auto",
        hosts: list[str] | None = None,
        token_file: str | None = None,
        transfer: Literal["auto", "memory", "ipc", "socket", "collective", "nccl"] = "auto",
        **options: Any,
    ) -> None:
        from lit_qrl.rollout.vllm.engine import VLLMEngine

        super().__init__(VLLMEngine(**options), devices, hosts, token_file, transfer)
