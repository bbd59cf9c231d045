"""``use_loss`` and ``calibrate`` for object detectors of Hugging Face ``transformers``, without importing it.

These models compute all loss terms in one function, ``model.loss_function``, which can be set per model. The function
set here calls the model's own one and replaces how the criterion computes its classification term while it runs.
Matching, box terms, layers, denoising queries and groups of queries remain the library's, whatever its version.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torchvision.ops import box_convert

from aploss.detectors.criterion import classification_loss
from aploss.detectors.labels import NEGATIVE, AnchorLabels
from aploss.detectors.predict import evaluation_mode
from aploss.errors import ConfigError, RunError
from aploss.evaluation import Calibration
from aploss.integrations import shared
from aploss.losses.traits import traits_of

# The supported values of ``model.loss_type``. Classes of the first share a softmax with "no object", the last column.
FAMILIES = {
    "ForObjectDetection": "DETR, YOLOS, Table Transformer",
    "ConditionalDetrForObjectDetection": "Conditional DETR",
    "DabDetrForObjectDetection": "DAB-DETR",
    "DeformableDetrForObjectDetection": "Deformable DETR",
    "RTDetrForObjectDetection": "RT-DETR",
    "RTDetrV2ForObjectDetection": "RT-DETR v2",
    "DFineForObjectDetection": "D-FINE",
    "Deimv2ForObjectDetection": "DEIMv2",
    "LwDetrForObjectDetection": "LW-DETR",
    "RfDetrForObjectDetection": "RF-DETR",
}
CLASS_TERMS = {"labels": "loss_ce", "vfl": "loss_vfl", "mal": "loss_mal"}  # criterion's name -> key of its result
CLASS_WEIGHTS = ("weight_loss_vfl", "weight_loss_mal", "class_loss_coefficient")


def _has_softmax(model: Any) -> bool:
    return bool(model.loss_type == "ForObjectDetection")


def swap_loss(model: Any, loss: nn.Module | None, weights: Mapping[str, float]) -> None:
    """See :func:`aploss.integrations.use_loss`."""
    current = model.loss_function
    original = current.original if isinstance(current, _SwappedLoss) else current
    if loss is None:
        if weights:
            raise ConfigError("got weights of the loss terms without a loss")
        set_calibration(model, None)
        model.loss_function = original
        return
    shared.check_loss(loss, model, has_background=_has_softmax(model))
    swapped = _SwappedLoss(original, loss, _has_softmax(model), _config_values(weights, model.config))
    if not swapped.config_values.keys() & set(CLASS_WEIGHTS):
        swapped.class_factor = weights.get("class", 1.0)
    set_calibration(model, None)  # a calibration belongs to the previous loss
    model.loss_function = swapped
    if not traits_of(loss).calibrated:
        dropped = "detections with a score below the threshold of post_process_object_detection, by default 0.5"
        shared.warn_uncalibrated(loss, model, dropped, "measure AP with threshold=0")


def _config_values(weights: Mapping[str, float], config: object) -> dict[str, float]:
    """The attributes of a model's configuration that hold these weights of its terms, with their values."""
    values: dict[str, float] = {}
    for name, value in weights.items():
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a number >= 0, got {value!r}")
        keys = CLASS_WEIGHTS if name == "class" else (f"weight_loss_{name}", f"{name}_loss_coefficient")
        known = [key for key in keys if hasattr(config, key)]
        if name != "class" and not known:
            raise ConfigError(f"{type(config).__name__} has no weight for the term {name!r}")
        values |= dict.fromkeys(known, float(value))
    return values


@dataclass(eq=False)
class _SwappedLoss:
    """The loss function of one model: its original one with another classification term.

    Not a module, so that the model's parameters, buffers and files stay the same.
    """

    original: Callable[..., Any]
    loss: nn.Module
    has_softmax: bool
    config_values: dict[str, float]  # replace the model's weights of its terms
    class_factor: float = 1.0  # for configurations without a weight of the classification term

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SwappedLoss":
        """A copy has a loss of its own, and shares the original function."""
        return replace(self, loss=copy.deepcopy(self.loss, memo))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the matching needs SciPy anyway
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Returns what the original function returns: the sum, all terms, auxiliary outputs."""
        if self.config_values:
            call = inspect.signature(self.original).bind(*arguments, **options)
            config = call.arguments["config"] = copy.copy(call.arguments["config"])
            vars(config).update(self.config_values)  # without the library's check of types: weights may be int there
            arguments, options = call.args, call.kwargs
        replaced: list[str] = []
        thread = get_ident()

        def patch(module: Any, _inputs: Any) -> None:
            """The library creates its criterion in every call and takes no argument for it, hence a hook."""
            if get_ident() == thread and hasattr(module, "get_loss") and "get_loss" not in vars(module):
                module.get_loss = partial(self._terms, replaced, module.get_loss)

        handle = register_module_forward_pre_hook(patch)
        try:
            result = self.original(*arguments, **options)
        finally:
            handle.remove()
        if not replaced:
            raise RunError(
                f"cannot replace the classification term of {getattr(self.original, '__name__', self.original)}: this "
                "version of transformers computes it in an unknown way; use_loss(model, None) restores the model's loss"
            )
        return result

    def _terms(
        self, replaced: list[str], get_own_loss: Any, name: str, outputs: Any, targets: Any, indices: Any, count: Any
    ) -> dict[str, Tensor]:
        """Replaces ``get_loss`` of a criterion, which computes some terms of one layer; notes which it replaced."""
        traits = traits_of(self.loss)
        if name not in CLASS_TERMS:
            terms: dict[str, Tensor] = get_own_loss(name, outputs, targets, indices, count)
            if traits.positive_targets == "box_loss":
                terms.pop("loss_giou", None)  # replaced by the loss's own localisation term
            return terms
        replaced.append(name)
        scores, labels = outputs["logits"], _labels(outputs["logits"], targets, indices)
        if self.has_softmax:
            scores = scores.roll(1, dims=-1)  # from "no object" last to background first
            scores = scores if traits.softmax else shared.softmax_log_odds(scores)
        parts = classification_loss(
            self.loss,
            scores,
            labels,
            boxes=lambda: _corners(outputs["pred_boxes"][labels.images, labels.anchors]),
            num_positives=count,  # the library counts the objects of all processes and groups of queries
        )
        giou = {} if parts.localisation is None else {"loss_giou": parts.localisation}
        return {CLASS_TERMS[name]: parts.classification * self.class_factor, **giou}


def _labels(
    logits: Tensor, targets: Sequence[Mapping[str, Tensor]], matches: Sequence[tuple[Tensor, Tensor]]
) -> AnchorLabels:
    """Labels of the queries [B, A] from the matched pairs of query and object of each image."""
    matched = torch.full(logits.shape[:2], NEGATIVE, device=logits.device)
    for row, (queries, objects) in zip(matched, matches, strict=True):
        row[queries.to(logits.device)] = objects.to(logits.device)
    boxes = [_corners(target["boxes"]) for target in targets]
    return shared.labels_from_matches(matched, [target["class_labels"] for target in targets], boxes)


def _corners(boxes: Tensor) -> Any:
    """From (centre, size) to corners, in float32."""
    return box_convert(boxes.float(), "cxcywh", "xyxy")


def calibrate(
    model: Any, images: Sequence[Tensor] | None, targets: Sequence[Mapping[str, Tensor]], *, iou: float
) -> None:
    """See :func:`aploss.integrations.calibrate`."""
    set_calibration(model, None)
    if images is None:
        return
    with evaluation_mode(model):
        detections = [_detections(model, image) for image in images]
    objects = [{"boxes": _corners(target["boxes"]), "labels": target["class_labels"]} for target in targets]
    set_calibration(model, shared.fit_precision(detections, objects, iou=iou))


def calibration_of(model: nn.Module) -> Calibration | None:
    """The calibration that :func:`calibrate` fitted, to save beside the files of a ``transformers`` model.

    Args:
        model: any model that :func:`calibrate` supports.

    Returns:
        The calibration, a map from scores [n] to precision [n], or None if the model has none.

    Example:
        >>> calibration_of(nn.Linear(2, 2)) is None
        True
    """
    hook = shared.find_hook(model)
    return None if hook is None else hook.calibration


def set_calibration(model: nn.Module, calibration: Calibration | None) -> None:
    """Sets the calibration of a ``transformers`` model that was calibrated with the same weights.

    Args:
        model: the model, such as one loaded from its files; changed in place.
        calibration: a map from scores to precision, such as ``Calibration.from_dict(...)``; None removes it.

    Example:
        >>> model = nn.Linear(2, 2)  # in place of a detector
        >>> set_calibration(model, Calibration(x=[0, 0.2, 1], y=[0, 0.9, 1]))
        >>> calibration_of(model)([0.2]).tolist()
        [0.9]
    """
    shared.find_hook(model, remove=True)
    if calibration is not None:
        model.register_forward_hook(_CalibratedLogits(calibration))


class _CalibratedLogits(shared.CalibrationHook):
    """Maps the logits after the loss was computed from the raw ones."""

    def __call__(self, model: nn.Module, _inputs: Any, output: Any) -> Any:
        if model.training:
            return output
        if isinstance(output, tuple):  # (loss, loss_dict, logits, ...) or (logits, ...)
            place = 2 if isinstance(output[1], dict) else 0
            return (*output[:place], self.logits(model, output[place]), *output[place + 1 :])
        output["logits"] = self.logits(model, output["logits"])
        return output

    def logits(self, model: nn.Module, logits: Tensor) -> Tensor:
        """Calibrated logits in float64: in float32 some distinct scores would become equal."""
        if logits.device.type == "mps":  # has no float64
            return self.logits(model, logits.cpu()).float().to(logits.device)
        if not _has_softmax(model):
            return torch.logit(self.calibrated(logits.double().sigmoid()))
        # The detection of a query is its best class, which gets its calibrated probability. The other classes share
        # the rest without exceeding it, and "no object" gets what remains.
        wanted = self.calibrated(logits.double().softmax(dim=-1)[..., :-1])
        best, place = wanted.max(dim=-1, keepdim=True)
        others = wanted.scatter(-1, place, 0.0)
        others = others * ((1 - best) / others.sum(dim=-1, keepdim=True)).clamp(max=0.999)
        classes = others.scatter(-1, place, best)
        return torch.cat([classes, 1 - classes.sum(dim=-1, keepdim=True)], dim=-1).log()


def _detections(model: Any, image: Tensor) -> dict[str, Tensor]:
    """The result of post-processing an image without a threshold, in relative corners."""
    like = next(model.parameters())
    output = model(pixel_values=image[None].to(like), return_dict=True)
    logits, boxes = output.logits[0].double(), _corners(output.pred_boxes[0])
    if _has_softmax(model):  # the best class of each query
        scores, labels = logits.softmax(dim=-1)[:, :-1].max(dim=-1)
        return {"boxes": boxes, "scores": scores, "labels": labels}
    # as many pairs of query and class as there are queries
    num_classes = logits.shape[-1]
    scores, places = logits.sigmoid().flatten().topk(len(logits))
    return {"boxes": boxes[places // num_classes], "scores": scores, "labels": places % num_classes}
