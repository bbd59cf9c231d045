"""Predictions as annotation files, to be corrected by hand and trained on."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from aploss.detectors.prediction import Prediction

__all__ = ["voc_annotation", "yolo_rows"]


def voc_annotation(prediction: Prediction, file_name: str) -> str:
    """A Pascal VOC annotation: XML, coordinates counted from 1, with a ``score`` an object."""
    root = Element("annotation")
    SubElement(root, "filename").text = file_name
    size = SubElement(root, "size")
    for side, value in zip(("width", "height", "depth"), (*prediction.image_size, 3), strict=True):
        SubElement(size, side).text = str(value)
    rows = zip(prediction.class_names, prediction.scores, prediction.boxes, strict=True)
    for name, score, box in rows:
        entry = SubElement(root, "object")
        SubElement(entry, "name").text = name
        SubElement(entry, "difficult").text = "0"
        SubElement(entry, "score").text = f"{float(score):.4f}"
        left, top, right, bottom = box.tolist()
        corners = {"xmin": left + 1, "ymin": top + 1, "xmax": right, "ymax": bottom}
        box_element = SubElement(entry, "bndbox")
        for corner, value in corners.items():
            SubElement(box_element, corner).text = f"{value:.2f}"
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def yolo_rows(prediction: Prediction) -> str:
    """YOLO label rows: class, centre, width and height as fractions of the image.

    Example:
        >>> import torch
        >>> found = Prediction(
        ...     boxes=torch.tensor([[10.0, 10.0, 30.0, 20.0]]), scores=torch.tensor([0.9]),
        ...     labels=torch.tensor([1]), class_names=("dog",), image_size=(100, 50),
        ... )
        >>> yolo_rows(found)
        '1 0.200000 0.300000 0.200000 0.200000\\n'
    """
    width, height = prediction.image_size
    lines = []
    for label, box in zip(prediction.labels.tolist(), prediction.boxes.tolist(), strict=True):
        left, top, right, bottom = box
        values = (
            (left + right) / 2 / width,
            (top + bottom) / 2 / height,
            (right - left) / width,
            (bottom - top) / height,
        )
        lines.append(f"{label} " + " ".join(f"{value:.6f}" for value in values) + "\n")
    return "".join(lines)
