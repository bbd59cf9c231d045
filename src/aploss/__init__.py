"""Average-precision loss for object detection: exact ranking losses in the place of focal loss.

The loss library is here; the detector tool (extra ``detect``) is in ``aploss.detectors``,
``aploss.data``, ``aploss.evaluation`` and ``aploss.training``, and on the command line.
"""

from .losses import *  # noqa: F403
from .losses import __all__ as __all__
