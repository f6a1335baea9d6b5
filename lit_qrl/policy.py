"""The policy: a causal language model from the hub, a folder or a config, with its tokenizer, full or under PEFT."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig, get_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.functional.logprobs import Pick, token_logprobs
from lit_qrl.functional.vocabulary_kl import vocabulary_kl
from lit_qrl.network.adapters import check_adapter, merged_weights, starts_from_base, with_adapter
from lit_qrl.network.chat import chat_ids, turn_ids, with_special_tokens
from lit_qrl.network.denoising import check_causal
from lit_qrl.network.folder import (
    FOLDER_REMEDY,
    HUB_REMEDY,
    appearing,
    local_folder,
    resolve_model,
    write_adapter,
    write_plain,
)
from lit_qrl.network.head import check_tied, output_head
from lit_qrl.network.hidden import scored_hidden
from lit_qrl.network.invariant import Product, batch_invariant
from lit_qrl.network.memory import SelectiveRecomputation, compute_again, room_for_logits
from lit_qrl.network.modes import train_without_dropout
from lit_qrl.network.padding_free import enable_padding_free, is_padding_free, spread
from lit_qrl.network.shards import whole
from lit_qrl.network.structure import compute_frequencies_on_the_cpu, implementation
from lit_qrl.precision.deferred import DeferredWeights, deferred_folder, weights_are_deferred
from lit_qrl.precision.layers.lora_linear import keep_factors, swap_lora_linears
from lit_qrl.precision.layers.low_bit import LowBitWeight
from lit_qrl.precision.layers.one_pass import Fuse, take_one_pass
from lit_qrl.precision.layers.residual import join_layers
from lit_qrl.precision.packed_base import PackedBase, multiplied_out, take_packed_format
from lit_qrl.run.description import Described
from lit_qrl.types import RolloutBatch, TokenScores

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AT_ONCE = 1024
"""Prompts that the tokenizer is given in one call, of which it holds more than the ids."""


class Reference(nn.Module):
    """A frozen network that scores as a module of its own, so that its weights may be divided over processes.

    Args:
        network: Hugging Face's.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, scores: Callable[..., Any], *arguments: Any) -> Any:
        """Return `scores(network, …)`."""
        return scores(self.network, *arguments)


class CausalPolicy(Described, nn.Module):
    """Holds the learner's model and tokenizer; the tokenizer loads at once, the weights in `configure`.

    Args:
        model: name on the hub, a folder (relative to the working directory, else one that ships) with `config.json`
            and weights, or a `.gguf` file.
        tokenizer: name or folder of the tokenizer; None takes the model's.
        dtype: of the weights; `auto` is fp32 on a CPU, else the checkpoint's own.
        lora: a PEFT config (`class_path: peft.LoraConfig`); None trains all weights.
        gradient_checkpointing: keep only the layers' inputs for the backward pass and compute the rest again: in all
            layers, in none, or (`auto`) in those whose activations do not fit into a GPU's free memory; none on a CPU.
        attn_implementation: `sdpa`, `eager`, `flash_attention_2`, …; None is the library's choice.
        trust_remote_code: run model code that comes with a hub repository.
        random_weights: build the model from its config alone, for benchmarks.
        pad_token: padding token; None is the tokenizer's own, or its end token if it has none.
        eos_token: end token instead of the tokenizer's. A completion ends with it, and with the model's own: those of
            `generation_config.json`, else of `config.json`.
        chat_template_args: further arguments of the tokenizer's chat template, such as `enable_thinking: false`.
        revision: branch, tag or commit on the hub.
        packing: `auto` runs the layers on real tokens only, a group's prompt once, wherever the architecture and the
            attention implementation allow it; `never` keeps padded batches.
        fuse: norms and gated activations in one kernel each: `auto` where there is CUDA and Triton.
        compile: only false; earlier configurations have the key.
        head_dtype: `fp32` computes logits, and their gradients, in fp32; `auto` in the dtype of the hidden states.
        reference: reference model of the objective's KL, such as a teacher: name or folder, with the same tokenizer.
            It computes in its plain dtype; None is the initial policy.
        dropout: train with the dropout rates of the model's config and of `lora_dropout`. The sampler has no dropout,
            so the learner's ratios then contain its noise. Scoring and evaluation never use dropout.

    Raises:
        ConfigError: for a folder without config or weights, an unknown name, or a model without any end token.
    """

    denoises: bool = False
    """True when completions fill in masks, in any order, and log-probs are estimates."""
    check_kind = staticmethod(check_causal)

    batch_invariant = False
    """As the engine's, which the module passes on."""
    attention: Callable[[Tensor, Tensor, Tensor, float | None], Tensor] | None = None
    """Of the engine that samples, where it is to be the learner's too; None is torch's."""
    product: Product | None = None
    """With plain weights, of a batch-invariant engine that has its own."""
    pick: Pick | None = None
    """From logits to log-probs, of such an engine's sampler."""
    stop_token_ids: tuple[int, ...]
    """Each ends a completion."""
    ending: str
    """Which tokens those are, and what pads, as a sentence."""
    holds_logits = True
    """Whether logits may stay for the backward pass where memory is free; not while what a pass needs is measured."""

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        lora: PeftConfig | None = None,
        gradient_checkpointing: bool | Literal["auto"] = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        random_weights: bool = False,
        pad_token: str | None = None,
        eos_token: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        revision: str | None = None,
        packing: Literal["auto", "never"] = "auto",
        fuse: Fuse = "auto",
        compile: Literal[False] = False,
        head_dtype: Literal["auto", "fp32"] = "auto",
        dropout: bool = False,
        reference: str | None = None,
    ) -> None:
        super().__init__()
        check_choice("model.policy.dtype", dtype, ("auto", *DTYPES))
        check_choice("model.policy.head_dtype", head_dtype, ("auto", "fp32"))
        check_adapter(lora)
        self.source = resolve_model(model, weights=not random_weights)
        self.dtype, self.lora, self.gradient_checkpointing = dtype, lora, gradient_checkpointing
        self.chat_template_args, self.packing, self.random_weights = chat_template_args or {}, packing, random_weights
        self.fuse: Fuse = fuse
        self.head_dtype, self.dropout = DTYPES.get(head_dtype), dropout
        self._hub = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
        self.config = self._load(AutoConfig, self.source, "config")
        self.check_kind(self.config)
        self.attn_implementation = implementation(self.config, attn_implementation)
        self.packed_format = take_packed_format(self.config, self.source, lora, random_weights)
        self.packed_base: PackedBase | None = None
        self.tokenizer = self._load_tokenizer(tokenizer, pad_token, eos_token)
        self.model: nn.Module | None = None
        self.recomputation: SelectiveRecomputation | None = None
        self.deferred: DeferredWeights | None = None
        self.reference_config: Any = None
        self._load_reference = None if reference is None else self._other_model(reference)
        self.frozen_copies: list[Reference] = []  # no registered submodule: the state dict is the learner's alone
        self._scoring_with_reference = False

    # ----------------------------------------------------------------------------------------------------- tokenizer

    def _load_tokenizer(self, name: str | None, pad_token: str | None, eos_token: str | None) -> Any:
        source = self.source if name is None else resolve_model(name, weights=False, what="tokenizer")
        tokenizer, own = self._load(AutoTokenizer, source, "tokenizer"), self._model_ends()
        known = [end for end in own if 0 <= end < len(tokenizer)]
        pads = pad_token is not None or tokenizer.pad_token_id is not None
        tokenizer = with_special_tokens(tokenizer, source, pad_token, eos_token, known)
        self.stop_token_ids = tuple(sorted({tokenizer.eos_token_id, *known}))
        names = " or ".join(map(repr, tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))))
        padding = "" if pads else f"; {tokenizer.pad_token!r} pads too, as the tokenizer names no padding token"
        self.ending = f"A completion ends with {names}{padding}."
        return tokenizer

    def _model_ends(self) -> list[int]:
        """Return the ids of the model's own end tokens: a chat model may have others than its tokenizer's `eos`."""
        try:
            ends = GenerationConfig.from_pretrained(self.source, revision=self._hub["revision"]).eos_token_id
        except (OSError, ValueError):
            ends = None
        if ends is None:  # what the file says, and not what is the default of the config's class
            ends = PretrainedConfig.get_config_dict(self.source, **self._hub)[0].get("eos_token_id")
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token."""
        return self.tokenizer.pad_token_id

    def encode(self, prompt: str | Sequence[dict[str, str]], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the token ids of one prompt; see `encode_all`."""
        return self.encode_all([prompt], tools)[0]

    def encode_all(
        self, prompts: Sequence[str | Sequence[dict[str, str]]], tools: Sequence[Any] | None = None
    ) -> list[list[int]]:
        """Return the token ids of prompts: text as it is, chat messages through the tokenizer's template.

        Args:
            prompts: texts, or messages with `role` and `content`.
            tools: descriptions of tools, for the template.
        """
        arguments = self.chat_template_args if tools is None else {**self.chat_template_args, "tools": list(tools)}
        found: list[list[int]] = []
        for plain, alike in groupby(prompts, lambda prompt: isinstance(prompt, str)):
            some: list[Any] = list(alike)
            for part in (some[start : start + AT_ONCE] for start in range(0, len(some), AT_ONCE)):
                if not plain:
                    found += chat_ids(self.tokenizer, part, arguments, self.source)
                    continue
                for prompt, ids in zip(part, self.tokenizer(part)["input_ids"], strict=True):
                    # Some tokenizers end every text; a completion cannot follow an end token.
                    ended = ids and ids[-1] == self.tokenizer.eos_token_id
                    found.append(ids[:-1] if ended and not prompt.endswith(self.tokenizer.eos_token) else ids)
        return found

    def encode_turn(self, messages: Sequence[Mapping[str, Any]], chat: bool) -> list[int]:
        """Return the token ids of messages that follow an answer, up to where the next answer begins.

        Args:
            messages: with `role` and `content`.
            chat: through the tokenizer's template; else their contents as they are.
        """
        return turn_ids(self.tokenizer, messages, self.chat_template_args, chat)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    # -------------------------------------------------------------------------------------------------------- weights

    def _load(self, auto_class: Any, source: str, what: str) -> Any:
        try:
            return auto_class.from_pretrained(source, **self._hub)
        except (OSError, ValueError, KeyError, RecursionError) as error:
            there = Path(source).is_dir()
            raise ConfigError(
                f"The {what} of model {source!r} cannot be loaded: {str(error).splitlines()[0]}",
                expected=None if there else "a folder that exists, or a name on the hub that can be reached from here",
                given=source,
                remedy=FOLDER_REMEDY if there else HUB_REMEDY,
            ) from error

    def configure(self) -> None:
        """Load the weights (or draw random ones) and add the adapter; a second call changes nothing.

        Raises:
            ConfigError: when the checkpoint lacks weights of the model.
        """
        if self.model is not None:
            return
        on_cpu = torch.get_default_device().type == "cpu"
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for every shape anew, and each batch has its own
        dtype: Any = DTYPES.get(self.dtype, torch.float32 if on_cpu else "auto")
        options: dict[str, Any] = {"trust_remote_code": self._hub["trust_remote_code"], **multiplied_out(self.config)}
        if self.attn_implementation is not None:
            options["attn_implementation"] = self.attn_implementation
        own = getattr(self.config, "dtype", None) if dtype == "auto" else dtype
        build = partial(AutoModelForCausalLM.from_config, self.config, dtype=own or torch.float32, **options)
        if self.random_weights:
            network = self._random(build)
        elif self.packed_format is not None:
            self.packed_base = PackedBase(local_folder(self.source, self._hub["revision"]), self.packed_format)
            network = self.packed_base.build(build, None if dtype == "auto" else dtype)
        else:
            network = self._pretrained(dtype, options, None if own is None else build)
        network.config.use_cache = False
        if not on_cpu:
            compute_frequencies_on_the_cpu(network)
        self.recomputation = compute_again(network, self.gradient_checkpointing, on_cpu)  # pyright: ignore[reportArgumentType]
        if self.packing == "auto" and self.attn_implementation is None:
            enable_padding_free(network, self.dropout)
        if self.lora is not None:
            network = with_adapter(network, self.lora, self.source)
            swap_lora_linears(network)
            if getattr(self.lora, "lora_dropout", 0) and not self.dropout:
                log.warning("lora_dropout is off, as all dropout is; model.policy.dropout: true trains with it.")
        self.model = network
        computes = torch.get_default_device().type != "meta"  # else names and shapes alone are wanted
        if computes and take_one_pass(self.network, self.fuse):
            join_layers(self.network)
        check_tied(self.network)
        self.train()

    def _apply(self, fn: Any, recurse: bool = True) -> "CausalPolicy":
        """Move or cast parameters; what is no weight, such as rotary frequencies, keeps the precision that it has.

        Lightning's `bf16-true` casts all that is floating. Frequencies of eight bits turn the queries of late tokens by
        other angles than the sampler does.
        """
        kept = [
            (part, name, buffer.detach())  # the buffer itself may be written over
            for part in self.modules()
            for name, buffer in part.named_buffers(recurse=False)
            if name in part._non_persistent_buffers_set
        ]
        super()._apply(fn if self.lora is None or self.model is None else keep_factors(self.model, fn), recurse)
        for part, name, before in kept:
            after = part.get_buffer(name)
            if after.dtype != before.dtype:
                part.register_buffer(name, before.to(after.device), persistent=False)
        return self

    def train(self, mode: bool = True) -> "CausalPolicy":
        """Begin or end training, in which modules stay in evaluation mode unless `dropout` is asked for."""
        super().train(mode)
        if mode and self.model is not None and not self.dropout:
            train_without_dropout(self.model)
        return self

    def _random(self, build: Callable[[], Any]) -> Any:
        """Return a model with weights drawn at random: now, or by `deferred` where a precision plugin asks for that."""
        if not self._may_defer():
            return build()
        self.deferred = DeferredWeights(build)
        return self.deferred.network

    def _may_defer(self) -> bool:
        """Return whether a precision plugin asks for it, and no part of an adapter starts from the base's weights."""
        lora = self.lora
        fits = lora is None or (isinstance(lora, LoraConfig) and not (lora.modules_to_save or starts_from_base(lora)))
        return fits and weights_are_deferred(adapted=lora is not None)

    def _pretrained(self, dtype: Any, options: dict[str, Any], build: Callable[[], Any] | None) -> Any:
        if build is not None and getattr(self.config, "quantization_config", None) is None and self._may_defer():
            self.deferred = deferred_folder(local_folder(self.source, self._hub["revision"]), build)
            if self.deferred is not None:
                return self.deferred.network
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.source, dtype=dtype, revision=self._hub["revision"], output_loading_info=True, **options
            )
            network, info = loaded
        except UnpicklingError as error:  # torch advises to let it run code
            raise ConfigError(
                f"The weights of {self.source} cannot be loaded: a file is damaged, or a pickle of more than tensors.",
                expected="model.safetensors, or a .bin of tensors alone",
                remedy="Take the model's safetensors: what else a pickle holds could run code.",
            ) from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"The weights of {self.source} cannot be loaded: {error}",
                remedy="Take config and weights of one model.",
            ) from error
        if absent := sorted(info["missing_keys"]):
            raise ConfigError(
                f"The checkpoint of {self.source} lacks {len(absent)} weights of its model.",
                expected=", ".join(absent[:3]) + (", …" if len(absent) > 3 else ""),
                remedy="Take a complete checkpoint; without them the policy would start partly at random.",
            )
        return network

    @property
    def network(self) -> Any:
        """The Hugging Face causal language model itself, adapter layers inside; its `config` describes it."""
        if self.model is None:
            raise RuntimeError("The policy has no weights yet: call configure() first.")
        return self.model.get_base_model() if self.lora is not None else self.model  # pyright: ignore

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its checkpoint name, an adapter merged in; one merged weight exists at a time."""
        return merged_weights(self.network)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors under PEFT's checkpoint names; empty without an adapter."""
        if self.lora is None:
            return {}
        return {name: whole(tensor) for name, tensor in get_peft_model_state_dict(self.model).items()}

    def frozen_names(self) -> list[str]:
        """Return the names of the weights under an adapter that are not trained and can be loaded again.

        None are where all weights are trained, or where the base was drawn at random.
        """
        if self.lora is None or self.random_weights or self.model is None:
            return []
        return [name for name, one in self.named_parameters(remove_duplicate=False) if not one.requires_grad]

    def save_pretrained(self, folder: str | Path, shard_gib: float = 4.0) -> None:
        """Write weights, or a LoRA alone, with the tokenizer, as transformers, PEFT and vLLM load them.

        Args:
            folder: to make; new or empty.
            shard_gib: largest file written, in GiB.

        Raises:
            ConfigError: before there are weights, and for weights that `lit-qrl export` alone writes.
        """
        if self.model is None:
            raise ConfigError(
                "The policy has no weights yet.",
                remedy="Train first, take GRPOModule.load_from_checkpoint, or call policy.configure().",
            )
        formats = {str(one.format) for one in self.network.modules() if isinstance(one, LowBitWeight)}
        parts = any(isinstance(one, DTensor) for one in self.parameters())
        if formats or parts:
            held = "is divided over processes" if parts else f"computes in {', '.join(formats)}"
            raise ConfigError(
                f"The policy {held}: its weights here are not what is deployed.",
                expected="weights that are whole and plain, or an adapter",
                remedy="Run lit-qrl export RUN --output FOLDER on its run folder.",
            )
        with appearing(Path(folder)) as made:
            if self.lora is not None:
                write_adapter(self, made)
            else:
                write_plain(self, made, None, int(shard_gib * 2**30))

    # ------------------------------------------------------------------------------------------------------ reference

    def _other_model(self, source: str) -> Callable[[], nn.Module]:
        """Return what loads the network of another model that words the same tokens."""
        options: dict[str, Any] = {"dtype": self.dtype, "packing": self.packing, **self._hub, "revision": None}
        other = CausalPolicy(source, attn_implementation=self.attn_implementation, **options)
        if other.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                "model.policy.reference has another tokenizer than the policy: its log-probs would be of other tokens.",
                expected=f"the words of {self.source}",
                given=source,
                remedy="Take a model of the same family.",
            )

        self.reference_config = other.config

        def load() -> nn.Module:
            other.configure()
            if other.deferred is not None:
                other.deferred.fill_all()
            if is_padding_free(other.network) != is_padding_free(self.network):
                raise ConfigError(
                    "The policy and model.policy.reference lay out their batches differently.",
                    expected="two models that run without padding, or none",
                    given=f"{self.source} and {source}",
                    remedy="Set model.policy.packing to never.",
                )
            return other.network.requires_grad_(False)

        return load

    def keep_reference(self) -> None:
        """Load the reference, or keep a frozen copy of the weights of now; of an adapter the base serves."""
        if self.frozen_copies:
            return
        if self._load_reference is not None:
            self.frozen_copies.append(Reference(self._load_reference().eval()))
        elif self.lora is None:
            if self.deferred is not None:  # weights that are still to come are frozen by whoever fills them
                frozen = self.deferred.twin()
            else:
                frozen = copy.deepcopy(self.network).requires_grad_(False)
            self.frozen_copies.append(Reference(frozen.eval()))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make `forward` score with the reference: another model, the base without its adapter, or the frozen copy.

        Raises:
            RuntimeError: when there is none of them.
        """
        if self.lora is not None and not self.frozen_copies:
            with self.model.disable_adapter():  # pyright: ignore
                yield
            return
        if not self.frozen_copies:
            raise RuntimeError("There is no reference policy: call keep_reference() after configure().")
        self.frozen_copies[0].to(next(self.network.parameters()).device)
        self._scoring_with_reference = True
        try:
            yield
        finally:
            self._scoring_with_reference = False

    # -------------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        batch: RolloutBatch,
        temperature: float = 1.0,
        entropy: bool = False,
        entropy_gradient: bool = False,
        routes: bool = False,
        divergence: bool = False,
    ) -> TokenScores:
        """Return fp32 log-probs "b t" of the completion tokens, exactly 0 where the mask is False.

        Only the hidden states that predict a completion token meet the output embedding. Where the batch says which
        experts its tokens took, they take them again, weighed by the policy's own routers; where it says among which
        ids they were drawn, the distribution is the one over those.

        Args:
            batch: the sequences.
            temperature: positive; the log-probs are those of the distribution at it.
            entropy: also return the entropy of each position, over the words that a token could be.
            entropy_gradient: let gradients through it; else it is detached.
            routes: also return which experts the routers chose themselves.
            divergence: also return KL(policy‖reference) over the vocabulary of each position, with gradient.
        """
        asked = batch, temperature, entropy, entropy_gradient, routes, divergence
        with batch_invariant(self.batch_invariant, self.product):
            return self._in_use(self._scores, *asked)

    def _in_use(self, function: Any, *arguments: Any) -> Any:
        """Return `function(network, …)` of the learner's network, or within `reference` of that one's."""
        if self._scoring_with_reference:
            return self.frozen_copies[0](function, *arguments)
        return function(self.network, *arguments)

    def _reference_states(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the reference's hidden states "m h" of the scored tokens, with its output head."""
        free = replace(batch, routed_experts=None, router_logprobs=None)  # its routers choose for themselves
        with torch.no_grad(), self.reference():
            return self._in_use(lambda network: (scored_hidden(network, free).states, output_head(network)))

    def _scores(self, network: Any, batch: RolloutBatch, temperature: float, *asked: bool) -> TokenScores:
        entropy, gradient, routes, divergence = asked
        hidden, scored, own, gates = scored_hidden(network, batch, routes, self.attention)
        completions = batch.tokens[:, -batch.mask.shape[1] :]
        head = output_head(network)
        logprobs, entropies = token_logprobs(
            hidden,
            tokens=completions if scored is None else completions[scored],
            temperature=temperature,
            kept=batch.kept if batch.kept is None or scored is None else batch.kept[scored],
            entropy=entropy,
            entropy_gradient=gradient,
            head_dtype=self.head_dtype,
            pick=self.pick,
            held=room_for_logits(hidden, head["weight"]) if self.holds_logits else 0,
            **head,
        )
        kl = None
        if divergence:
            states, reference_head = self._reference_states(batch)
            kl = vocabulary_kl(hidden.flatten(0, -2), head, states.flatten(0, -2), reference_head, temperature)
            kl = spread(kl.view(logprobs.shape), batch.mask, scored)
        return TokenScores(
            spread(logprobs, batch.mask, scored),
            None if entropies is None else spread(entropies, batch.mask, scored),
            own,
            gates,
            kl,
        )
