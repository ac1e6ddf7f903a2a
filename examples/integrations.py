"""A plan in other people's training code: `numbers = plan(model, ...)`, then one of these.

Every function is the whole integration. They take an initialised model; guard() raises when a
scheduler has changed the ratios between groups. tests/test_integrations.py runs them.
"""

import re

import torch

from param_groups import guard, schedule


def plain_torch(model, numbers, batches, loss_of):
    """A loop: warm-up and cosine as one factor on all rates."""
    optimizer = torch.optim.AdamW(numbers.groups(model))
    scheduler = schedule(optimizer, "cosine", warmup_steps=2, total_steps=len(batches), floor=0.1)
    guard(optimizer, numbers)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer


def hugging_face(model, numbers, arguments, data):
    """transformers.Trainer(optimizers=...); its own scheduler is made where None stands."""
    from transformers import Trainer

    optimizer = torch.optim.AdamW(numbers.groups(model))
    guard(optimizer, numbers)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    return optimizer


def hugging_face_later(model, numbers, arguments, data):
    """The same where the Trainer must have wrapped or sharded the model first."""
    from transformers import Trainer

    class Planned(Trainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW(numbers.groups(self.model))
                guard(self.optimizer, numbers)
            return self.optimizer

    trainer = Planned(model, arguments, train_dataset=data)
    trainer.train()
    return trainer.optimizer


def hugging_face_muon(model, numbers, arguments, data):
    """Muon and AdamW as the Trainer's one optimiser; TRL's trainers take the same."""
    from transformers import Trainer

    from param_groups.optim import MuonAdamW

    groups = numbers.groups(model, several=True)  # several: MuonAdamW tells its groups apart
    made = (MuonAdamW, {"params": groups})
    trainer = Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=made)
    trainer.train()
    return trainer.optimizer


def accelerated(model, numbers, accelerator, batches, loss_of):
    """accelerate: plan and initialise before `prepare`, which wraps model and optimiser."""
    optimizer = numbers.optimizers(model)  # of a plan for AdamW alone, that
    guard(optimizer, numbers)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def torchs_muon(model, numbers):
    """torch.optim.Muon and torch.optim.AdamW, which need one schedule each: names and numbers."""
    parameters, groups = dict(model.named_parameters()), {"adam": [], "muon": []}
    for group in numbers.exported():
        names = group["names"]
        numbers_of_group = {key: group[key] for key in group.keys() - {"names", "optimizer"}}
        chosen = {"params": [parameters[name] for name in names], **numbers_of_group}
        groups[group["optimizer"]].append(chosen)
    return torch.optim.Muon(groups["muon"]), torch.optim.AdamW(groups["adam"], betas=(0.9, 0.95))


def torchtitan(numbers):
    """Arguments of torchtitan's ParamGroupConfig, for OptimizersContainer.Config."""
    kinds = {"muon": "DistMuon", "adam": "AdamW"}  # by the names that your version has for them
    return [
        {
            "pattern": f"^({'|'.join(map(re.escape, group['names']))})$",
            "optimizer_name": kinds[group["optimizer"]],
            "optimizer_kwargs": {k: group[k] for k in group.keys() - {"names", "optimizer"}},
        }
        for group in numbers.exported()
    ]


def timm_optimizer(model, numbers):
    """timm's factory and schedule: floors of 0, since its own are absolute rates."""
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    optimizer = create_optimizer_v2(model, "adamw", lr=numbers.lr, param_group_fn=numbers.groups)
    scheduler = CosineLRScheduler(optimizer, t_initial=10, lr_min=0, warmup_t=2, warmup_lr_init=0)
    guard(optimizer, numbers)
    return optimizer, scheduler


def sharded(model, numbers, mesh):
    """FSDP2 and torch.compile: shard, initialise, take groups, and compile in place last."""
    from torch.distributed.fsdp import fully_shard

    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    numbers.initialise(model, seed=0)
    optimizer = torch.optim.AdamW(numbers.groups(model))
    model.compile()  # torch.compile(model) would rename the tensors
    return optimizer


def configure_optimizers(self):
    """A method of a LightningModule with `self.model` and `self.numbers`, for AdamW or Muon."""
    optimizer = self.numbers.optimizers(self.model, betas=(0.9, 0.999))
    steps = self.trainer.estimated_stepping_batches
    scheduler = schedule(optimizer, "cosine", total_steps=steps, warmup_steps=steps // 10)
    guard(optimizer, self.numbers)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
