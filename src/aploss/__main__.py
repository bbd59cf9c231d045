"""Makes ``python -m aploss`` (and so ``torchrun -m aploss``) the same as the command ``aploss``."""

import sys

from aploss.cli.main import main

sys.exit(main())
