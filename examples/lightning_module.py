"""AP-loss in a Lightning module, ranked over all processes of the trainer.

``pip install lightning``, then ``python examples/lightning_module.py``; seconds on a CPU. Ranking
losses want large batches: with several devices the scores of all of them are ranked together.
"""

import lightning as lit
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from aploss import APLoss


class Finder(lit.LightningModule):
    """Finds the eights among handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.loss = APLoss()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_fit_start(self) -> None:
        if dist.is_initialized():  # with one device there is nothing to join
            self.loss.process_group = dist.group.WORLD

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        features, targets = batch
        return self.loss(self.network(features).squeeze(1), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.seen.append((self.network(batch[0]).squeeze(1), batch[1]))

    def on_validation_epoch_end(self) -> None:
        scores, targets = (torch.cat(parts).cpu() for parts in zip(*self.seen, strict=True))
        self.seen.clear()
        self.log("average_precision", float(average_precision_score(targets, scores)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lit.seed_everything(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target == 8))
train, val = torch.utils.data.random_split(data, [0.7, 0.3])
trainer = lit.Trainer(
    max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
)  # fmt: skip
trainer.fit(Finder(), DataLoader(train, batch_size=256, shuffle=True), DataLoader(val, 256))
print(f"average precision {float(trainer.callback_metrics['average_precision']):.3f}")
