"""Table 1b: the width delta of the piecewise step function."""

from aploss.reproduction.ablation import AP_OPTIONS, STEPS, ablation_text
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import TABLE_1B
from aploss.reproduction.plan import Plan, Variant
from aploss.reproduction.request import Reproduction, Request
from aploss.reproduction.results import Results
from aploss.training.recipes import merge

__all__ = ["REPRODUCTION"]


def row_name(delta: float) -> str:
    """The name of a row."""
    return f"delta {delta:g}"


def plan(request: Request) -> Plan:
    """Four rows."""
    variants = [
        Variant(
            name=row_name(delta),
            config=request.config(
                "retinanet-r50",
                merge(AP_OPTIONS, {"criterion": {"options": {"delta": delta}}}),
                steps=STEPS,
            ),
            paper=paper,
        )
        for delta, paper in TABLE_1B.items()
    ]
    return Plan(variants=variants, seeds=request.all_seeds)


def text(request: Request, results: Results) -> PageText:
    """Is 1 better than the others?"""
    others = [row_name(delta) for delta in TABLE_1B if delta != 1.0]
    return ablation_text(
        request,
        title=REPRODUCTION.title,
        summary="Smaller deltas make the step sharper and the beginning unstable, larger ones "
        "leave AP behind (Section 4.2.1). The paper takes 1.",
        row="delta",
        reference=row_name(1.0),
        verdicts=[results.verdict(row_name(1.0), other) for other in others],
    )


REPRODUCTION = Reproduction(
    name="table1b",
    title="Table 1b: the width delta of the step function",
    shows="delta 0.25, 0.5, 1 and 2",
    plan=plan,
    text=text,
)
