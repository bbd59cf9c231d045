"""AP-loss on the logits [B, A, K] of a detection head of your own.

What the loss needs: all logits of the batch in one tensor, and targets of that shape, 1 for the
class of a matched anchor, 0 elsewhere, -1 to leave an anchor out. Heads that work level by level
join their levels first, or each would be ranked alone. ``python examples/own_head.py``: seconds.
"""

import torch
from torch import Tensor, nn

from aploss import APLoss
from aploss.data import builtin_dataset
from aploss.detectors import label_anchors

SIZE, CLASSES, LEVELS = 128, 5, (16, 32)  # images of 128 pixels; anchors of these sizes


def halve(channels: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, out, 3, 2, 1), nn.BatchNorm2d(out), nn.ReLU())


class Head(nn.Module):
    """Scores of square anchors on two levels, one per cell."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(halve(3, 16), halve(16, 32), halve(32, 64))
        self.down = halve(64, 64)
        self.score = nn.Conv2d(64, CLASSES, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.stem(images)
        levels = [self.score(level).flatten(2).mT for level in (fine, self.down(fine))]
        return torch.cat(levels, dim=1)  # [B, A, K]


def make_anchors() -> Tensor:
    boxes = []  # [A, 4], in the order of the head's logits: level, row, column
    for size in LEVELS:
        y, x = torch.meshgrid([torch.arange(size / 4, SIZE, size / 2)] * 2, indexing="ij")
        boxes.append(torch.stack([x - size, y - size, x + size, y + size], dim=-1).view(-1, 4))
    return torch.cat(boxes)


torch.manual_seed(0)
dataset = builtin_dataset("train", counts=(16, 4, 4))
samples = [dataset[index] for index in range(16)]
images = torch.stack([image.as_subclass(Tensor) / 255 for image, _ in samples])
labels = label_anchors(make_anchors(), [target for _, target in samples])
targets = labels.ranking_targets(CLASSES)  # [B, A, K] of 1, 0 and -1
head = Head()
optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
for step in range(41):
    value = APLoss()(head(images), targets)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {value:.3f}")
