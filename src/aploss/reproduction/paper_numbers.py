"""The numbers of the paper's tables, between 0 and 1, by row and metric."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "FIGURE_4B_HINGE_LEVEL",
    "MEASURED_ON",
    "TABLE_1A",
    "TABLE_1B",
    "TABLE_1C",
    "TABLE_2",
    "TABLE_3",
    "TABLE_3_OTHERS",
    "TABLE_4",
]

Row = Mapping[str, float]
METRICS = ("AP", "AP50", "AP75")


def _row(*percent: float, metrics: tuple[str, ...] = METRICS) -> Row:
    return MappingProxyType(
        {name: round(value / 100, 4) for name, value in zip(metrics, percent, strict=True)}
    )


MEASURED_ON: Mapping[str, str] = MappingProxyType(
    {
        "voc": "PASCAL VOC 2007 test, trained on 2007 + 2012 trainval",
        "coco": "COCO minival, trained on trainval35k",
    }
)

# Batch size → numbers.
TABLE_1A: Mapping[int, Row] = MappingProxyType(
    {
        1: _row(52.4, 80.2, 56.7),
        2: _row(53.0, 81.7, 57.8),
        4: _row(52.8, 82.2, 58.0),
        8: _row(53.1, 82.3, 58.1),
    }
)

# Delta → numbers.
TABLE_1B: Mapping[float, Row] = MappingProxyType(
    {
        0.25: _row(50.2, 80.7, 53.6),
        0.5: _row(51.3, 81.6, 55.4),
        1.0: _row(53.1, 82.3, 58.1),
        2.0: _row(52.8, 82.6, 57.2),
    }
)

# Interpolated? → numbers.
TABLE_1C: Mapping[bool, Row] = MappingProxyType(
    {False: _row(52.6, 82.2, 57.1), True: _row(53.1, 82.3, 58.1)}
)

# Data set → loss → numbers.
TABLE_2: Mapping[str, Mapping[str, Row]] = MappingProxyType(
    {
        "voc": {
            "ce-ohem": _row(49.1, 81.5, 51.5),
            "focal": _row(51.3, 80.9, 55.3),
            "auc": _row(49.3, 79.7, 51.8),
            "ap": _row(53.1, 82.3, 58.1),
        },
        "coco": {
            "ce-ohem": _row(30.8, 50.9, 32.6),
            "focal": _row(33.9, 55.0, 35.7),
            "auc": _row(25.5, 44.9, 26.0),
            "ap": _row(35.0, 57.2, 36.6),
        },
    }
)

# RetinaNet500 + AP-loss, ResNet-101: data set → multi-scale? → numbers.
_SIZES = (*METRICS, "APs", "APm", "APl")
TABLE_3: Mapping[str, Mapping[bool, Row]] = MappingProxyType(
    {
        "voc": {
            False: _row(83.9, metrics=("VOC AP50",)),
            True: _row(84.9, metrics=("VOC AP50",)),
        },
        "coco": {
            False: _row(37.4, 58.6, 40.5, 17.3, 40.8, 51.9, metrics=_SIZES),
            True: _row(42.1, 63.5, 46.4, 25.6, 45.0, 53.9, metrics=_SIZES),
        },
    }
)

# The other detectors of Table 3: (method, backbone, multi-scale?, VOC07 AP50, VOC12 AP50, COCO AP)
# in percent, None where the paper has a dash.
TABLE_3_OTHERS: tuple[tuple[str, str, bool, float | None, float | None, float | None], ...] = (
    ("YOLOv2", "DarkNet-19", False, 78.6, 73.4, 21.6),
    ("DSOD300", "DS/64-192-48-1", False, 77.7, 76.3, 29.3),
    ("SSD512", "VGG-16", False, 79.8, 78.5, 28.8),
    ("SSD513", "ResNet-101", False, 80.6, 79.4, 31.2),
    ("DSSD513", "ResNet-101", False, 81.5, 80.0, 33.2),
    ("DES512", "VGG-16", False, 81.7, 80.3, 32.8),
    ("RFBNet512", "VGG-16", False, 82.2, None, 33.8),
    ("PFPNet-R512", "VGG-16", False, 82.3, 80.3, 35.2),
    ("RefineDet512", "VGG-16", False, 81.8, 80.1, 33.0),
    ("RefineDet512", "ResNet-101", False, None, None, 36.4),
    ("RetinaNet500", "ResNet-101", False, None, None, 34.4),
    ("RetinaNet500 + AP-loss", "ResNet-101", False, 83.9, 83.1, 37.4),
    ("PFPNet-R512", "VGG-16", True, 84.1, 83.7, 39.4),
    ("RefineDet512", "VGG-16", True, 83.8, 83.5, 37.6),
    ("RefineDet512", "ResNet-101", True, None, None, 41.8),
    ("RetinaNet500 + AP-loss", "ResNet-101", True, 84.9, 84.5, 42.1),
)

# SSD512 on VOC 2007 test (Appendix 5): loss → numbers.
TABLE_4: Mapping[str, Row] = MappingProxyType(
    {
        "ce-ohem": _row(43.6, 76.0, 44.7),
        "focal": _row(39.3, 69.9, 38.0),
        "auc": _row(33.8, 63.7, 31.5),
        "ap": _row(45.2, 77.3, 47.3),
    }
)

# Section 4.2.3: the hinge loss "stabilizes near 0.8", the only number given of this figure.
FIGURE_4B_HINGE_LEVEL = 0.8
