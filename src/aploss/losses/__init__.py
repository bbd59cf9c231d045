"""Ranking losses for object detection."""

from .ap_loss import APLoss, ap_loss
from .auc_loss import AUCLoss, auc_loss
from .input_checks import NonFiniteScoresError

__all__ = ["APLoss", "AUCLoss", "NonFiniteScoresError", "ap_loss", "auc_loss"]
