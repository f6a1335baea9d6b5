"""A small policy under a real Trainer, for the plugins' tests."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_qrl.precision.base import QuantizedPrecision
from tests.networks import build_network

VOCABULARY, HIDDEN, LENGTH = 32, 64, 6


def network(seed=0, dtype=torch.float32):
    """Return the network as it is before training: rounded after it is drawn, in training mode."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    own = {"tie_word_embeddings": False, "pad_token_id": None, "eos_token_id": None}
    return build_network(seed=seed, gain=1, norm=0, **sizes, **heads, **own).to(dtype).train()


PARTS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
LINEARS = [f"model.layers.{i}.{part}" for i in range(2) for part in PARTS]


class Policy(nn.Module):
    dropout, head_dtype = False, None

    def __init__(self, seed=0, checkpointing=False, lora=None, dtype=torch.float32):
        super().__init__()
        self.seed, self.checkpointing, self.lora, self.dtype, self.model = seed, checkpointing, lora, dtype, None

    def configure(self):
        if self.model is not None:
            return
        model = network(self.seed, self.dtype)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.lora is not None:
            from peft import get_peft_model

            torch.manual_seed(self.seed + 1)
            model = get_peft_model(model, self.lora)
        self.model = model

    @property
    def network(self):
        return self.model.get_base_model() if self.lora is not None else self.model

    def named_weights(self):
        return ((name, tensor.detach()) for name, tensor in self.network.named_parameters())

    def forward(self, tokens):
        return self.network(input_ids=tokens, use_cache=False).logits


class Module(LightningModule):
    def __init__(self, policy, steps_lr=1e-3, optimizer=torch.optim.AdamW):
        super().__init__()
        self.policy, self.lr, self.optimizer = policy, steps_lr, optimizer
        self.losses = []

    def configure_model(self):
        self.policy.configure()
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, QuantizedPrecision):
            plugin.configure_policy(self.policy)

    def training_step(self, batch, _):
        (tokens,) = batch
        logits = self.policy(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def configured(plugin=None, **options):
    """Return a module whose policy is configured, and converted where a plugin is given, without a Trainer."""
    module = Module(Policy(**options))
    module.policy.configure()
    if plugin is not None:
        plugin.convert_module(module)
    return module


def batches(count=4, size=8):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (count * size, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=size, shuffle=False)


def trainer(tmp_path, plugin, epochs=1, **options):
    return Trainer(
        max_epochs=epochs, plugins=[plugin] if plugin else None, accelerator="cpu", logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=options.pop("enable_checkpointing", False), **options,
    )  # fmt: skip


def fit(tmp_path, plugin, module=None, **options):
    module = module or Module(Policy())
    run = trainer(tmp_path, plugin, **options)
    run.fit(module, batches())
    return module, run


def weights_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def resumed_equals_uninterrupted(tmp_path, make_plugin, make_module):
    """Fit four epochs at once, and two and two over a checkpoint; return both state dicts and both loss lists."""
    whole = make_module()
    trainer(tmp_path, make_plugin(), epochs=4).fit(whole, batches())
    first = make_module()
    run = trainer(tmp_path, make_plugin(), epochs=2)
    run.fit(first, batches())
    run.save_checkpoint(tmp_path / "half.ckpt")
    second = make_module()
    trainer(tmp_path, make_plugin(), epochs=4).fit(second, batches(), ckpt_path=tmp_path / "half.ckpt")
    return weights_of(whole), weights_of(second), whole.losses, first.losses + second.losses
