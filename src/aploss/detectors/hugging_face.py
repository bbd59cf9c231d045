"""Our losses, and calibrated scores, in an object detector of Hugging Face ``transformers``.

These models match queries with objects and compute a sum of terms in one function,
``model.loss_function``, which can be set for each model. What is set here calls the model's own
function and exchanges one thing while it runs: how the criterion computes its classification term.
Matching, box terms, splitting into layers, denoising queries and groups, names and weights of the
terms remain the library's. Nothing of ``transformers`` is imported here.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torchvision.ops import box_convert, generalized_box_iou_loss

from aploss.detectors.criterion import classification_loss, iou_of_pairs
from aploss.detectors.ranking_labels import NEGATIVE, AnchorLabels
from aploss.detectors.swap_loss import ScoreThresholdWarning, softmax_log_odds
from aploss.errors import ConfigError, DataError, RunError
from aploss.evaluation import Calibration, calibrate_detections
from aploss.losses.traits import traits_of

__all__ = [
    "calibrate_in_transformers",
    "calibration_of",
    "is_transformers_model",
    "set_calibration",
    "use_loss_in_transformers",
]

Model = TypeVar("Model", bound=nn.Module)

# `loss_type` of the models that are known, and whether their classes share a softmax with the
# "no object" class, which is then the last column.
HAS_SOFTMAX = {
    "ForObjectDetection": True,  # DETR, YOLOS, Table Transformer
    "ConditionalDetrForObjectDetection": False,
    "DabDetrForObjectDetection": False,
    "DeformableDetrForObjectDetection": False,
    "RTDetrForObjectDetection": False,
    "RTDetrV2ForObjectDetection": False,
    "DFineForObjectDetection": False,
    "Deimv2ForObjectDetection": False,
    "LwDetrForObjectDetection": False,
    "RfDetrForObjectDetection": False,
}
FAMILIES = (
    "RT-DETR, RT-DETR v2, D-FINE, DEIMv2, LW-DETR, RF-DETR, Deformable, Conditional and DAB-DETR, "
    "DETR, YOLOS and Table Transformer"
)
# What a criterion calls its classification term, and under which name it returns the value.
CLASS_TERMS = {"labels": "loss_ce", "vfl": "loss_vfl", "mal": "loss_mal"}
CLASS_WEIGHTS = ("weight_loss_vfl", "weight_loss_mal", "class_loss_coefficient")


def is_transformers_model(model: object) -> bool:
    """Whether a model is of the ``transformers`` library, or of a subclass of one that is."""
    return any(
        kind.__module__.partition(".")[0] == "transformers" and kind.__name__ == "PreTrainedModel"
        for kind in type(model).__mro__
    )


def use_loss_in_transformers(
    model: Model, loss: nn.Module | None, *, weights: Mapping[str, float] | None = None
) -> Model:
    """Trains a ``transformers`` detector with another classification loss from now on.

    The loss replaces the classification term wherever the model has one: last layer, auxiliary
    layers, encoder output, denoising queries. Each term ranks all queries of the batch (of all
    groups of queries, where the model trains several), and those of all processes if the loss has
    a ``process_group``. Matched queries are the positives; a loss that wants to know their IoU or
    box loss gets that of the matched boxes. Models with a softmax are ranked by the log-odds of
    each class against all else, which order as their scores at inference do.

    Args:
        model: with any weights; see ``FAMILIES``. Inference, weights and files do not change, and
            neither does any other model.
        loss: one of our loss objects or any module of ``(scores, targets)``; ``None`` gives the
            model's own loss back.
        weights: of the terms, by name: ``class``, ``bbox``, ``giou`` and what else the model's
            configuration has a weight for (``fgl``, ``ddf``). Those not named stay the model's.

    Returns:
        The same model. Calling it again sets another loss.

    Raises:
        ConfigError: if the model, the loss or a weight is of another kind.
    """
    own: Any = model
    if _loss_type(model) not in HAS_SOFTMAX:
        raise ConfigError(
            f"use_loss knows these detectors of transformers: {FAMILIES}; "
            f"got {type(model).__name__}"
        )
    current = own.loss_function
    original = current.original if isinstance(current, _SwappedLoss) else current
    if loss is None:
        if weights:
            raise ConfigError("weights go with a loss, got weights and no loss")
        _give_back(own, original)
        return model
    has_softmax = HAS_SOFTMAX[_loss_type(model)]
    _check_loss(loss, model, has_softmax)
    _check_weights(weights or {}, own.config)
    own.loss_function = _SwappedLoss(original, loss, has_softmax, dict(weights or {}))
    if not traits_of(loss).calibrated and calibration_of(model) is None:
        warnings.warn(
            f"{type(loss).__name__} orders the scores of {type(model).__name__} but does not make "
            "them probabilities: post_process_object_detection(threshold=0.5) would drop correct "
            "detections. Use threshold=0, or calibrate(model, images, targets) after training.",
            ScoreThresholdWarning,
            stacklevel=3,
        )
    return model


def _loss_type(model: object) -> str:
    return str(getattr(model, "loss_type", None))


def _give_back(model: Any, original: Callable[..., Any]) -> None:
    """Sets the loss function that the model had before, by default that of its class."""
    model.__dict__.pop("_loss_function", None)
    if model.loss_function is not original:  # one of the user's
        model.loss_function = original


def _check_loss(loss: object, model: nn.Module, has_softmax: bool) -> None:
    if not isinstance(loss, nn.Module):
        shown = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise ConfigError(f"use_loss takes a loss object such as APLoss(), or None; got {shown}")
    if traits_of(loss).softmax and not has_softmax:
        raise ConfigError(
            f"{type(loss).__name__} needs a background column, which {type(model).__name__} lacks"
        )


def _check_weights(weights: Mapping[str, float], config: object) -> None:
    for name, value in weights.items():
        if name != "class" and not _weight_attributes(name, config):
            raise ConfigError(
                f"{type(config).__name__} has no weight for {name!r}; "
                f"weights can be: {', '.join(_weight_names(config))}"
            )
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a number >= 0, got {value!r}")


def _weight_attributes(name: str, config: object) -> list[str]:
    """The attributes of a model's configuration that hold the weight of a term."""
    known = (f"weight_loss_{name}", f"{name}_loss_coefficient")
    return [key for key in (CLASS_WEIGHTS if name == "class" else known) if hasattr(config, key)]


def _weight_names(config: object) -> list[str]:
    names = ("bbox", "giou", "fgl", "ddf")
    return ["class", *(name for name in names if _weight_attributes(name, config))]


class _SwappedLoss:
    """The loss function of one model: its own, with another classification term.

    No module, so that the model's parameters, buffers and files stay what they are.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        loss: nn.Module,
        has_softmax: bool,
        weights: dict[str, float],
    ) -> None:
        self.original = original
        self.loss = loss
        self.has_softmax = has_softmax
        self.weights = weights

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SwappedLoss":
        """A copy, as of a moving average of weights, belongs to the same processes."""
        group = getattr(self.loss, "process_group", None)
        if group is not None:
            memo[id(group)] = group  # which cannot be copied
        return _SwappedLoss(
            self.original, copy.deepcopy(self.loss, memo), self.has_softmax, dict(self.weights)
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the matching needs SciPy anyway
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the model's own loss function returns: the sum, all terms, auxiliary outputs."""
        factor = 1.0  # of the classification term, where the library has no weight for it
        if self.weights:
            call = inspect.signature(self.original).bind(*arguments, **options)
            config = call.arguments["config"]
            call.arguments["config"] = _OtherWeights(config, self.weights)
            arguments, options = call.args, call.kwargs
            if not _weight_attributes("class", config):
                factor = self.weights.get("class", 1.0)
        seen: list[str] = []

        def exchange(criterion: Any) -> None:
            others = criterion.get_loss

            def get_loss(name: str, outputs: Any, targets: Any, indices: Any, count: Any) -> Any:
                if name in CLASS_TERMS:
                    seen.append(name)
                    terms = self._class_terms(
                        outputs, _labels(outputs["logits"], targets, indices), count
                    )
                    return {CLASS_TERMS[name]: terms.pop("class") * factor, **terms}
                terms = others(name, outputs, targets, indices, count)
                if traits_of(self.loss).positives_need == "box_loss":
                    terms.pop("loss_giou", None)  # the loss has its own, returned above
                return terms

            criterion.get_loss = get_loss

        with _first_criterion(exchange):
            result = self.original(*arguments, **options)
        if not seen:
            raise RunError(
                f"the loss function {getattr(self.original, '__name__', self.original)} computes "
                "its classification term in a way that use_loss does not know, so it cannot be "
                "replaced; use_loss(model, None) gives the model's own loss back"
            )
        return result

    def _class_terms(
        self, outputs: Mapping[str, Tensor], labels: AnchorLabels, num_boxes: float
    ) -> dict[str, Tensor]:
        """The term ``class`` of one layer, and ``loss_giou`` if the loss brings a box loss."""
        scores = outputs["logits"]
        if self.has_softmax:
            scores = scores.roll(1, dims=-1)  # from "no object" last to background first
            scores = scores if traits_of(self.loss).softmax else softmax_log_odds(scores)

        def matched_boxes() -> Tensor:
            return _corners(outputs["pred_boxes"][labels.images, labels.anchors])

        parts = classification_loss(
            self.loss,
            scores,
            labels,
            box_losses=lambda: generalized_box_iou_loss(matched_boxes(), _corners(labels.boxes)),
            ious=lambda: iou_of_pairs(matched_boxes().detach(), _corners(labels.boxes)),
            # The library divides by all objects, in each of the processes and groups of queries.
            num_positives=num_boxes,
        )
        box_term = {} if parts.localisation is None else {"loss_giou": parts.localisation}
        return {"class": parts.classification, **box_term}


class _OtherWeights:
    """A model's configuration with other weights of the terms."""

    def __init__(self, config: object, weights: Mapping[str, float]) -> None:
        self.__dict__["_config"] = config
        for name, value in weights.items():
            self.__dict__.update(dict.fromkeys(_weight_attributes(name, config), value))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


@contextmanager
def _first_criterion(prepare: Callable[[nn.Module], None]) -> Iterator[None]:
    """Hands over the first criterion that this thread calls, before it runs.

    The library's loss functions make their criterion anew in each call and have no argument for
    it, so it is met at its call. It is the only module to be changed, and lives for that call.
    """
    thread = get_ident()
    found: list[nn.Module] = []

    def hook(module: nn.Module, _inputs: Any) -> None:
        if not found and get_ident() == thread and hasattr(module, "get_loss"):
            found.append(module)
            prepare(module)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        for criterion in found:
            criterion.__dict__.pop("get_loss", None)  # which refers to the criterion


def _labels(
    logits: Tensor,
    targets: Sequence[Mapping[str, Tensor]],
    matches: Sequence[tuple[Tensor, Tensor]],
) -> AnchorLabels:
    """Labels of the queries [B, A], from the queries and objects that were matched per image."""
    classes = torch.full(logits.shape[:2], NEGATIVE, device=logits.device)
    images, queries, boxes = [], [], []
    for image, (target, (query, place)) in enumerate(zip(targets, matches, strict=True)):
        query, order = query.to(logits.device).sort()
        place = place.to(logits.device)[order]
        classes[image, query] = target["class_labels"][place]
        images.append(torch.full_like(query, image))
        queries.append(query)
        boxes.append(target["boxes"][place])
    return AnchorLabels(
        classes=classes,
        images=torch.cat(images),
        anchors=torch.cat(queries),
        boxes=torch.cat(boxes),
    )


def _corners(boxes: Tensor) -> Tensor:
    """From (centre, size) to corners, in at least float32."""
    corners: Tensor = box_convert(boxes.float(), "cxcywh", "xyxy")
    return corners


# Scores that mean something at inference


def calibrate_in_transformers(
    model: Model,
    images: Tensor | Sequence[Tensor],
    targets: Sequence[Mapping[str, Tensor]],
    *,
    iou: float = 0.5,
) -> Model:
    """Makes the scores of a trained ``transformers`` detector precisions, in evaluation mode.

    ``outputs.logits`` become such that their sigmoid (or softmax) is the share of correct
    detections with such a score, so that ``post_process_object_detection(threshold=0.5)`` keeps
    what is more often right than wrong. The order of all detections, and with it AP, stays; so do
    weights and training. :func:`set_calibration` with ``None`` takes it back.

    Args:
        model: trained.
        images: held-out images as the model takes them, ``pixel_values`` [N, 3, H, W] or a list of
            [3, H, W].
        targets: for each image ``class_labels`` [n] and ``boxes`` [n, 4], centre and size relative
            to the image, as for training.
        iou: overlap from which a detection is correct.

    Raises:
        DataError: if there are not as many targets as images, or no objects at all.
    """
    if len(images) != len(targets):
        raise DataError(f"{len(images)} images have {len(targets)} targets")
    if not sum(len(target["class_labels"]) for target in targets):
        raise DataError("calibrate needs images with objects, got none")
    set_calibration(model, None)
    detections: list[dict[str, Any]] = []
    was_training = model.training
    model.eval()
    try:
        for image_id, image in enumerate(images):
            detections += _detections(model, image, image_id)
    finally:
        model.train(was_training)
    truth = _coco_dict(images, targets, num_classes=int(model.config.num_labels))  # type: ignore[union-attr, arg-type]
    calibration, _ = calibrate_detections(truth, detections, iou=iou)
    set_calibration(model, calibration)
    return model


def calibration_of(model: nn.Module) -> Calibration | None:
    """The calibration of a model's scores, to keep in a file beside the model's, if it has one."""
    for hook in model._forward_hooks.values():
        if isinstance(hook, _CalibratedLogits):
            return hook.calibration
    return None


def set_calibration(model: nn.Module, calibration: Calibration | None) -> None:
    """Gives a model the calibration of an earlier one with the same weights, or takes its away."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, _CalibratedLogits):
            del model._forward_hooks[key]
    if calibration is not None:
        has_softmax = HAS_SOFTMAX[_loss_type(model)]
        model.register_forward_hook(_CalibratedLogits(calibration, has_softmax))


class _CalibratedLogits:
    """Maps the logits of a model's output, in evaluation mode; the loss has seen the others."""

    def __init__(self, calibration: Calibration, has_softmax: bool) -> None:
        self.calibration = calibration
        self.has_softmax = has_softmax

    def __call__(self, model: nn.Module, _inputs: Any, output: Any) -> Any:
        if model.training:
            return output
        if isinstance(output, tuple):  # (loss, loss_dict, logits, ...) or (logits, ...)
            place = 2 if isinstance(output[1], dict) else 0
            return (*output[:place], self.logits(output[place]), *output[place + 1 :])
        output["logits"] = self.logits(output["logits"])
        return output

    def logits(self, logits: Tensor) -> Tensor:
        """Calibrated logits; in float64 where there is one, since float32 would make some equal."""
        exact = logits.float() if logits.device.type == "mps" else logits.double()
        if not self.has_softmax:
            return torch.logit(self._probabilities(exact.sigmoid()))
        # A query's detection is its best class, which gets its probability. The other classes
        # share what remains without passing it, and "no object" has the rest.
        wanted = self._probabilities(exact.softmax(dim=-1)[..., :-1])
        best, place = wanted.max(dim=-1, keepdim=True)
        others = wanted.scatter(-1, place, 0.0)
        others = others * ((1 - best) / others.sum(dim=-1, keepdim=True)).clamp(max=0.999)
        classes = others.scatter(-1, place, best)
        return torch.cat([classes, 1 - classes.sum(dim=-1, keepdim=True)], dim=-1).log()

    def _probabilities(self, scores: Tensor) -> Tensor:
        """The calibration's straight lines between its knots, on the device of the scores."""
        x, y = (torch.as_tensor(k).to(scores) for k in (self.calibration.x, self.calibration.y))
        right = torch.searchsorted(x, scores.contiguous()).clamp(1, len(x) - 1)
        share = (scores - x[right - 1]) / (x[right] - x[right - 1])
        return torch.lerp(y[right - 1], y[right], share)


@torch.no_grad()
def _detections(model: nn.Module, image: Tensor, image_id: int) -> list[dict[str, Any]]:
    """COCO's dicts of the detections that post-processing would make, without a threshold."""
    like = next(model.parameters())
    output = model(pixel_values=image[None].to(like), return_dict=True)
    logits, boxes = output.logits[0].double(), output.pred_boxes[0].double()
    if HAS_SOFTMAX[_loss_type(model)]:  # the best class of each query
        scores, classes = logits.softmax(dim=-1)[:, :-1].max(dim=-1)
    else:  # the best pairs of query and class, as many as there are queries
        count = logits.shape[-1]
        scores, places = logits.sigmoid().flatten().topk(len(logits))
        boxes, classes = boxes[places // count], places % count
    return [
        {"image_id": image_id, "category_id": category, "score": score, "bbox": box}
        for category, score, box in zip(
            classes.tolist(), scores.tolist(), _coco_boxes(boxes, image), strict=True
        )
    ]


def _coco_boxes(boxes: Tensor, image: Tensor) -> list[list[float]]:
    """Pixels (left, top, width, height) from relative (centre, size)."""
    height, width = image.shape[-2:]
    corner_and_size = box_convert(boxes.double(), "cxcywh", "xywh")
    scaled: list[list[float]] = (
        corner_and_size * corner_and_size.new_tensor([width, height, width, height])
    ).tolist()
    return scaled


def _coco_dict(
    images: Tensor | Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]], num_classes: int
) -> dict[str, Any]:
    annotations: list[dict[str, Any]] = []
    for image_id, (image, target) in enumerate(zip(images, targets, strict=True)):
        rows = zip(
            target["class_labels"].tolist(), _coco_boxes(target["boxes"], image), strict=True
        )
        for category, box in rows:
            annotations.append({
                "id": len(annotations) + 1, "image_id": image_id, "category_id": category,
                "bbox": box, "area": box[2] * box[3], "iscrowd": 0,
            })  # fmt: skip
    return {
        "images": [
            {"id": index, "height": int(image.shape[-2]), "width": int(image.shape[-1])}
            for index, image in enumerate(images)
        ],
        "annotations": annotations,
        "categories": [{"id": index, "name": str(index)} for index in range(num_classes)],
    }
