"""Retrieval with ``groups``: each query ranks the others, and mean average precision is trained directly.

Scores are a matrix [queries, gallery] of cosine similarities; positive is what shows the same as the query. With
``groups=0`` each row is ranked alone: the loss is 1 - mean average precision over queries, one with many matches
counting no more than one with few. Cosines lie in [-1, 1], so delta, half the width of the step, is smaller than usual.
``python examples/retrieval.py``: seconds on a CPU.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from aploss import APLoss, ap_loss

digits = load_digits()
pictures, kinds = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = slice(0, None, 2), slice(1, None, 2)


def rank(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Similarities [N, N] and targets: 1 for the same kind, 0 for another, -1 for the query itself."""
    embeddings = F.normalize(embeddings, dim=1)
    targets = (labels[:, None] == labels).long().fill_diagonal_(-1)
    return embeddings @ embeddings.T, targets


@torch.no_grad()
def mean_average_precision(model: nn.Module) -> float:
    scores, targets = rank(model(pictures[test]), kinds[test])
    return 1 - float(ap_loss(scores, targets, groups=0, delta=0, interpolated=False))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
print(f"pixels    mean average precision {mean_average_precision(nn.Identity()):.3f}")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss = APLoss(delta=0.2)
for _ in range(40):
    batch = torch.randperm(len(pictures[train]))[:256]
    optimizer.zero_grad()
    scores, targets = rank(model(pictures[train][batch]), kinds[train][batch])
    loss(scores, targets, groups=0).backward()  # one ranking per query
    optimizer.step()
print(f"embedding mean average precision {mean_average_precision(model):.3f}")
