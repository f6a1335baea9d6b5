"""A training loop with the hooks of the real one and no model to speak of."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lit_qrl.loop.hooks import rl_callbacks
from lit_qrl.loop.state import IterationState
from lit_qrl.run.loggers import RunCSVLogger
from tests.networks import rollout_of

GROUPS, GROUP_SIZE, PROMPT, COMPLETION = 3, 4, 3, 4


class Policy(torch.nn.Module):
    dropout = False

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def decode(self, token_ids):
        return " ".join(str(i) for i in token_ids)


def rollout(version):
    """Row r has prompt tokens 100 r + 1, … and completion tokens 100 r + 51, …; one column of padding on the left."""
    b = GROUPS * GROUP_SIZE
    tokens = torch.zeros(b, 1 + PROMPT + COMPLETION, dtype=torch.long)
    rows = torch.arange(b)[:, None]
    tokens[:, 1 : 1 + PROMPT] = 100 * rows + 1 + torch.arange(PROMPT)
    tokens[:, 1 + PROMPT :] = 100 * rows + 51 + torch.arange(COMPLETION)
    mask = torch.arange(COMPLETION) < (1 + rows % COMPLETION)
    rewards = torch.arange(b).float()
    return rollout_of(
        mask,
        tokens=tokens,
        prompt_length=torch.full((b,), PROMPT),
        rewards=rewards,
        group=torch.arange(b) // GROUP_SIZE,
        version=torch.full((b,), version),
        reward_parts={"half": rewards / 2, "correct": (rewards > 5).float()},
    )


class Rollouts(IterableDataset):
    def __init__(self, module):
        self.module = module

    def __len__(self):
        return 2

    def __iter__(self):
        trainer = self.module.trainer
        move = getattr(trainer.progress_bar_callback, "update_generation", None)
        if move is not None:
            for done in range(0, 13, 4):
                move("rollout", done, 12, 9 * done)
        for callback in rl_callbacks(trainer):
            callback.on_rollout_end(trainer, self.module, rollout(trainer.current_epoch))
        yield from (torch.ones(2), torch.ones(2))


class Module(LightningModule):
    def __init__(self, fail_at=None, error=None):
        super().__init__()
        self.policy = Policy()
        self.iteration = IterationState()
        self.fail_at, self.error = fail_at, error
        self.rolled_out = -1

    def on_train_start(self):
        if self.current_epoch == 0:
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def training_step(self, batch, batch_idx):
        self.rolled_out = self.current_epoch
        if self.current_epoch == self.fail_at and batch_idx == 1:
            raise self.error
        return self.policy.layer(batch).sum()

    def on_train_epoch_end(self):
        if self.rolled_out != self.current_epoch:
            return
        e = self.current_epoch
        self.log_dict({"reward/mean": e / 8, "mismatch/kl_k3": 0.001, "time/rollout": 0.5, "time/iteration": 1.0})

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.25 + self.current_epoch / 8, on_epoch=True, batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(Rollouts(self), batch_size=None)

    def val_dataloader(self):
        return DataLoader([torch.ones(2)], batch_size=None)


def trainer_of(folder, callbacks, iterations=3, **options):
    options = {"logger": RunCSVLogger(folder), "enable_checkpointing": False, "check_val_every_n_epoch": 2, **options}
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=iterations,
        callbacks=callbacks,
        log_every_n_steps=1,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
