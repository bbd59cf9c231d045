"""AP-loss in a training loop of your own: rank rare positives above a hundred times more negatives.

Nothing here is about detection: any model that scores things will do. Run it with
``python examples/ap_loss_in_your_loop.py``; it takes seconds on a CPU.
"""

import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from aploss import APLoss


def make_data(seed: int, positives: int = 200, negatives: int = 20_000) -> tuple[Tensor, Tensor]:
    """Positives differ from negatives by the size of two of eight features, not by their sign."""
    torch.manual_seed(seed)
    features = torch.randn(positives + negatives, 8)
    features[:positives, :2] += 2.5 * features[:positives, :2].sign()
    targets = torch.zeros(len(features))
    targets[:positives] = 1
    return features, targets


def train(loss: nn.Module, steps: int = 200) -> float:
    """Trains a small network; gives its average precision on data it has not seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    features, targets = make_data(seed=1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(features).squeeze(1), targets).backward()
        optimizer.step()
    features, targets = make_data(seed=2)
    with torch.no_grad():
        return float(average_precision_score(targets, model(features).squeeze(1)))


for name, loss in (("cross-entropy", nn.BCEWithLogitsLoss()), ("AP-loss", APLoss())):
    print(f"{name:<14} average precision {train(loss):.3f}")
