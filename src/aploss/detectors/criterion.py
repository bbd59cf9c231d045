"""The training loss of a detector: its classification loss by name, and with box regression as a named dict."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import generalized_box_iou_loss

from aploss.detectors.labels import AnchorLabels, Assigner, label_anchors
from aploss.errors import ConfigError, DataError, RunError, did_you_mean
from aploss.losses import NonFiniteScoresError, OtherProcessError
from aploss.losses.traits import LOSSES, LossTraits, traits_of

T = TypeVar("T")
CAUSES: tuple[Literal["score", "target", "arguments"], ...] = ("score", "target", "arguments")
NO_WEIGHT = 1e-12  # a divisor for sums without any positive, which are 0
DIMENSION = {"image": 0, "class": 2}  # of logits [B, A, K], whose entries are ranked alone
LEAST_IOU = 1e-6  # a positive must keep a target above 0, or it would count as negative
CUSTOM = "custom"  # the name of a loss object that is not registered
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
LOSS_NAMES: tuple[str, ...]  # with those of plugins, so it is looked up anew each time


def __getattr__(name: str) -> Any:
    if name == "LOSS_NAMES":
        return LOSSES.names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _LossOfTheUser(nn.Module):
    """Stands where a detector was saved with a loss object of the user's own."""

    def __init__(self, softmax: bool = False) -> None:  # on which the number of logits depends
        super().__init__()
        self.traits = LossTraits(softmax=softmax)

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        raise RunError(
            "this detector was trained with a loss object of your own: to train it further, "
            "set detector.criterion.loss to that object"
        )


def make_loss(name: str, **options: Any) -> nn.Module:
    """The loss of a name.

    Args:
        name: one of ``LOSS_NAMES``.
        options: the keyword arguments of its class, such as ``delta`` for ``"ap"``.

    Raises:
        ConfigError: if there is no such loss or it has no such option.

    Example:
        >>> make_loss("ap", delta=0.5).delta
        0.5
    """
    loss_class = _LossOfTheUser if name == CUSTOM else LOSSES.get(name)
    allowed = _option_names(loss_class)
    for option in options:
        if option not in allowed:
            known = f"it has: {', '.join(allowed) or 'none'}{did_you_mean(option, allowed)}"
            raise ConfigError(f"loss {name!r} has no option {option!r}; {known}")
    try:
        return loss_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss {name!r}: {error}") from error


def describe_loss(loss: nn.Module) -> tuple[str, dict[str, Any]]:
    """The name and options that :func:`make_loss` would make this loss from.

    Options are the arguments of its constructor that it keeps as attributes and that are plain values; what belongs to
    the running process is none. A loss object that is not registered is called ``"custom"``.
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
    """Classification loss, and the box loss where the classification loss brings its own."""

    classification: Tensor
    localisation: Tensor | None = None


def classification_loss(
    loss: Callable[..., Any],
    logits: Tensor,
    labels: AnchorLabels,
    *,
    box_losses: Callable[[], Tensor],
    ious: Callable[[], Tensor],
    num_positives: float | Tensor | None = None,
    groups: int | None = None,
) -> LossParts:
    """Hands a batch to a loss in the way that its traits ask for.

    Args:
        loss: one of ours, or any callable of ``(scores, targets)`` with targets 1, 0 and -1.
        logits: [B, A, K], or [B, A, K + 1] with the background in column 0 for softmax losses.
        labels: of the B·A anchors.
        box_losses: gives one loss per positive [P]; called if the loss needs them.
        ious: gives one IoU of predicted and true box per positive [P]; called if needed.
        num_positives: what losses that divide by the number of positives are to divide by, where
            it is not their own number.
        groups: dimension of the logits whose entries are ranked alone, for losses with ``groups``.
    """
    traits = traits_of(loss)
    options: dict[str, Any] = {} if groups is None else {"groups": groups}
    if traits.divides_by_positives and num_positives is not None:
        options["num_positives"] = num_positives
    if traits.softmax:
        return LossParts(loss(logits, labels.softmax_targets(), **options))
    targets = labels.ranking_targets(logits.shape[-1])
    if traits.positive_targets == "box_loss":
        return LossParts(*loss(logits, targets, box_losses(), **options))
    if traits.positive_targets == "iou":
        targets = targets.to(torch.float32)
        overlaps = ious().detach().clamp(min=LEAST_IOU).float()
        targets[labels.images, labels.anchors, labels.positive_classes] = overlaps
    values = loss(logits, targets, **options)
    return LossParts(torch.stack(values).sum() if isinstance(values, tuple) else values)


class Criterion(nn.Module):
    """Labels the anchors and computes ``{"classification": ..., "box": ...}``.

    Where ``box_loss`` and ``box_weight`` are left open, they are those of the loss's traits: for most losses smooth-L1
    with weight 1, the mean over the positives of the batch; for Rank & Sort and aLRP GIoU, ``"balanced"``.

    Args:
        loss: the classification loss.
        num_classes: K.
        box_coder: torchvision's; its weights divide the regression targets.
        rank_over: ``"batch"`` ranks the scores of all images and classes together (Section 3.4,
            against score shift); ``"image"`` and ``"class"`` rank each image or class alone and
            average over those that have positives (Section 3.1.1 argues against ``"class"``).
        box_loss: ``"smooth-l1"`` or ``"giou"``.
        box_weight: a factor, or ``"balanced"``: the factor that makes the value of the box loss that of the
            classification loss, anew in each step; where a loss brings its own box loss (aLRP), that of both together.
        smooth_l1_beta: where smooth-L1 turns from square to linear.
        positive_iou: least overlap of a positive anchor.
        negative_iou: least overlap of an ignored anchor.
        assigner: ``"iou"`` takes these two, ``"atss"`` finds the positives by
            :func:`~aploss.detectors.labels.match_anchors_atss`.
    """

    def __init__(
        self,
        *,
        loss: nn.Module,
        num_classes: int,
        box_coder: BoxCoder,
        rank_over: Literal["batch", "image", "class"] = "batch",
        box_loss: Literal["smooth-l1", "giou"] | None = None,
        box_weight: float | Literal["balanced"] | None = None,
        smooth_l1_beta: float = 1 / 9,
        positive_iou: float = 0.5,
        negative_iou: float = 0.4,
        assigner: Assigner = "iou",
    ) -> None:
        super().__init__()
        traits = traits_of(loss)
        self.loss = loss
        self.num_classes = num_classes
        self.box_coder = box_coder
        self.rank_over = rank_over
        self.box_loss = traits.box_loss if box_loss is None else box_loss
        self.box_weight = traits.box_weight if box_weight is None else box_weight
        self.smooth_l1_beta = smooth_l1_beta
        self.positive_iou = positive_iou
        self.negative_iou = negative_iou
        self.assigner = assigner
        self.process_group: dist.ProcessGroup | None = None
        self._check_options()

    def set_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Makes the loss that of the global batch of all processes of a group.

        Ranking losses rank the scores of all processes together (each image alone with ``rank_over="image"``), and
        sums are divided by the positives of all. After DDP's averaging, the weights get the
        gradient that one process with the whole batch would give them. When one process refuses
        its scores or targets, the others raise :class:`~aploss.losses.OtherProcessError`.
        """
        self.process_group = process_group
        if self._loss_ranks_across:
            self.loss.process_group = process_group  # type: ignore[assignment]

    @property
    def _loss_ranks_across(self) -> bool:
        """Whether the loss itself exchanges scores with the other processes, and its errors."""
        return self.rank_over != "image" and traits_of(self.loss).ranks_across_processes

    def __deepcopy__(self, memo: dict[int, Any]) -> "Criterion":
        """A copy, as of a moving average of weights, belongs to the same processes."""
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group  # which cannot be copied
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def forward(
        self,
        logits: Tensor,
        deltas: Tensor,
        anchors: Tensor | Sequence[Tensor],
        targets: Sequence[Mapping[str, Tensor]],
    ) -> dict[str, Tensor]:
        """The losses of a batch.

        Args:
            logits: [B, A, K], or [B, A, K + 1] with the background in column 0 for softmax losses.
            deltas: [B, A, 4], box regressions.
            anchors: [A, 4] in pixels of the batch, or those of each level.
            targets: B dicts as of :func:`~aploss.detectors.label_anchors`.

        Returns:
            ``classification`` and ``box``, weighted so that their sum is what is minimised.

        Raises:
            DataError: if there are not as many targets as images, or a label is no class.
        """
        labels = self._in_all(logits.device, lambda: self._label(logits, anchors, targets))
        anchors = anchors if isinstance(anchors, Tensor) else torch.cat(list(anchors))
        box_losses = self._box_losses(deltas, anchors, labels)
        if self._loss_ranks_across:
            parts = self._classify(logits, deltas, anchors, labels, box_losses)
        else:
            parts = self._in_all(logits.device, lambda: self._classify(logits, deltas, anchors, labels, box_losses))
        if parts.localisation is not None:
            whole = parts.classification + parts.localisation
            box = self._weighted(parts.localisation, whole)
        else:
            weights = self._weights_of_boxes(logits, labels)
            total_weight = self._over_processes(weights.sum()).clamp(min=NO_WEIGHT)
            box = self._weighted((box_losses * weights).sum() / total_weight, parts.classification)
        return {"classification": parts.classification, "box": box}

    def _label(
        self, logits: Tensor, anchors: Tensor | Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]
    ) -> AnchorLabels:
        self._check_targets(logits, targets)
        return self.label(anchors, targets)

    def label(self, anchors: Tensor | Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]) -> AnchorLabels:
        """The labels of the anchors of a batch, see :func:`~aploss.detectors.label_anchors`."""
        return label_anchors(
            anchors, targets, positive_iou=self.positive_iou, negative_iou=self.negative_iou, assigner=self.assigner
        )

    def _classify(
        self, logits: Tensor, deltas: Tensor, anchors: Tensor, labels: AnchorLabels, box_losses: Tensor
    ) -> LossParts:
        takes_groups = traits_of(self.loss).groups
        groups = DIMENSION.get(self.rank_over) if takes_groups else None

        def ranked(logits: Tensor, deltas: Tensor, labels: AnchorLabels, box_losses: Tensor) -> LossParts:
            return classification_loss(
                self.loss,
                logits,
                labels,
                box_losses=lambda: box_losses,
                ious=lambda: iou_of_pairs(self._decode(deltas.detach(), anchors, labels), labels.boxes),
                num_positives=self._num_positives(labels),
                groups=groups,
            )

        if takes_groups or self.rank_over == "batch":
            return ranked(logits, deltas, labels, box_losses)
        of_images = [
            ranked(
                logits[index : index + 1],
                deltas[index : index + 1],
                labels.of_image(index),
                box_losses[labels.images == index],
            )
            for index in range(len(logits))
        ]
        classification = torch.stack([parts.classification for parts in of_images]).mean()
        localisation = [parts.localisation for parts in of_images if parts.localisation is not None]
        return LossParts(classification, torch.stack(localisation).mean() if localisation else None)

    def _num_positives(self, labels: AnchorLabels) -> Tensor | None:
        """The mean number of positives of a process; None where the loss counts its own."""
        divides = traits_of(self.loss).divides_by_positives
        if self.process_group is None or self.rank_over == "image" or not divides:
            return None
        positives = torch.tensor(float(len(labels.boxes)), device=labels.boxes.device)
        # at least 1 of all processes together, as without processes
        return self._over_processes(positives).clamp(min=1 / dist.get_world_size(self.process_group))

    def _box_losses(self, deltas: Tensor, anchors: Tensor, labels: AnchorLabels) -> Tensor:
        """One loss per positive, float32 [P]."""
        if self.box_loss == "giou":
            predicted = self._decode(deltas, anchors, labels)
            box_losses: Tensor = generalized_box_iou_loss(predicted, labels.boxes)
            return box_losses
        predicted = deltas[labels.images, labels.anchors].float()
        wanted = self.box_coder.encode_single(labels.boxes, anchors[labels.anchors])
        losses_of_sides = F.smooth_l1_loss(predicted, wanted, beta=self.smooth_l1_beta, reduction="none")
        return losses_of_sides.sum(dim=1)

    def _decode(self, deltas: Tensor, anchors: Tensor, labels: AnchorLabels) -> Tensor:
        chosen = deltas[labels.images, labels.anchors].float()
        boxes: Tensor = self.box_coder.decode_single(chosen, anchors[labels.anchors])
        return boxes

    def _weights_of_boxes(self, logits: Tensor, labels: AnchorLabels) -> Tensor:
        if traits_of(self.loss).weight_boxes_by_score:
            scores = logits[labels.images, labels.anchors, labels.positive_classes]
            return scores.detach().float().sigmoid()
        return logits.new_ones(len(labels.boxes), dtype=torch.float32)

    def _weighted(self, box: Tensor, wanted_value: Tensor) -> Tensor:
        if not isinstance(self.box_weight, str):
            return box * self.box_weight
        value = self._over_processes(box.detach()).clamp(min=NO_WEIGHT)
        return box * (wanted_value.detach() / value)

    def _over_processes(self, value: Tensor) -> Tensor:
        """The mean of a value over the processes that rank together."""
        if self.process_group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.process_group)
        return value / dist.get_world_size(self.process_group)

    def _in_all(self, device: torch.device, compute: Callable[[], T]) -> T:
        """Computes something that refuses bad input; when one process does, all processes raise.

        What comes next exchanges values between the processes: one that has left early would keep the others waiting.
        """
        if self.process_group is None:
            return compute()
        refused = torch.zeros(len(CAUSES), device=device)
        result, problem = None, None
        try:
            result = compute()
        except ValueError as error:
            problem = error
            refused[CAUSES.index(_cause(error))] = 1
        dist.all_reduce(refused, group=self.process_group)
        if problem is not None:
            raise problem
        for cause, processes in zip(CAUSES, refused.tolist(), strict=True):
            if processes:
                raise OtherProcessError(cause)
        return result  # type: ignore[return-value]  # nothing was raised here

    def _check_targets(self, logits: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> None:
        if len(targets) != len(logits):
            raise DataError(f"a batch of {len(logits)} images has {len(targets)} targets")
        for index, target in enumerate(targets):
            if len(target["labels"]) == 0:
                continue
            least, largest = (int(value) for value in target["labels"].aminmax())
            if least < 0 or largest >= self.num_classes:
                raise DataError(
                    f"labels of image {index} of the batch are {least} to {largest}, but the "
                    f"{self.num_classes} classes are counted from 0"
                )

    def _check_options(self) -> None:
        choices = {
            "rank_over": ("batch", "image", "class"),
            "box_loss": ("smooth-l1", "giou"),
            "assigner": ("iou", "atss"),
        }
        for option, allowed in choices.items():
            if (value := getattr(self, option)) not in allowed:
                raise ConfigError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")
        traits = traits_of(self.loss)
        if self.rank_over == "class" and not traits.groups:
            label = traits.label or type(self.loss).__name__
            raise ConfigError(f"{label} cannot rank each class alone: leave rank_over batch")
        weight = self.box_weight
        if weight != "balanced" and not (isinstance(weight, int | float) and weight >= 0):
            raise ConfigError(f"box_weight must be a number >= 0 or 'balanced', got {weight!r}")
        if not 0 < self.negative_iou <= self.positive_iou <= 1:
            raise ConfigError(
                f"negative_iou and positive_iou must be 0 < negative <= positive <= 1, "
                f"got {self.negative_iou} and {self.positive_iou}"
            )


def _cause(error: ValueError) -> Literal["score", "target", "arguments"]:
    if isinstance(error, NonFiniteScoresError):
        return "score"
    return "target" if isinstance(error, DataError) else "arguments"


def iou_of_pairs(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of the i-th box with the i-th other, [P]."""
    top_left = torch.maximum(boxes[:, :2], others[:, :2])
    bottom_right = torch.minimum(boxes[:, 2:], others[:, 2:])
    shared = (bottom_right - top_left).clamp(min=0).prod(dim=1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1) + (others[:, 2:] - others[:, :2]).prod(dim=1)
    return shared / (areas - shared)
