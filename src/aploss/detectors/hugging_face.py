"""Our losses, and calibrated scores, in an object detector of Hugging Face ``transformers``.

These models match queries with objects and compute a sum of terms in one function, ``model.loss_function``, which can
be set for each model. What is set here calls the model's own function and exchanges one thing while it runs: how the
criterion computes its classification term. Matching, box terms, splitting into layers, denoising queries and groups,
names and weights of the terms remain the library's. Nothing of ``transformers`` is imported here.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torchvision.ops import box_convert, generalized_box_iou_loss

from aploss.detectors.criterion import classification_loss, iou_of_pairs
from aploss.detectors.labels import NEGATIVE, AnchorLabels
from aploss.detectors.score_map import ScoreMap, ScoreThresholdWarning, fit_score_map
from aploss.detectors.swap_loss import check_loss, softmax_log_odds
from aploss.errors import ConfigError, RunError
from aploss.evaluation import Calibration
from aploss.losses.traits import traits_of

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
    layers, encoder output, denoising queries. Each term ranks all queries of the batch (of all groups of queries, where
    the model trains several), and those of all processes if the loss has a ``process_group``. Matched queries are the
    positives; a loss that wants to know their IoU or box loss gets that of the matched boxes. Models with a softmax are
    ranked by the log-odds of each class against all else, which order as their scores at inference do.

    Args:
        model: with any weights; see ``FAMILIES``. Inference, weights and files do not change, and neither does any
            other model.
        loss: one of our loss objects or any module of ``(scores, targets)``; ``None`` gives the model's own loss back.
        weights: of the terms, by name: ``class``, ``bbox``, ``giou`` and what else the model's configuration has a
            weight for (``fgl``, ``ddf``). Those not named stay the model's.

    Returns:
        The same model. Calling it again sets another loss.

    Raises:
        ConfigError: if the model, the loss or a weight is of another kind.
    """
    has_softmax = _has_softmax(model)
    own: Any = model
    current = own.loss_function
    original = current.original if isinstance(current, _SwappedLoss) else current
    if loss is None:
        if weights:
            raise ConfigError("weights go with a loss, got weights and no loss")
        set_calibration(model, None)
        own.__dict__.pop("_loss_function", None)
        if own.loss_function is not original:  # not that of its class but one of the user's
            own.loss_function = original
        return model
    check_loss(loss, model, has_background=has_softmax)
    _check_weights(weights or {}, own.config)
    set_calibration(model, None)  # which belongs to the loss before
    own.loss_function = _SwappedLoss(original, loss, has_softmax, dict(weights or {}))
    if not traits_of(loss).calibrated:
        warnings.warn(
            f"{type(loss).__name__} orders the scores of {type(model).__name__} but does not make "
            "them probabilities: post_process_object_detection(threshold=0.5) would drop correct detections. "
            "Use threshold=0 for AP; after training, calibrate(model, images, targets) makes scores mean precision.",
            ScoreThresholdWarning,
            stacklevel=3,
        )
    return model


def _has_softmax(model: nn.Module) -> bool:
    loss_type = getattr(model, "loss_type", None)
    if loss_type not in HAS_SOFTMAX:
        raise ConfigError(f"these detectors of transformers are known: {FAMILIES}; got {type(model).__name__}")
    return HAS_SOFTMAX[loss_type]


def _check_weights(weights: Mapping[str, float], config: object) -> None:
    for name, value in weights.items():
        if name != "class" and not _weight_attributes(name, config):
            known = [one for one in ("bbox", "giou", "fgl", "ddf") if _weight_attributes(one, config)]
            raise ConfigError(
                f"{type(config).__name__} has no weight for {name!r}; weights can be: {', '.join(['class', *known])}"
            )
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a number >= 0, got {value!r}")


def _weight_attributes(name: str, config: object) -> list[str]:
    """The attributes of a model's configuration that hold the weight of a term."""
    known = (f"weight_loss_{name}", f"{name}_loss_coefficient")
    return [key for key in (CLASS_WEIGHTS if name == "class" else known) if hasattr(config, key)]


@dataclass(eq=False)
class _SwappedLoss:
    """The loss function of one model: its own, with another classification term.

    No module, so that the model's parameters, buffers and files stay what they are.
    """

    original: Callable[..., Any]
    loss: nn.Module
    has_softmax: bool
    weights: dict[str, float]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SwappedLoss":
        """A copy, as of a moving average of weights, belongs to the same processes."""
        group = getattr(self.loss, "process_group", None)
        if group is not None:
            memo[id(group)] = group  # which cannot be copied
        return _SwappedLoss(self.original, copy.deepcopy(self.loss, memo), self.has_softmax, dict(self.weights))

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
                    terms = self._class_terms(outputs, _labels(outputs["logits"], targets, indices), count)
                    return {CLASS_TERMS[name]: terms.pop("class") * factor, **terms}
                terms = others(name, outputs, targets, indices, count)
                if traits_of(self.loss).positive_targets == "box_loss":
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

    def _class_terms(self, outputs: Mapping[str, Tensor], labels: AnchorLabels, num_boxes: float) -> dict[str, Tensor]:
        """The term ``class`` of one layer, and ``loss_giou`` if the loss brings a box loss."""
        scores = outputs["logits"]
        if self.has_softmax:
            scores = scores.roll(1, dims=-1)  # from "no object" last to background first
            scores = scores if traits_of(self.loss).softmax else softmax_log_odds(scores)

        def matched_boxes() -> Any:
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
        terms = {"class": parts.classification, "loss_giou": parts.localisation}
        return {name: term for name, term in terms.items() if term is not None}


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

    The library's loss functions make their criterion anew in each call and have no argument for it, so it is met at its
    call. It is the only module to be changed, and lives for that call.
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
    logits: Tensor, targets: Sequence[Mapping[str, Tensor]], matches: Sequence[tuple[Tensor, Tensor]]
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
    return AnchorLabels(classes=classes, images=torch.cat(images), anchors=torch.cat(queries), boxes=torch.cat(boxes))


def _corners(boxes: Tensor) -> Any:
    """From (centre, size) to corners, in at least float32."""
    return box_convert(boxes.float(), "cxcywh", "xyxy")


# Scores that mean something at inference


def calibrate_in_transformers(
    model: Model,
    images: Tensor | Sequence[Tensor] | None,
    targets: Sequence[Mapping[str, Tensor]] = (),
    *,
    iou: float = 0.5,
    keep_ap_at: float | None = None,
) -> Model:
    """Makes the scores of a trained ``transformers`` detector mean precision, in evaluation mode.

    ``outputs.logits`` become such that their sigmoid (or softmax) is the share of correct detections with such a score,
    so that ``post_process_object_detection(threshold=0.5)`` keeps what is more often right than wrong. The order of all
    detections, and with it AP, stays; so do weights and training.

    Args:
        model: trained.
        images: held-out images as the model takes them, ``pixel_values`` [N, 3, H, W] or a list of [3, H, W]; None
            takes a calibration away.
        targets: for each image ``class_labels`` [n] and ``boxes`` [n, 4], centre and size relative to the image, as for
            training.
        iou: overlap from which a detection is correct.
        keep_ap_at: a threshold of post-processing that must not cost AP. All detections that AP needs get scores above
            it, which then are more than their precision. Without it thresholds mean precision, and AP is measured with
            ``threshold=0``.

    Raises:
        ConfigError: if the model is of another kind, or ``keep_ap_at`` no score.
        DataError: if there is no object in the images, or not one target per image.
    """
    set_calibration(model, None)
    if images is None:
        return model
    was_training = model.training
    model.eval()
    try:
        detections = [_detections(model, image) for image in images]
    finally:
        model.train(was_training)
    objects = [{"boxes": _corners(target["boxes"]), "labels": target["class_labels"]} for target in targets]
    score_map = fit_score_map(detections, objects, iou=iou, keep_ap_at=keep_ap_at)
    model.register_forward_hook(_CalibratedLogits(score_map, _has_softmax(model)))
    return model


def calibration_of(model: nn.Module) -> Calibration | None:
    """The calibration of a model's scores, to keep in a file beside the model's, if it has one."""
    for hook in model._forward_hooks.values():
        if isinstance(hook, _CalibratedLogits):
            return Calibration(x=hook.score_map.x.cpu().numpy(), y=hook.score_map.y.cpu().numpy())
    return None


def set_calibration(model: nn.Module, calibration: Calibration | None) -> None:
    """Gives a model the calibration of an earlier one with the same weights, or takes its away."""
    has_softmax = _has_softmax(model)
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, _CalibratedLogits):
            del model._forward_hooks[key]
    if calibration is not None:
        model.register_forward_hook(_CalibratedLogits(ScoreMap(calibration), has_softmax))


@dataclass(eq=False)
class _CalibratedLogits:
    """A forward hook that maps the logits in evaluation mode; the loss has seen the raw ones."""

    score_map: ScoreMap
    has_softmax: bool

    def __call__(self, model: nn.Module, _inputs: Any, output: Any) -> Any:
        if model.training:
            return output
        if isinstance(output, tuple):  # (loss, loss_dict, logits, ...) or (logits, ...)
            place = 2 if isinstance(output[1], dict) else 0
            return (*output[:place], self.logits(output[place]), *output[place + 1 :])
        output["logits"] = self.logits(output["logits"])
        return output

    def logits(self, logits: Tensor) -> Tensor:
        """Calibrated logits in float64, since float32 would make some scores equal."""
        if logits.device.type == "mps":  # which has no float64
            return self.logits(logits.cpu()).float().to(logits.device)
        probabilities = self.score_map.to(logits.device)
        exact = logits.double()
        if not self.has_softmax:
            return torch.logit(probabilities(exact.sigmoid()))
        # A query's detection is its best class, which gets its probability. The other classes
        # share what remains without passing it, and "no object" has the rest.
        wanted = probabilities(exact.softmax(dim=-1)[..., :-1])
        best, place = wanted.max(dim=-1, keepdim=True)
        others = wanted.scatter(-1, place, 0.0)
        others = others * ((1 - best) / others.sum(dim=-1, keepdim=True)).clamp(max=0.999)
        classes = others.scatter(-1, place, best)
        return torch.cat([classes, 1 - classes.sum(dim=-1, keepdim=True)], dim=-1).log()


@torch.no_grad()
def _detections(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """What post-processing would make of an image without a threshold, in relative corners."""
    like = next(model.parameters())
    output = model(pixel_values=image[None].to(like), return_dict=True)
    logits, boxes = output.logits[0].double(), _corners(output.pred_boxes[0])
    if _has_softmax(model):  # the best class of each query
        scores, labels = logits.softmax(dim=-1)[:, :-1].max(dim=-1)
        return {"boxes": boxes, "scores": scores, "labels": labels}
    # the best pairs of query and class, as many as there are queries
    num_classes = logits.shape[-1]
    scores, places = logits.sigmoid().flatten().topk(len(logits))
    return {"boxes": boxes[places // num_classes], "scores": scores, "labels": places % num_classes}
