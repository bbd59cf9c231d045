"""One positive among a hundred: AP-loss, cross-entropy and focal loss, tuned alike.

Every loss gets the same network, data, steps and choice of learning rates; the rate is chosen on
validation data, the area under the precision-recall curve is that of test data, mean and standard
deviation over seeds of the training. A ranking needs something to rank: every second batch of 64
has no positive at all, one of 1024 has ten. ``python examples/imbalanced_classification.py``
"""

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from aploss import APLoss, FocalLoss

LOSSES = {"cross-entropy": nn.BCEWithLogitsLoss, "focal loss": FocalLoss, "AP-loss": APLoss}
BATCH_SIZES, RATES, SEEDS, STEPS = (64, 1024), (1e-3, 3e-3, 1e-2), range(3), 200
Split = tuple[Tensor, Tensor]


def make_data() -> list[Split]:
    """Training, validation and test data, 6000 samples each with 20 features."""
    features, targets = make_classification(
        n_samples=18_000, n_features=20, n_informative=6, n_clusters_per_class=4, weights=[0.99],
        flip_y=0.0, class_sep=1.5, random_state=0,
    )  # fmt: skip
    tensors = torch.tensor(features, dtype=torch.float32), torch.tensor(targets).float()
    return list(zip(*(tensor.split(6000) for tensor in tensors), strict=True))


def train(loss: nn.Module, data: Split, *, batch_size: int, rate: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(STEPS):
        chosen = torch.randint(len(data[0]), (batch_size,))
        optimizer.zero_grad()
        loss(model(data[0][chosen]), data[1][chosen]).backward()
        optimizer.step()
    return model


@torch.no_grad()
def area(model: nn.Module, data: Split) -> float:
    return float(average_precision_score(data[1], model(data[0])))


training, validation, test = make_data()
for batch_size in BATCH_SIZES:
    for name, make_loss in LOSSES.items():
        areas = []
        for seed in SEEDS:
            options = {"batch_size": batch_size, "seed": seed}
            models = [train(make_loss(), training, rate=rate, **options) for rate in RATES]
            areas.append(area(max(models, key=lambda model: area(model, validation)), test))
        print(f"batch {batch_size:>4}, {name:<13} area {np.mean(areas):.3f} +- {np.std(areas):.3f}")
