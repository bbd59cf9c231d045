"""The training loss of a detector: a classification loss by name, combined with a box loss."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import generalized_box_iou_loss

from aploss.detectors.labels import AnchorLabels, Assigner, HardBoxes, label_anchors
from aploss.detectors.postprocess import BOX_CODER
from aploss.errors import ConfigError, DataError, RunError, did_you_mean
from aploss.losses import NonFiniteScoresError, OtherProcessError
from aploss.losses.traits import LOSSES, LossTraits, traits_of

T = TypeVar("T")
CAUSES: tuple[Any, ...] = ("", "arguments", "target", "score")  # by priority; other processes learn the highest
MIN_DIVISOR = 1e-12  # for sums over no positives, which are 0
GROUP_DIMENSION = {"batch": None, "image": 0, "class": 2}  # of logits [B, A, K]: each entry is ranked separately
MIN_IOU = 1e-6  # the target of a positive must be above 0, or it would count as negative
REMOVED_OPTIONS = ("max_positives",)  # files of earlier versions have them; they did not change the loss
CUSTOM = "custom"  # the name of a loss object that is not registered
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
RankOver = Literal["batch", "image", "class"]
BoxLoss = Literal["smooth-l1", "paper-smooth-l1", "giou"]


class _CustomLossPlaceholder(nn.Module):
    """Replaces the user's own loss object in a detector loaded from a file."""

    def __init__(self, softmax: bool = False) -> None:  # determines the number of logits
        super().__init__()
        self.traits = LossTraits(softmax=softmax)

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        raise RunError(
            "this detector was trained with a custom loss object, which its file does not contain: "
            "set detector.criterion.loss to train it further"
        )


def make_loss(name: str, **options: Any) -> nn.Module:
    """Returns a new loss by name.

    Args:
        name: one of ``LOSS_NAMES``.
        options: keyword arguments of its class, such as ``delta`` for ``"ap"``.

    Raises:
        ConfigError: if the loss or the option does not exist.

    Example:
        >>> make_loss("ap", delta=0.5).delta
        0.5
    """
    loss_class = _CustomLossPlaceholder if name == CUSTOM else LOSSES.get(name)
    allowed = _option_names(loss_class)
    options = {key: value for key, value in options.items() if key in allowed or key not in REMOVED_OPTIONS}
    check_options(f"loss {name!r}", options, allowed)
    try:
        return loss_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss {name!r}: {error}") from error


def check_options(owner: str, options: Iterable[str], allowed: Sequence[str]) -> None:
    """Raises ConfigError for the first option that its owner does not have."""
    for option in options:
        if option not in allowed:
            known = f"it has: {', '.join(allowed) or 'none'}{did_you_mean(option, allowed)}"
            raise ConfigError(f"{owner} has no option {option!r}; {known}")


def check_choice(option: str, value: object, allowed: Iterable[object]) -> None:
    """Raises ConfigError for a value that is not one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{option} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def describe_loss(loss: nn.Module) -> tuple[str, dict[str, Any]]:
    """The name and options from which :func:`make_loss` creates an equal loss.

    Options are the constructor's arguments that the loss keeps as attributes with plain values. A loss object that is
    not registered is called ``"custom"``.
    """
    for name, loss_class in LOSSES.items():
        if type(loss) is loss_class:
            values = {key: getattr(loss, key, ...) for key in _option_names(loss_class)}
            return name, {key: value for key, value in values.items() if isinstance(value, PLAIN)}
    return CUSTOM, {"softmax": True} if traits_of(loss).softmax else {}


def _option_names(loss_class: type) -> list[str]:
    parameters = inspect.signature(loss_class).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.kind in named and one.name != "process_group"]


class LossParts(NamedTuple):
    """Classification loss, and the localisation loss of losses that include one."""

    classification: Tensor
    localisation: Tensor | None = None


def classification_loss(
    loss: Callable[..., Any],
    logits: Tensor,
    labels: AnchorLabels,
    *,
    boxes: Callable[[], Tensor],
    box_losses: Tensor | None = None,
    num_positives: float | Tensor | None = None,
    groups: int | None = None,
) -> LossParts:
    """Calls a loss on a batch in the way that its traits request.

    Args:
        loss: a loss of this package, or any callable of ``(scores, targets)`` with float targets 1, 0 and -1.
        logits: [B, A, K], or [B, A, K + 1] with the background in column 0 for softmax losses.
        labels: of the B·A anchors.
        boxes: returns the predicted box of every positive [P, 4]; called only if the loss needs them.
        box_losses: the box loss of every positive [P] for losses that take it, by default GIoU.
        num_positives: divisor of losses that divide by the number of positives; by default they count their own.
        groups: dimension of the logits along which each entry is ranked separately, for losses with ``groups``.
    """
    traits = traits_of(loss)
    options: dict[str, Any] = {} if groups is None else {"groups": groups}
    if traits.divides_by_positives and num_positives is not None:
        options["num_positives"] = num_positives
    if traits.softmax:
        return LossParts(loss(logits, labels.softmax_targets(), **options))
    targets = labels.ranking_targets(logits.shape[-1])
    if not type(loss).__module__.startswith("aploss."):  # most functions of torch do not accept int8
        targets = targets.to(logits.dtype)
    if traits.positive_targets == "box_loss":
        box_losses = generalized_box_iou_loss(boxes(), labels.boxes) if box_losses is None else box_losses
        return LossParts(*loss(logits, targets, box_losses, **options))
    if traits.positive_targets == "iou":
        targets = targets.to(torch.float32)
        overlaps = iou_of_pairs(boxes().detach(), labels.boxes).clamp(min=MIN_IOU).float()
        targets[labels.images, labels.anchors, labels.positive_classes] = overlaps
    values = loss(logits, targets, **options)
    return LossParts(torch.stack(values).sum() if isinstance(values, tuple) else values)


class Criterion(nn.Module):
    """Labels the anchors of a batch and computes ``{"classification": ..., "box": ...}``.

    The traits of the loss provide the defaults of ``box_loss`` and ``box_weight``: for most losses smooth-L1 with
    weight 1, averaged over the positives of the batch; for Rank & Sort and aLRP GIoU with ``"balanced"``.

    Args:
        loss: the classification loss.
        num_classes: K.
        rank_over: ``"batch"`` ranks the scores of all images and classes together (Section 3.4, against score shift);
            ``"image"`` and ``"class"`` rank each image or class separately and average over those that have positives
            (Section 3.1.1 argues against ``"class"``), for ranking losses only.
        box_loss: ``"smooth-l1"`` adds up the four coordinates of a box, ``"paper-smooth-l1"`` is their mean with beta
            1, as in the code that the paper's authors released, and ``"giou"`` compares decoded boxes.
        box_weight: a factor, or ``"balanced"``: in each step, the factor by which the box loss reaches the value of the
            classification loss; for a loss with its own box loss (aLRP), the value of both together.
        smooth_l1_beta: where ``"smooth-l1"`` turns from quadratic to linear.
        positive_iou: minimum overlap of a positive anchor.
        negative_iou: minimum overlap of an ignored anchor.
        assigner: ``"iou"`` uses these two, ``"atss"`` finds the positives by
            :func:`~aploss.detectors.labels.match_anchors_atss`.
        hard_boxes: see :func:`~aploss.detectors.label_anchors`.

    Example:
        >>> criterion = Criterion(loss=make_loss("focal"), num_classes=2)
        >>> anchors = torch.tensor([[0.0, 0.0, 8.0, 8.0], [8.0, 8.0, 16.0, 16.0]])
        >>> target = {"boxes": anchors[:1], "labels": torch.tensor([1])}
        >>> criterion(torch.zeros(1, 2, 2), torch.zeros(1, 2, 4), anchors, [target])  # logits and deltas of one image
        {'classification': tensor(0.4332), 'box': tensor(0.)}
    """

    def __init__(
        self,
        *,
        loss: nn.Module,
        num_classes: int,
        rank_over: RankOver = "batch",
        box_loss: BoxLoss | None = None,
        box_weight: float | Literal["balanced"] | None = None,
        smooth_l1_beta: float = 1 / 9,
        positive_iou: float = 0.5,
        negative_iou: float = 0.4,
        assigner: Assigner = "iou",
        hard_boxes: HardBoxes = "ignore",
    ) -> None:
        super().__init__()
        traits = traits_of(loss)
        self.loss = loss
        self.num_classes = num_classes
        self.rank_over = rank_over
        self.box_loss = traits.box_loss if box_loss is None else box_loss
        self.box_weight = traits.box_weight if box_weight is None else box_weight
        self.smooth_l1_beta = smooth_l1_beta
        self.positive_iou = positive_iou
        self.negative_iou = negative_iou
        self.assigner = assigner
        self.hard_boxes = hard_boxes
        self.process_group: dist.ProcessGroup | None = None
        self._check_options()

    def set_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Computes the loss of the global batch of all processes of a group.

        Ranking losses rank the scores of all processes together (with ``rank_over="image"`` each image separately), and
        sums are divided by the positives of all. DDP's average of the gradients then equals the gradient of one process
        with the whole batch. If one process raises an error for its scores or targets, the others raise
        :class:`~aploss.losses.OtherProcessError`.
        """
        self.process_group = process_group
        if self.rank_over != "image" and traits_of(self.loss).ranks_across_processes:
            self.loss.process_group = process_group  # type: ignore[assignment]

    def forward(
        self,
        logits: Tensor,
        deltas: Tensor,
        anchors: Tensor | Sequence[Tensor],
        targets: Sequence[Mapping[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Computes the losses of a batch.

        Args:
            logits: [B, A, K], or [B, A, K + 1] with the background in column 0 for softmax losses.
            deltas: box regressions [B, A, 4].
            anchors: [A, 4] in pixels of the batch, or [A_l, 4] for each level.
            targets: B dicts, see :func:`~aploss.detectors.label_anchors`.

        Returns:
            ``classification`` and ``box``, weighted so that their sum is the training loss.

        Raises:
            DataError: if there is not one target per image, or a label is outside 0..K-1.
        """
        self._raise_on_all_ranks(logits.device, partial(self._check_targets, len(logits), targets))
        labels = self.label(anchors, targets)
        positive_anchors = (anchors if isinstance(anchors, Tensor) else torch.cat(list(anchors)))[labels.anchors]
        positive_deltas = deltas[labels.images, labels.anchors].float()  # [P, 4]
        decode = partial(BOX_CODER.decode_single, positive_deltas, positive_anchors)
        box_losses = self._box_losses(positive_deltas, positive_anchors, labels.boxes, decode)
        traits = traits_of(self.loss)
        classify = partial(
            classification_loss,
            self.loss,
            logits,
            labels,
            boxes=decode,
            box_losses=box_losses,
            num_positives=self._num_positives(labels) if traits.divides_by_positives else None,
            groups=GROUP_DIMENSION[self.rank_over],
        )
        loss_ranks_across = getattr(self.loss, "process_group", None) is not None  # and exchanges errors itself
        parts = classify() if loss_ranks_across else self._raise_on_all_ranks(logits.device, classify)
        if parts.localisation is not None:
            box = self._weighted(parts.localisation, parts.classification + parts.localisation)
        else:
            weights = torch.ones_like(box_losses)
            if traits.weight_boxes_by_score:
                weights = logits.detach()[labels.images, labels.anchors, labels.positive_classes].float().sigmoid()
            total_weight = self._all_reduce_mean(weights.sum()).clamp(min=MIN_DIVISOR)
            box = self._weighted((box_losses * weights).sum() / total_weight, parts.classification)
        return {"classification": parts.classification, "box": box}

    def label(self, anchors: Tensor | Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]) -> AnchorLabels:
        """The labels of the anchors of a batch, see :func:`~aploss.detectors.label_anchors`."""
        return label_anchors(
            anchors,
            targets,
            positive_iou=self.positive_iou,
            negative_iou=self.negative_iou,
            assigner=self.assigner,
            hard_boxes=self.hard_boxes,
        )

    def _num_positives(self, labels: AnchorLabels) -> Tensor | None:
        """The mean number of positives per process; None for a single process, where the loss counts its own."""
        if self.process_group is None:
            return None
        positives = torch.tensor(float(len(labels.boxes)), device=labels.boxes.device)
        # at least 1 in all processes together, as in a single process
        return self._all_reduce_mean(positives).clamp(min=1 / dist.get_world_size(self.process_group))

    def _box_losses(self, deltas: Tensor, anchors: Tensor, boxes: Tensor, decode: Callable[[], Tensor]) -> Tensor:
        """The loss of each positive, float32 [P], from its regression, anchor and ground truth box [P, 4]."""
        if self.box_loss == "giou":
            return generalized_box_iou_loss(decode(), boxes)  # type: ignore[no-any-return]
        wanted = BOX_CODER.encode_single(boxes, anchors)
        if self.box_loss == "paper-smooth-l1":
            return F.smooth_l1_loss(deltas, wanted, reduction="none").mean(dim=1)
        return F.smooth_l1_loss(deltas, wanted, beta=self.smooth_l1_beta, reduction="none").sum(dim=1)

    def _weighted(self, box: Tensor, balance_with: Tensor) -> Tensor:
        if not isinstance(self.box_weight, str):
            return box * self.box_weight
        value = self._all_reduce_mean(box.detach()).clamp(min=MIN_DIVISOR)
        return box * (balance_with.detach() / value)

    def _all_reduce_mean(self, value: Tensor) -> Tensor:
        if self.process_group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.process_group)
        return value / dist.get_world_size(self.process_group)

    def _raise_on_all_ranks(self, device: torch.device, compute: Callable[[], T]) -> T:
        """Computes a value; if that raises ValueError in one process, all processes raise.

        Collectives follow, in which the others would wait forever for a process that has left early.
        """
        if self.process_group is None:
            return compute()
        result, problem, cause = None, None, ""
        try:
            result = compute()
        except ValueError as error:
            kinds = {NonFiniteScoresError: "score", DataError: "target"}
            problem, cause = error, kinds.get(type(error), "arguments")
        index = torch.tensor(CAUSES.index(cause), device=device)
        dist.all_reduce(index, op=dist.ReduceOp.MAX, group=self.process_group)
        if problem is not None:
            raise problem
        if index:
            raise OtherProcessError(CAUSES[int(index)])
        return result  # type: ignore[return-value]  # nothing was raised here

    def _check_targets(self, batch_size: int, targets: Sequence[Mapping[str, Tensor]]) -> None:
        if len(targets) != batch_size:
            raise DataError(f"a batch of {batch_size} images has {len(targets)} targets")
        labels = torch.cat([target["labels"] for target in targets])
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            wrong = [bool(((one["labels"] < 0) | (one["labels"] >= self.num_classes)).any()) for one in targets]
            found = targets[index := wrong.index(True)]["labels"]
            got = f"{int(found.min())}..{int(found.max())}"
            raise DataError(f"labels of image {index} must be in 0..{self.num_classes - 1}, got {got}")

    def _check_options(self) -> None:
        literals = {"rank_over": RankOver, "box_loss": BoxLoss, "assigner": Assigner, "hard_boxes": HardBoxes}
        for option, literal in literals.items():
            check_choice(option, getattr(self, option), get_args(literal))
        traits = traits_of(self.loss)
        label = traits.label or type(self.loss).__name__
        if self.rank_over != "batch" and not (traits.groups and getattr(self.loss, "groups", None) is None):
            raise ConfigError(f"{label} cannot rank each {self.rank_over} separately: use rank_over='batch'")
        weight, low, high = self.box_weight, self.negative_iou, self.positive_iou
        if weight != "balanced" and not (isinstance(weight, int | float) and weight >= 0):
            raise ConfigError(f"box_weight must be a number >= 0 or 'balanced', got {weight!r}")
        if not 0 < low <= high <= 1:
            raise ConfigError(f"expected 0 < negative_iou <= positive_iou <= 1, got {low} and {high}")


def iou_of_pairs(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of the i-th box with the i-th other, [P]; torchvision's would wait for the device."""
    top_left = torch.maximum(boxes[:, :2], others[:, :2])
    bottom_right = torch.minimum(boxes[:, 2:], others[:, 2:])
    shared = (bottom_right - top_left).clamp(min=0).prod(dim=1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1) + (others[:, 2:] - others[:, :2]).prod(dim=1)
    return shared / (areas - shared)
