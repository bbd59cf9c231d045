"""Figure 4b: the AP-loss on the training set under three ways to minimise it.

The error-driven update, the gradient of a sigmoid approximation in log space, and the structured
hinge loss, with box regression turned off (Section 4.2.3).
"""

from typing import Any

from aploss.reproduction.ap_loss_measure import RANKING_AP, APLossMeasure
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import FIGURE_4B_HINGE_LEVEL
from aploss.reproduction.plan import Plan, Variant, changed
from aploss.reproduction.request import Reproduction, Request, small_note
from aploss.reproduction.results import Results

__all__ = ["REPRODUCTION"]

STEPS, TRIAL_STEPS = 500, 150  # at small scale
POINTS = 30  # of a curve
EPOCH_IMAGES = 5_011  # VOC 2007 trainval, at the paper's scale
EPOCH_STEPS = EPOCH_IMAGES // 16
IMAGES = {"small": 64, "paper": 256}
LEAST = 0.05  # "clearly below", as AP-loss
OPTIONS: dict[str, dict[str, Any]] = {
    "ap": {"delta": 1.0, "interpolated": True},
    "smooth-ap": {"log_space": True},  # log(AP + eps), "to quickly escape from the initial state"
    "hinge-ap": {},
}


def plan(request: Request) -> Plan:
    """Three rows; the learning rate of each is chosen by the AP-loss it ends with."""
    measure = APLossMeasure(IMAGES[request.scale])
    splits = {"validation": "none"}
    if not request.is_small:
        splits["train"] = "2007_trainval"  # Section 4.2.3
    variants = []
    for loss, options in OPTIONS.items():
        criterion = {"options": options, "box_weight": 0.0}
        config = request.config(
            "retinanet-r50",
            {"loss": loss, "criterion": criterion, "splits": splits},
            steps=STEPS,
        )
        length = config.schedule.length
        if config.schedule.unit == "epochs":
            length *= EPOCH_STEPS
        config = changed(config, {"checkpoint_steps": max(1, length // POINTS)})
        variants.append(Variant(name=loss, config=config, measure=measure))
    return Plan(variants=variants, seeds=request.all_seeds, tuning=request.tuning(TRIAL_STEPS))


def text(request: Request, results: Results) -> PageText:
    """Does the error-driven update end below the two others?"""
    return PageText(
        title=REPRODUCTION.title,
        summary=(
            "Three ways to minimise the AP-loss, with box regression turned off: AP-loss, by the "
            "error-driven update; Smooth-AP, by the gradient of log(AP + eps) with a sigmoid in "
            "place of the step; Hinge-AP, by the structured hinge loss, an upper bound. The same "
            "schedule, initial weights and order of the data for each seed. The curves are the "
            "plain AP-loss, 1 - AP of the ranking with the Heaviside step and no interpolation, "
            "on a fixed set of training images in batches of 8, whatever is minimised. The table "
            "has the AP at the end."
        ),
        metrics=(RANKING_AP,),
        reference="ap",
        verdicts=[
            _verdict(results, "smooth-ap"),
            _verdict(results, "hinge-ap"),
        ],
        notes="\n\n".join(
            filter(
                None,
                [
                    "In the paper the approximate gradient does not converge and the hinge loss "
                    f"stabilizes near an AP-loss of {FIGURE_4B_HINGE_LEVEL}; it gives no other "
                    "numbers for this figure.",
                    small_note(request),
                ],
            )
        ),
        paper="",
        row_name="method",
        curve_label="AP-loss on train",
    )


def _verdict(results: Results, other: str) -> tuple[bool | None, str]:
    holds, _ = results.verdict("ap", other, by=LEAST, metric=RANKING_AP)
    ends = [1 - results.mean(name, RANKING_AP) for name in ("ap", other)]
    name = {"smooth-ap": "the approximate gradient", "hinge-ap": "the structured hinge loss"}[other]
    claim = f"The error-driven update ends clearly below {name}"
    if all(end == end for end in ends):
        claim += f": AP-loss {ends[0]:.3f} against {ends[1]:.3f}"
    return holds, claim


REPRODUCTION = Reproduction(
    name="figure4b",
    title="Figure 4b: three ways to minimise the AP-loss",
    shows="AP-loss on the training set under three optimisations, box regression off",
    plan=plan,
    text=text,
    epoch_images={"voc": EPOCH_IMAGES},
)
