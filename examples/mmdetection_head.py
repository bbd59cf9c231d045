"""AP-loss in a head of MMDetection 3: the levels of the pyramid are ranked together.

Most heads there (RetinaHead, ATSSHead) call ``loss_cls`` level by level, so that each level would be ranked alone. The
mix-in lets the head do all it does (anchors, targets, box loss), keeps what it hands to ``loss_cls`` and ranks it once.
Tried with mmdet 3.3.0 and a stand-in for the compiled operators of mmcv, which has no ready build for every torch; the
test is skipped where mmdet is missing.
In a config: ``custom_imports = dict(imports=["mmdetection_head"])``, ``bbox_head=dict(type="RankingRetinaHead", ...)``.
"""

from typing import Any

import torch
from mmdet.models.dense_heads import RetinaHead
from mmdet.registry import MODELS
from torch import Tensor, nn

from aploss import APLoss


class KeptScores(nn.Module):
    """Stands where a head calls its classification loss, and keeps what it is called with."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes, self.scores, self.targets = num_classes, [], []

    def forward(self, scores: Tensor, labels: Tensor, weights: Tensor, avg_factor: Any = None) -> Tensor:
        """Scores [n, K]; labels [n] with K for the background; weight 0 for anchors to leave out."""
        targets = nn.functional.one_hot(labels, self.num_classes + 1)[:, :-1]
        self.scores.append(scores)
        self.targets.append(torch.where(weights[:, None] > 0, targets, -1))
        return scores.sum() * 0


class RankLevels:
    """Mix-in for dense heads with sigmoid scores."""

    ranking_loss = APLoss()

    def loss_by_feat(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        own, self.loss_cls = self.loss_cls, (kept := KeptScores(self.num_classes))
        try:
            losses = super().loss_by_feat(*arguments, **options)
        finally:
            self.loss_cls = own
        return {**losses, "loss_cls": self.ranking_loss(torch.cat(kept.scores), torch.cat(kept.targets))}


@MODELS.register_module()
class RankingRetinaHead(RankLevels, RetinaHead):
    """RetinaNet's head; the same line makes one of ATSSHead."""
