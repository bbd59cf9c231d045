"""What Table 2, Table 4 and Figures 4a and 5 share: one row for each loss."""

from collections.abc import Mapping, Sequence
from typing import Any

from aploss.reproduction.plan import Plan, Variant, changed
from aploss.reproduction.request import Request
from aploss.reproduction.results import Results

__all__ = ["LOSSES", "STEPS", "TRIAL_STEPS", "loss_plan", "order_verdicts"]

LOSSES = ("ce-ohem", "focal", "auc", "ap")  # in the paper's order
STEPS, TRIAL_STEPS = 800, 300  # of a run and of a trial at small scale: an hour on slow cores
TEST_SPLIT = {"voc": "2007_test", "coco": "val"}


def loss_plan(
    request: Request,
    paper_recipe: str,
    *,
    losses: Sequence[str] = LOSSES,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    changes: dict[str, Any] | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    seeds: Sequence[int] | None = None,
    steps: int = STEPS,
    trial_steps: int = TRIAL_STEPS,
) -> Plan:
    """A plan with a row for each loss.

    At the paper's scale AP is also measured on the test split every tenth of the training, as in
    Figure 4a; nothing is chosen by it.

    Args:
        request: what was asked for.
        paper_recipe: see :meth:`~aploss.reproduction.request.Request.config`.
        losses: the rows.
        paper: loss → the paper's numbers.
        changes: settings for all rows at small scale.
        options: loss → its options at small scale; at the paper's they are in the recipe.
        seeds: by default those of the request.
        steps: length of a run at small scale on built-in data.
        trial_steps: length of a trial of the search for learning rates.
    """
    variants = []
    for loss in losses:
        own: dict[str, Any] = {"loss": loss}
        if request.is_small:
            own = {**(changes or {}), **own}
            if loss in (options or {}):
                own["criterion"] = {"options": (options or {})[loss]}
        config = request.config(paper_recipe, own, steps=steps)
        if not request.is_small:
            config = changed(config, {"splits": {"validation": TEST_SPLIT[request.benchmark]}})
        variants.append(Variant(name=loss, config=config, paper=(paper or {}).get(loss, {})))
    return Plan(
        variants=variants,
        seeds=seeds or request.all_seeds,
        tuning=request.tuning(trial_steps),
    )


def order_verdicts(results: Results) -> list[tuple[bool | None, str]]:
    """AP-loss first, by at least 1 AP over focal loss; AUC-loss last."""
    verdicts = [
        results.verdict("ap", "focal", by=0.01),
        results.verdict("ap", "ce-ohem"),
        results.verdict("ap", "auc"),
    ]
    others = {name: results.mean(name) for name in LOSSES if name not in ("ap", "auc")}
    next_to_last = min(others, key=others.__getitem__)
    holds, claim = results.verdict(next_to_last, "auc")
    return [*verdicts, (holds, f"AUC-loss is last: {claim}")]
