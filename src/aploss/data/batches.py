"""MOVED"""

from aploss.data.loader import (  # noqa: F401
    AugmentedSamples,
    Batch,
    EvaluationBatches,
    TrainingBatches,
    make_evaluation_loader,
    make_training_loader,
)
