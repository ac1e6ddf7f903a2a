"""A decoder that draws during training and whose embedding changes after the plan has drawn; the
fixture `package` copies this file to where an experiment is found by its name."""

import torch
from torch.utils.data import TensorDataset

from measure.observations import ObservationRecorder
from measure.probes import ProbeRecorder
from nanolm_c4.model import RULES, Decoder
from param_groups import Everett, plan
from training.experiment import Experiment
from training.settings import ObservedLoopConfig, RunConfig
from training.task import Task


class Config(RunConfig):
    width: int = 16
    data_seed: int = 2
    vocabulary: int = 20
    training: ObservedLoopConfig


class Dropping(Decoder):
    def forward(self, ids, targets=None):
        if self.training:
            ids = torch.where(torch.rand(ids.shape) < 0.3, 0, ids)
        return super().forward(ids, targets)


def rows(seed):
    ids = torch.randint(0, 20, (30, 7), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


@torch.no_grad()
def pad(model):
    model.token_embedding.weight[0] = 0


def build_task(config):
    width = config.width
    sizes = {"vocab_size": config.vocabulary, "context": 6, "layers": 2, "heads": 4}
    model = Dropping(**sizes, head_dim=width // 4, mlp_ratio=1, attention_scale=0.5)
    numbers = plan(model, RULES, Everett("mup", width, 8), lr=config.optimizer.lr)
    return Task(
        config=config,
        model=model,
        plan=numbers,
        train_data=rows(1),
        eval_data=rows(config.data_seed),
        loss=lambda model, batch: model(*batch),
        count=lambda batch: torch.tensor(batch[1].numel()),
        forward=lambda model, batch: model(batch[0]),
        after_init=pad,
        recorders=[ObservationRecorder(), ProbeRecorder()],
    )


class Observed(Experiment):
    flops = staticmethod(lambda config: 1.0)


UNUSED = dict.fromkeys(["build_plan", "products", "tokens_per_step"])
EXPERIMENT = Observed(
    name="observed", description="", config=Config, build_task=build_task, result=str, **UNUSED
)
run = EXPERIMENT.run
