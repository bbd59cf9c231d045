"""Multi-label classification with ``groups``: each class ranks the samples for itself.

Mean average precision, as multi-label benchmarks measure it, is a mean over classes: a score is compared with scores of
the same class alone. ``groups=-1`` makes AP-loss do the same (the last dimension is the class). Rare labels count as
much as frequent ones. ``python examples/multi_label_classification.py``: seconds on a CPU.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from aploss import APLoss

digits = load_digits()
features = torch.tensor(digits.data / 16, dtype=torch.float32)
features += 0.4 * torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
number = torch.tensor(digits.target)
LABELS = {  # from every second sample to one in a hundred
    "even": number % 2 == 0, "prime": torch.isin(number, torch.tensor([2, 3, 5, 7])), "above 6": number > 6,
    "round": torch.isin(number, torch.tensor([0, 8])), "an eight": number == 8,
    "a rare nine": (number == 9) & (torch.arange(len(number)) % 20 < 2),
}  # fmt: skip
targets = torch.stack(list(LABELS.values()), dim=1)  # [N, K]
train, test = slice(0, None, 2), slice(1, None, 2)


class BCE(nn.BCEWithLogitsLoss):
    def forward(self, scores: Tensor, targets: Tensor, groups: int) -> Tensor:
        return super().forward(scores, targets.float())


def fit(loss: nn.Module) -> list[float]:
    """The average precision of each label on samples that were not trained on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(LABELS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(features[train]), targets[train], groups=-1).backward()  # one ranking per label
        optimizer.step()
    with torch.no_grad():
        scores = model(features[test])
    return average_precision_score(targets[test], scores, average=None).tolist()


for name, loss in (("cross-entropy", BCE()), ("AP-loss", APLoss())):
    found = fit(loss)
    each = ", ".join(f"{label} {value:.2f}" for label, value in zip(LABELS, found, strict=True))
    print(f"{name:<13} mean average precision {sum(found) / len(found):.3f} ({each})")
