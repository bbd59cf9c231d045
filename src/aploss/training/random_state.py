"""MOVED"""

from aploss.training.machine import (  # noqa: F401
    capture_random_state,
    restore_random_state,
    seeded,
)
