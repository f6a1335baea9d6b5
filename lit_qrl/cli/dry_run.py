"""`lit-qrl fit --dry_run`: what `fit` checks before it loads weights, memory by part, and the first prompts."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import nn
from transformers import AutoModelForCausalLM

from lit_qrl.callbacks.publisher import WeightPublisher
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.formats.scaled import Scaled
from lit_qrl.formats.support import lacking
from lit_qrl.functional.logprobs import CHUNK_ELEMENTS
from lit_qrl.loop.budget import TokenBudget
from lit_qrl.loop.routing import replayed_level
from lit_qrl.module import GRPOModule
from lit_qrl.network.experts import expert_stacks
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.routing import route_dtype, routers
from lit_qrl.policy import DTYPES
from lit_qrl.precision import QuantizedPrecision
from lit_qrl.precision.layers.joined_linear import LAID
from lit_qrl.precision.layers.one_pass import take_one_pass
from lit_qrl.precision.packed_lora import PackedLoRA
from lit_qrl.rollout import DiffusionEngine, RemoteVLLMEngine, TransformersEngine, VLLMEngine
from lit_qrl.rollout.embedded.engine import SLOTS, WORD_BYTES
from lit_qrl.rollout.embedded.sampler import EmbeddedSampler
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import same_kernels
from lit_qrl.rollout.vllm.arguments import USED
from lit_qrl.rollout.vllm.base import VLLM
from lit_qrl.shipped import shipped
from lit_qrl.strategies.colocated import ColocatedStrategy
from lit_qrl.strategies.peers import Peers
from lit_qrl.strategies.sharded import ShardedStrategy

GIB = 2**30
TRIAL = 64
"""A matrix of 64 × 64 is the smallest that bitsandbytes keeps in 8 bits."""
PROMPTS, SHOWN = 3, 400
"""Prompts that are printed, and characters of each: beginning and end of a longer one."""
TRUE_PRECISIONS = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


class Part(NamedTuple):
    """One line of the memory table: what, how many bytes, and how they come about."""

    name: str
    size: float
    note: str = ""


class Tensors(NamedTuple):
    """The learner's parameters: shapes under their names, which are trained, which a format holds, and their dtype."""

    shapes: dict[str, torch.Size]
    trained: set[str]
    adapter: set[str]
    quantizable: set[str]
    dtype: torch.dtype

    def count(self, names: set[str]) -> int:
        """Return how many numbers they have."""
        return sum(self.shapes[name].numel() for name in names)


LEARNERS = ("weights", "adapters", "master bits", "gradients", "optimizer states", "reference")
"""Parts that a learner's device holds all the time, or its host where they are offloaded."""


SAMPLERS = ("sampler's weights", "cast weights", "recorded steps", "KV cache")
"""Parts of the engine, of which a strategy that takes turns frees the device in the update."""
ELASTIC = ("recorded steps", "KV cache", "logits", "routes")
"""Parts that are smaller where memory is short."""


class Target(NamedTuple):
    """What a run is judged for: the kind of device, and its bytes, None where they are not known."""

    device: torch.device
    total: float | None = None


class _DoneError(Exception):
    """Ends the Trainer's `fit` where it would load the weights."""


def dry_run(trainer: Trainer, module: GRPOModule, data: RolloutDataModule, gib: float | None = None) -> None:
    """Let `fit` check all that it checks before it loads weights, then print what it would need and see.

    Args:
        trainer: of the run.
        module: that would be trained.
        data: with the engine.
        gib: size of the GPU that memory is judged for; None is this host's device. What the engine refuses on this
            host is then told and not raised.

    Raises:
        ConfigError: for what `fit` would refuse (what the engine refuses, after all that is printed), for a disk
            without room for two checkpoints, and for a GPU that does not hold weights, gradients and optimizer.
    """
    target = Target(trainer.strategy.root_device)
    if gib is not None:
        target = Target(torch.device("cuda"), gib * GIB)
    elif target.device.type == "cuda":
        target = target._replace(total=torch.cuda.get_device_properties(target.device).total_memory)
    found: list[Tensors] = []
    refused: list[ConfigError] = []

    def told_later(check: Callable[..., None]) -> Callable[..., None]:
        """Return a check of the engine that does not end the dry run: memory is wanted for another host, too."""

        def checked(*given: Any) -> None:
            try:
                if not refused:
                    check(*given)
            except ConfigError as error:
                refused.append(error)

        return checked

    def instead_of_weights() -> None:
        found.append(tensors(module, trainer, target.device))
        without_weights(module, trainer)  # where processes meet
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Peers):  # the others end here, which is no loss to the first one
                callback.teardown(trainer, module, "fit")
        raise _DoneError

    folder = Path(trainer.default_root_dir)
    module.configure_model = instead_of_weights  # what Lightning calls after every setup
    for check in ("validate", "check_model"):
        if hasattr(data.engine, check):
            setattr(data.engine, check, told_later(getattr(data.engine, check)))
    try:
        with suppress(_DoneError):
            trainer.fit(module, datamodule=data)
    except Exception:
        if not refused:
            raise
    finally:
        del module.configure_model
    if refused and not found:
        raise refused[0]
    if trainer.global_rank:  # the first one tells, and the folder may be gone by now
        return
    (learner,) = found
    table = parts(trainer, module, data, learner, target)
    room = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.is_dir())).free
    trained = learner.count(learner.trained)
    print(f"{trained:,} of {sum(one.numel() for one in learner.shapes.values()):,} parameters are trained.\n")
    print(as_table(table))
    tokens = by_tokens(data, target.device)
    print(f"\nActivations come on top: they grow with the tokens of a micro-batch{tokens}.")
    lines = [room_left(table, trainer, target.total) if target.total else "", same_kernels_told(trainer, module, data)]
    print("\n".join([*filter(None, lines), ""]))
    before = data.position
    for ids in (problem.prompt_ids for problem in data.next_problems(PROMPTS)):
        text = module.policy.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        print(f"Prompt of {len(ids)} tokens: {ends(text)}", flush=True)  # what is refused goes to another stream
    data.position = before
    if refused and gib is None:
        raise refused[0]
    full = None
    try:
        check_disk(table, room, folder)
    except ConfigError as error:
        if gib is None:
            raise
        full = error
    if target.total:
        check_memory(table, trainer, target.total)
    if full is not None:
        print(f"\nOn this host: {full}")
    if refused:
        print(f"\nOn this host the engine refuses: {refused[0]}")
    judged = "" if gib is None else f"; memory was judged for a GPU of {gib:g} GiB"
    print(f"\nNothing was loaded. The configuration can be run{judged}.")


def same_kernels_told(trainer: Trainer, module: GRPOModule, data: RolloutDataModule) -> str:
    """Return what `data.engine.same_kernels` does on a GPU that has the kernels; nothing for an engine without it."""
    remote = isinstance(data.engine, RemoteVLLMEngine)
    if not isinstance(data.engine, VLLM):
        return ""
    network = module.policy.network.to(dtype_of(module, trainer, torch.device("cuda")))
    take_one_pass(network, bool(module.policy.fuse))  # as the policy does where there is CUDA
    said = same_kernels.foretold(data.engine, spec_of(trainer), network, remote)
    return f"data.engine.same_kernels: {said}."


def without_weights(module: GRPOModule, trainer: Trainer) -> None:
    """Do what `fit` does next to a policy that was built without weights, for what it refuses then."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, QuantizedPrecision) and not plugin.packs_base:
        plugin.convert_module(module)
    module.configure_optimizers()


def by_tokens(data: RolloutDataModule, device: torch.device) -> str:
    """Return how many those are where `data.micro_batches` is auto, as the end of a sentence."""
    if not isinstance(data.budget, TokenBudget):
        return ""
    known = f", at most {data.budget.tokens}"
    return f"{known} in the first iteration and by free memory after it" if data.budget.measures(device) else known


def dtype_of(module: GRPOModule, trainer: Trainer, device: torch.device) -> torch.dtype:
    """Return the dtype of the learner's weights on a device."""
    policy = module.policy
    in_fp32 = device.type == "cpu" or isinstance(trainer.strategy, ShardedStrategy)
    own = getattr(policy.config, "dtype", None) or torch.float32
    dtype = DTYPES.get(policy.dtype, torch.float32 if in_fp32 else own)
    return TRUE_PRECISIONS.get(str(trainer.precision), dtype)


def spec_of(trainer: Trainer) -> SamplerSpec:
    """Return the spec of the run's sampler."""
    return next(one.spec for one in trainer.callbacks if isinstance(one, WeightPublisher))  # pyright: ignore


def tensors(module: GRPOModule, trainer: Trainer, device: torch.device) -> Tensors:
    """Return the parameters that the run would have on a device; the model is built without weights."""
    policy = module.policy
    kept = policy.random_weights, policy.packed_format
    policy.random_weights, policy.packed_format = True, None
    try:
        with torch.device("meta"):
            policy.configure()
    finally:
        policy.random_weights, policy.packed_format = kept
    named = dict(policy.named_parameters())
    trained = {name for name, one in named.items() if one.requires_grad}
    matrices = {id(one.weight) for one in quantizable_linears(policy.network).values()}
    for name, stack in expert_stacks(policy.network).items():
        matrices |= {id(policy.network.get_parameter(f"{name}.{matrix}")) for matrix in stack.parts}
    return Tensors(
        shapes={name: one.shape for name, one in named.items()},
        trained=trained,
        adapter=trained if policy.lora is not None else set(),
        quantizable={name for name, one in named.items() if id(one) in matrices},
        dtype=dtype_of(module, trainer, device),
    )


def parts(
    trainer: Trainer, module: GRPOModule, data: RolloutDataModule, learner: Tensors, target: Target
) -> list[Part]:
    """Return the memory of a run, part by part.

    Args:
        trainer: set up, as are the module and the data.
        module: that is trained.
        data: with the engine.
        learner: the parameters that the run would have.
        target: where they would be.
    """
    plugin, item = trainer.precision_plugin, learner.dtype.itemsize
    name = str(learner.dtype).removeprefix("torch.")
    base = set(learner.shapes) - learner.adapter
    packed = learner.quantizable if isinstance(plugin, PackedLoRA) else set()
    weights = learner.count(base - packed) * item
    held = name
    if isinstance(plugin, PackedLoRA):
        weights += learner.count(packed) * plugin.format.bits_per_weight / 8
        held = f"{plugin.format.name} and {name}"
    trained = learner.count(learner.trained)
    step = max(item, 4) if learner.adapter else item  # an adapter's own weights stay fp32 over a base of 16 bits
    exact = f"float{8 * step}"
    masters = getattr(module, "master_weights", False) and step < 4
    learners = [
        Part("weights", weights, held),
        Part("adapters", learner.count(learner.adapter) * step, exact if learner.adapter else "none"),
        Part("master bits", trained * 2 if masters else 0, "16 bits beside each weight" if masters else "none"),
        Part("gradients", trained * step, exact if learner.adapter else name),
        optimizer_states(module, learner, torch.float32 if masters or step > item else learner.dtype),
        Part("reference", *reference(module, weights, target.device)),
    ]
    if isinstance(trainer.strategy, ShardedStrategy):
        ranks = trainer.world_size
        learners = [Part(part.name, part.size / ranks, f"{part.note}, 1 of {ranks} parts") for part in learners]
        if isinstance(plugin, PackedLoRA) and trainer.strategy.packed_base == "replicated":
            codes = learner.count(packed) * plugin.format.bits_per_weight / 8
            whole = learners[0].size + codes * (1 - 1 / ranks)
            learners[0] = Part("weights", whole, f"{held}, the codes whole, the rest 1 of {ranks} parts")
    return [
        *learners,
        *engine_parts(data, spec_of(trainer), learner, module.policy.config.get_text_config(), target),
        logits(data, module.policy.config.get_text_config(), target.device),
        *([routes(data, module.policy.network)] if replayed_level(trainer) else []),
    ]


def reference(module: GRPOModule, weights: float, device: torch.device) -> tuple[float, str]:
    """Return the bytes of the KL's reference, and what it is; `weights` are those of a copy of the learner."""
    policy = module.policy
    if not module.objective.kl_coefficient:
        return 0, "none"
    if policy.reference_config is not None:
        with torch.device("meta"):
            other = AutoModelForCausalLM.from_config(policy.reference_config)
        item = 4 if policy.dtype == "fp32" or device.type == "cpu" else 2
        return sum(one.numel() for one in other.parameters()) * item, "another model"
    return (weights, "a frozen copy, for the KL penalty") if policy.lora is None else (0, "the adapter's base")


def optimizer_states(module: GRPOModule, learner: Tensors, dtype: torch.dtype) -> Part:
    """Return the memory of the optimizer's states, measured on small parameters of the same names and ranks."""
    small = {}
    for name in sorted(learner.trained):
        rank = len(learner.shapes[name])
        small[name] = nn.Parameter(torch.ones((TRIAL,) * min(rank, 2) + (1,) * max(rank - 2, 0), dtype=dtype))
        small[name].grad = torch.ones_like(small[name])
    made: Any = None
    try:
        made = module.optimizer(small.items())
        made.step()
    except Exception as error:  # a missing kernel shows itself as an error of many kinds
        return Part("optimizer states", float("nan"), f"not known here: {type(error).__name__}")
    size = 0.0
    for name, one in small.items():
        state = [value for value in made.state.get(one, {}).values() if isinstance(value, torch.Tensor)]
        each = sum(value.numel() * value.itemsize for value in state if value.numel() > 1) / one.numel()
        size += each * learner.shapes[name].numel()
    return Part("optimizer states", size, type(made).__name__)


def engine_parts(
    data: RolloutDataModule, spec: SamplerSpec, learner: Tensors, config: Any, target: Target
) -> Iterator[Part]:
    """Yield the memory of the sampler's weights and of its key-value cache, where the learner's device has them."""
    engine, format, (device, total) = data.engine, spec.format, target
    if isinstance(engine, RemoteVLLMEngine):
        return
    given: Any = getattr(engine, "dtype", None)
    plain = given if isinstance(given, torch.dtype) else DTYPES.get(str(given), learner.dtype)
    quantized = learner.quantizable if format is not None and not isinstance(format, Dense) else set()
    base = set(learner.shapes) - learner.adapter
    size = learner.count(base - quantized) * plain.itemsize
    note = _format_name(format, plain)
    if quantized and format is not None:
        size += learner.count(quantized) * format.bits_per_weight / 8
    if isinstance(engine, EmbeddedSampler):
        shared = engine.share == "auto" and not spec.outlives_update and plain == learner.dtype
        if shared:
            laid = device.type == "cuda" and isinstance(engine, TransformersEngine) and engine.cuda_graphs
            own = {name for name in base - quantized if laid and name.rpartition(".")[0].endswith(LAID)}
            size -= learner.count(base - quantized - own) * plain.itemsize
            note += f", {'most' if own else 'the'} plain ones shared with the learner"
        # a GPU that is not there is taken for one that multiplies codes
        emulated = device.type != "cuda" or (torch.cuda.is_available() and lacking("", format, device, own=True))
        if engine.keep_operands and quantized and (emulated or not isinstance(format, Scaled)):
            size += learner.count(quantized) * (4 if isinstance(format, Scaled) else plain.itemsize)
            note += ", and dequantized operands"
    if isinstance(engine, VLLMEngine) and engine.tensor_parallel_size > 1:
        size /= engine.tensor_parallel_size
        note += f", 1 of {engine.tensor_parallel_size} parts"
    share = engine.gpu_memory_utilization * total if isinstance(engine, VLLMEngine) and total else None
    if share is not None:
        note += f", inside the engine's {share / GIB:.1f} GiB of the GPU"
    weights = size
    yield Part("sampler's weights", size, note)
    cast = engine.autocast_of(spec, format) if isinstance(engine, EmbeddedSampler) else None
    if cast not in (None, plain):
        assert cast is not None
        numbers = learner.count(learner.quantizable - quantized) + config.vocab_size * config.hidden_size
        name = _format_name(None, cast)
        yield Part("cast weights", numbers * cast.itemsize, f"plain linear layers in {name}, while it draws")
        plain = cast  # of keys and values too
    if isinstance(engine, DiffusionEngine) and engine.reuse == "none":
        return
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = data.max_prompt_tokens + data.max_completion_tokens
    rows = data.prompts_per_rank * data.group_size
    replays = isinstance(engine, TransformersEngine) and engine.cuda_graphs and device.type == "cuda"
    if isinstance(engine, TransformersEngine):
        rows = min(rows, engine.max_batch or (SLOTS if replays else rows))
    if replays:
        size = rows * config.vocab_size * WORD_BYTES
        yield Part(
            "recorded steps", size, f"logits of {rows} rows and what is made of them, kept between rollouts, at most"
        )
    whole = 2 * config.num_hidden_layers * heads * width * plain.itemsize * tokens * rows
    limit = getattr(engine, "cache_gigabytes", None) or (0.5 if device.type == "cpu" else None)
    if isinstance(engine, TransformersEngine) and limit is not None and whole > limit * 1e9:
        yield Part("KV cache", limit * 1e9, f"its limit; all {rows} sequences would take {_amount(whole).strip()}")
        return
    if isinstance(engine, VLLMEngine) and engine.kv_cache_gib is not None:
        yield Part("KV cache", engine.kv_cache_gib * GIB, "data.engine.kv_cache_gib")
        return
    if isinstance(engine, VLLMEngine) and share is not None:
        drawn = engine._arguments["max_num_seqs"]
        reserved = whole / rows * drawn / engine.tensor_parallel_size
        note = f"what vLLM reserves: {drawn} sequences of {tokens} tokens, or the rest of its share"
        yield Part("KV cache", min(reserved, max(USED * share - weights, 0)), note)
        return
    yield Part("KV cache", whole, f"{rows} sequences of {tokens} tokens at once, at most")


def _format_name(format: NumberFormat | None, plain: torch.dtype) -> str:
    dtype = str(plain).removeprefix("torch.")
    return dtype if format is None else f"{format.name} and {dtype}" if not isinstance(format, Dense) else format.name


def logits(data: RolloutDataModule, config: Any, device: torch.device) -> Part:
    """Return the memory of the logits that exist at a time, in fp32, and of their gradient."""
    rows = data.prompts_per_rank // data.mini_batches * data.group_size // data.parts
    positions = rows * data.max_completion_tokens
    if isinstance(data.budget, TokenBudget):
        positions = min(positions, max(data.budget.tokens, data.max_completion_tokens))
    chunk = max(1, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"]) // config.vocab_size)
    held = min(positions, chunk)
    return Part("logits", 2 * held * config.vocab_size * 4, f"{held} of {positions} positions at a time")


def routes(data: RolloutDataModule, network: nn.Module) -> Part:
    """Return the memory of the experts that the rollout's tokens took, which the learner replays."""
    found = routers(network)
    size = sum(router.chosen for router in found) * route_dtype(max(router.experts for router in found)).itemsize
    rows, tokens = data.prompts_per_rank * data.group_size, data.max_prompt_tokens + data.max_completion_tokens
    return Part("routes", size * rows * tokens, f"{size} bytes a token, {rows} sequences of {tokens} tokens, at most")


def as_table(table: Sequence[Part]) -> str:
    """Return the parts as lines, with their sum.

    >>> print(as_table([Part("weights", 3 * 2**30, "bf16"), Part("gradients", 2**29)]))
    weights               3.00 GiB  bf16
    gradients            512.0 MiB
    together              3.50 GiB
    """
    whole = sum(part.size for part in table if part.size == part.size)
    lines = [f"{name:<19} {_amount(size)}  {note}".rstrip() for name, size, note in table]
    return "\n".join([*lines, f"{'together':<19} {_amount(whole)}"])


def _amount(size: float) -> str:
    return f"{size / GIB:6.2f} GiB" if size >= GIB else f"{size / 2**20:6.1f} MiB"


def ends(text: str, shown: int = SHOWN) -> str:
    """Return a text as it is written in Python, of a long one beginning and end.

    >>> ends("0123456789", 4)
    "'01' … '89'"
    """
    half = shown // 2
    return repr(text) if len(text) <= shown else f"{text[:half]!r} … {text[-half:]!r}"


def check_disk(table: Sequence[Part], room: int, folder: Path) -> None:
    """Raise `ConfigError` where two checkpoints do not fit: the last one stays until the next is whole."""
    kept = {"adapters", "master bits", "optimizer states"}
    adapted = any(part.name == "adapters" and part.size for part in table)
    kept |= set() if adapted else {"weights"}
    need = 2 * sum(part.size for part in table if part.name in kept and part.size == part.size)
    if need > room:
        raise ConfigError(
            "The disk has no room for the run's checkpoints.",
            expected=f"{_amount(need).strip()} for two of them, since one is kept until the next is whole",
            given=f"{_amount(room).strip()} free under {folder}",
            remedy="Free some space, or set trainer.default_root_dir to another disk.",
        )


def at_a_time(table: Sequence[Part], trainer: Trainer) -> list[Part]:
    """Return the parts that lie on the device together, of a strategy that takes turns in the phase with most bytes."""
    strategy: Any = trainer.strategy
    away = [LEARNERS if getattr(strategy, "offload", False) else ()]
    if isinstance(strategy, ColocatedStrategy):
        states = ("optimizer states",) if strategy.offload_optimizer else ()
        away = [("gradients", "logits", *states), SAMPLERS]
    known = [part for part in table if part.size == part.size]
    phases = ([part for part in known if part.name not in gone] for gone in away)
    return max(phases, key=lambda phase: sum(part.size for part in phase))


def room_left(table: Sequence[Part], trainer: Trainer, total: float) -> str:
    """Return how much of a GPU's bytes the parts leave, as a sentence."""
    left = total - sum(part.size for part in at_a_time(table, trainer))
    amount, page = _amount(abs(left)).strip(), shipped("docs/one_gpu.md")
    if left < 0:
        return f"That is {amount} more than the GPU's {_amount(total).strip()}: {page} says what takes less."
    return f"Of the GPU's {_amount(total).strip()} this leaves them {amount}; {page} says how much runs took."


def check_memory(table: Sequence[Part], trainer: Trainer, total: float) -> None:
    """Raise `ConfigError` where what cannot be less is more than the GPU holds, without cache and activations."""
    held = at_a_time([part for part in table if part.name not in ELASTIC], trainer)
    need = sum(part.size for part in held)
    if need > total:
        largest = max(held, key=lambda part: part.size)
        raise ConfigError(
            "The run does not fit its GPU.",
            expected=f"at most {_amount(total).strip()}, of which cache and activations take a part too",
            given=f"{_amount(need).strip()} on each of {trainer.world_size}, {_amount(largest.size).strip()} of it "
            f"{largest.name}",
            remedy="Set trainer.strategy to ShardedStrategy over more GPUs, or with offload: true; or train an adapter "
            f"(model.policy.lora). {shipped('docs/scale.md')} has a table of what fits.",
        )
