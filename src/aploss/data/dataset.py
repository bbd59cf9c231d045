"""MOVED"""

from aploss.data.annotations import DetectionDataset, Sample, concatenate  # noqa: F401
