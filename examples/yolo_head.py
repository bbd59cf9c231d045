"""A ranking loss in a YOLO-style head: anchor-free, three levels, task-aligned assignment, soft targets.

Lines marked with "here" are all that differs from BCE on soft targets. ``python examples/yolo_head.py``: seconds.
"""

import torch
from torch import Tensor, nn
from torchvision.ops import box_iou, generalized_box_iou_loss

from aploss import IoUAPLoss

STRIDES, CLASSES, SIZE = (8, 16, 32), 3, 96
TOP_K, ALPHA, BETA = 10, 0.5, 6.0  # of the task-aligned assignment


class Head(nn.Module):
    """Per level logits [B, K, h, w] and distances to the sides of a box [B, 4, h, w], in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Conv2d(3, 32, 15, 8, 7), *(nn.Conv2d(32, 32, 3, 2, 1) for _ in STRIDES[1:])])
        self.heads = nn.ModuleList(nn.Conv2d(32, CLASSES + 4, 3, padding=1) for _ in STRIDES)

    def forward(self, features: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        logits, distances = [], []
        for body, head, stride in zip(self.body, self.heads, STRIDES, strict=True):
            features = body(features).relu()
            output = head(features)
            logits.append(output[:, :CLASSES])
            distances.append(nn.functional.softplus(output[:, CLASSES:]) * stride)
        return logits, distances


def flatten(levels: list[Tensor]) -> Tensor:
    """Per-level lists [B, C, h, w] as one tensor [B, A, C], so that all levels are ranked together."""
    return torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1)


@torch.no_grad()
def assign(logits: Tensor, boxes: Tensor, points: Tensor, objects: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Task-aligned assignment of one image: targets [A, K], and the object of each point [A], -1 for none."""
    overlaps = box_iou(objects, boxes)  # [n, A]
    inside = ((points > objects[:, None, :2]) & (points < objects[:, None, 2:])).all(dim=2)
    alignment = logits.sigmoid().T[classes] ** ALPHA * overlaps**BETA * inside
    chosen = torch.zeros_like(inside).scatter(1, alignment.topk(TOP_K).indices, True) & inside
    quality, owner = (overlaps * chosen).max(dim=0)
    owner[~chosen.any(dim=0)] = -1
    targets, positive = torch.zeros_like(logits), (owner >= 0).nonzero().squeeze(1)
    targets[positive, classes[owner[positive]]] = quality[positive].clamp(min=1e-6)  # here: the IoU, in (0, 1]
    return targets, owner


torch.manual_seed(0)
objects = torch.tensor([[[8.0, 8, 40, 40], [50, 44, 84, 84]], [[40, 4, 90, 50], [6, 56, 30, 80]]])
classes, images = torch.tensor([[0, 1], [2, 0]]), torch.zeros(2, 3, SIZE, SIZE)
for image, rows, labels in zip(images, objects.int().tolist(), classes.tolist(), strict=True):
    for (left, top, right, bottom), label in zip(rows, labels, strict=True):
        image[label, top:bottom, left:right] = 1.0  # a square, coloured by class
grids = [(torch.arange(SIZE // stride) + 0.5) * stride for stride in STRIDES]
points = torch.cat([torch.cartesian_prod(grid, grid).flip(1) for grid in grids])  # centres of the cells [A, 2]
head, loss = Head(), IoUAPLoss()  # here: in place of BCE
optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
for step in range(81):
    logits, distances = map(flatten, head(images))
    boxes = torch.cat([points - distances[..., :2], points + distances[..., 2:]], dim=2)  # [B, A, 4]
    pairs = [assign(*row[:2], points, *row[2:]) for row in zip(logits, boxes, objects, classes, strict=True)]
    targets, owners = (torch.stack(column) for column in zip(*pairs, strict=True))
    classification = loss(logits, targets)  # here: ranks all scores [B, A, K] of the batch
    image_of, point_of = (owners >= 0).nonzero(as_tuple=True)
    matched = objects[image_of, owners[image_of, point_of]]
    box = generalized_box_iou_loss(boxes[image_of, point_of], matched, reduction="mean")
    optimizer.zero_grad()
    (classification + 2 * box).backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2}  loss {classification.item():.3f}  box {box.item():.3f}")
