"""Ranking losses for object detection, and the losses the paper compares them with."""

from .alrp_loss import ALRP, ALRPLoss, alrp_loss
from .ap_loss import APLoss, ap_loss
from .auc_loss import AUCLoss, auc_loss
from .autograd import error_driven
from .checks import InvalidTargetError, NonFiniteScoresError, OtherProcessError
from .focal_loss import FocalLoss, focal_loss
from .hinge_ap_loss import HingeAPLoss, hinge_ap_loss
from .iou_ap_loss import IoUAPLoss, iou_ap_loss
from .iou_losses import (
    IoUAwareBCELoss,
    MatchabilityAwareLoss,
    QualityFocalLoss,
    VarifocalLoss,
    iou_aware_bce_loss,
    matchability_aware_loss,
    quality_focal_loss,
    varifocal_loss,
)
from .ohem_cross_entropy import OHEMCrossEntropy, ohem_cross_entropy
from .rank_sort_loss import RankSort, RankSortLoss, rank_sort_loss
from .ranking.engine import use_backend
from .smooth_ap_loss import SmoothAPLoss, smooth_ap_loss
from .traits import LossTraits, register_loss, traits_of

__all__ = [
    "ALRP",
    "ALRPLoss",
    "APLoss",
    "AUCLoss",
    "FocalLoss",
    "HingeAPLoss",
    "InvalidTargetError",
    "IoUAPLoss",
    "IoUAwareBCELoss",
    "LossTraits",
    "MatchabilityAwareLoss",
    "NonFiniteScoresError",
    "OHEMCrossEntropy",
    "OtherProcessError",
    "QualityFocalLoss",
    "RankSort",
    "RankSortLoss",
    "SmoothAPLoss",
    "VarifocalLoss",
    "alrp_loss",
    "ap_loss",
    "auc_loss",
    "error_driven",
    "focal_loss",
    "hinge_ap_loss",
    "iou_ap_loss",
    "iou_aware_bce_loss",
    "matchability_aware_loss",
    "ohem_cross_entropy",
    "quality_focal_loss",
    "rank_sort_loss",
    "register_loss",
    "smooth_ap_loss",
    "traits_of",
    "use_backend",
    "varifocal_loss",
]
