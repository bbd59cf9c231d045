"""Entry point of ``python -m aploss`` and ``torchrun -m aploss``."""

import sys

from aploss.cli.main import main

sys.exit(main())
