"""MOVED"""

from aploss.detectors.labels import (  # noqa: F401
    IGNORED,
    NEGATIVE,
    AnchorLabels,
    label_anchors,
    match_anchors,
)
