"""Table 1c: interpolated precision, or not."""

from aploss.reproduction.ablation import AP_OPTIONS, STEPS, ablation_text
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import TABLE_1C
from aploss.reproduction.plan import Plan, Variant
from aploss.reproduction.request import Reproduction, Request
from aploss.reproduction.results import Results
from aploss.training.recipes import merge

__all__ = ["REPRODUCTION"]

NAMES = {False: "not interpolated", True: "interpolated"}


def plan(request: Request) -> Plan:
    """Two rows."""
    variants = [
        Variant(
            name=NAMES[interpolated],
            config=request.config(
                "retinanet-r50",
                merge(AP_OPTIONS, {"criterion": {"options": {"interpolated": interpolated}}}),
                steps=STEPS,
            ),
            paper=paper,
        )
        for interpolated, paper in TABLE_1C.items()
    ]
    return Plan(variants=variants, seeds=request.all_seeds)


def text(request: Request, results: Results) -> PageText:
    """Does interpolation help?"""
    return ablation_text(
        request,
        title=REPRODUCTION.title,
        summary="Lines 8-11 of Algorithm 1 make the precision monotone in the score, as the "
        "benchmarks do when they measure. The paper finds a marginal benefit.",
        row="precision",
        reference=NAMES[True],
        verdicts=[results.verdict(NAMES[True], NAMES[False])],
    )


REPRODUCTION = Reproduction(
    name="table1c",
    title="Table 1c: interpolated precision or not",
    shows="interpolated or not",
    plan=plan,
    text=text,
)
