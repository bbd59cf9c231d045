"""MOVED"""

from aploss.detectors.checkpoint import (  # noqa: F401
    checkpoint_file,
    detector_from_record,
    detector_record,
    load,
    read_checkpoint,
    save_detector,
)
