"""Ground truth and detections of a single image, written down box by box."""

from collections.abc import Collection, Sequence
from typing import Any

Box = Sequence[float]


def truth_of(*boxes: Box, **flags: Collection[int]) -> dict[str, Any]:
    """A COCO ground truth with these objects (x, y, width, height) of "cell", and a class "dust" without objects.

    Flags name the objects that have them: with ``difficult=[0]`` the first one is difficult.
    """
    objects = [
        {**_row(box), **{name: int(index in chosen) for name, chosen in flags.items()}}
        for index, box in enumerate(boxes)
    ]
    categories = [{"id": 1, "name": "cell"}, {"id": 2, "name": "dust"}]
    return {"images": [{"id": 1}], "categories": categories, "annotations": objects}


def results_of(*rows: tuple[Box, float]) -> list[dict[str, Any]]:
    """COCO results of boxes with their scores."""
    return [{**_row(box), "score": score} for box, score in rows]


def _row(box: Box) -> dict[str, Any]:
    return {"image_id": 1, "category_id": 1, "bbox": list(box)}
