"""One positive among a hundred: AP-loss, cross-entropy, focal loss and LibAUC (if installed), tuned alike.

Every loss has the same network, optimizer, data, steps and learning rates, of which validation chooses; the area under
the precision-recall curve is of test data. Every second batch of 64 has no positive to rank, one of 1024 has ten.
"""

from importlib.util import find_spec
from statistics import mean, pstdev

import torch
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score as area
from torch import Tensor, nn

from aploss import APLoss, FocalLoss

BATCH_SIZES, RATES, SEEDS, STEPS, SAMPLES = (64, 1024), (1e-3, 3e-3, 1e-2), range(2), 100, 6000


class LibAUC(nn.Module):
    """Refuses batches without a positive, and keeps averages of each sample, so it is told which these are."""

    def __init__(self) -> None:
        from libauc.losses import APLoss as LibAUCLoss

        super().__init__()
        self.loss = LibAUCLoss(data_len=SAMPLES, device="cpu")

    def forward(self, scores: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
        return self.loss(scores.sigmoid(), targets, chosen) if targets.any() else scores.sum() * 0


def train(loss: nn.Module, data: tuple[Tensor, Tensor], *, batch_size: int, rate: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        chosen = torch.randint(SAMPLES, (batch_size,))
        batch = (model(data[0][chosen]), data[1][chosen], chosen)
        loss(*(batch if isinstance(loss, LibAUC) else batch[:2])).backward()
        optimizer.step()
    return model.requires_grad_(False)


losses = {"cross-entropy": nn.BCEWithLogitsLoss, "focal loss": FocalLoss, "AP-loss": APLoss, "LibAUC": LibAUC}
features, labels = make_classification(
    3 * SAMPLES, n_informative=6, n_clusters_per_class=4, weights=[0.99], flip_y=0.0, class_sep=1.5, random_state=0
)
tensors = torch.tensor(features, dtype=torch.float32), torch.tensor(labels).float()
training, validation, test = zip(*(tensor.split(SAMPLES) for tensor in tensors), strict=True)
for batch_size in BATCH_SIZES:
    for name in [one for one in losses if one != "LibAUC" or find_spec("libauc")]:
        areas = []
        for seed in SEEDS:
            models = [train(losses[name](), training, batch_size=batch_size, rate=rate, seed=seed) for rate in RATES]
            best = max(models, key=lambda model: area(validation[1], model(validation[0])))
            areas.append(area(test[1], best(test[0])))
        print(f"batch {batch_size:>4}, {name:<13} area {mean(areas):.3f} +- {pstdev(areas):.3f}")
