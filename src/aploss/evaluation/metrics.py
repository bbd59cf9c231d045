"""The numbers of one evaluation, as attributes, as a dict for JSON and as a table for people."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from aploss.data.annotations import Annotations

if TYPE_CHECKING:
    from aploss.evaluation.tables import DetectionTable

TABLE_COLUMNS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR")


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Average precision and recall. NaN where a value is not defined, such as ``APs`` where no small object counts.

    Attributes:
        metric: ``"coco"``, ``"voc07"`` or ``"voc12"``.
        iou: what ``AP`` was measured at: ``"0.50:0.95"``, or one IoU.
        images: images evaluated.
        objects: objects that count, so without crowds and difficult ones.
        detections: detections scored.
        AP: average precision, mean over the classes that have objects.
        AP50: at IoU 0.5.
        AP75: at IoU 0.75.
        APs: of objects below 32² pixels.
        APm: of objects between 32² and 96² pixels.
        APl: of objects above 96² pixels.
        AR: largest recall with all detections allowed per image, mean over IoUs and classes.
        AR1: the same with 1 detection per image and class.
        AR10: the same with 10.
        ARs: ``AR`` of small objects.
        ARm: of medium ones.
        ARl: of large ones.
        per_class: class name → the same values, and ``objects`` and ``detections``.

    Example:
        >>> metrics = Metrics(metric="voc12", iou="0.50", images=1, objects=2, detections=3, AP=0.5)
        >>> metrics.as_dict()["AP"], metrics.as_dict()["APs"]
        (0.5, None)
    """

    metric: str
    iou: str
    images: int
    objects: int
    detections: int
    AP: float = nan
    AP50: float = nan
    AP75: float = nan
    APs: float = nan
    APm: float = nan
    APl: float = nan
    AR: float = nan
    AR1: float = nan
    AR10: float = nan
    ARs: float = nan
    ARm: float = nan
    ARl: float = nan
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no NaN: ``None`` stands where a value is undefined."""
        return _without_nan(asdict(self))  # type: ignore[no-any-return]

    def table(self) -> str:
        """One row per class and one for the mean, with the columns that are defined anywhere."""
        rows: dict[str, dict[str, Any]] = {**self.per_class, "mean": vars(self)}
        columns = [name for name in TABLE_COLUMNS if any(not isnan(row.get(name, nan)) for row in rows.values())]
        width = max(len("class"), *map(len, rows))
        header = f"{'class':<{width}} {'objects':>8} {'detections':>10}"
        header += "".join(f" {name:>6}" for name in columns)
        lines = [header, "-" * len(header)]
        for name, row in rows.items():
            if name == "mean":
                lines.append(lines[1])
            line = f"{name:<{width}} {row['objects']:>8} {row['detections']:>10}"
            lines.append(line + "".join(f" {_shown(row.get(column, nan))}" for column in columns))
        return "\n".join(lines)


def make_metrics(
    truth: Annotations, table: "DetectionTable", of_class: Callable[[int], dict[str, float]], **values: Any
) -> Metrics:
    """The values with the counts that go with them; ``of_class`` gives those of the k-th class."""
    objects = objects_per_category(truth, truth.category_ids[truth.counted]).tolist()
    found = objects_per_category(truth, table.category_ids).tolist()
    return Metrics(
        images=len(truth.images),
        objects=sum(objects),
        detections=len(table),
        per_class={
            name: {"objects": objects[k], "detections": found[k], **of_class(k)}
            for k, name in enumerate(truth.categories.values())
        },
        **values,
    )


def mean_over_classes(values: Iterable[float]) -> float:
    """Mean of the values that are defined; NaN when none is."""
    defined = [value for value in values if not isnan(value)]
    return sum(defined) / len(defined) if defined else nan


def objects_per_category(truth: Annotations, category_ids: np.ndarray) -> np.ndarray:
    """How many of these objects or detections are of each category of the truth, int64 [K]."""
    places = np.searchsorted(list(truth.categories), category_ids)
    return np.bincount(places, minlength=len(truth.categories))


def _shown(value: float) -> str:
    return f"{'-':>6}" if isnan(value) else f"{value:>6.3f}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and isnan(value) else value
