"""Table 2: CE + OHEM, focal loss, AUC-loss and AP-loss on RetinaNet."""

from aploss.reproduction.loss_rows import loss_plan, order_verdicts
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import MEASURED_ON, TABLE_2
from aploss.reproduction.plan import Plan
from aploss.reproduction.request import Reproduction, Request, small_note
from aploss.reproduction.results import Results

__all__ = ["REPRODUCTION", "SUMMARY", "plan"]

SUMMARY = (
    "The same RetinaNet, schedule, initial weights and order of the data for each seed; only the "
    "loss differs."
)


def plan(request: Request) -> Plan:
    """Four rows."""
    return loss_plan(request, "retinanet-r50", paper=TABLE_2[request.benchmark])


def text(request: Request, results: Results) -> PageText:
    """Is the order that of the paper?"""
    return PageText(
        title=REPRODUCTION.title,
        summary=SUMMARY,
        reference="ap",
        verdicts=order_verdicts(results),
        notes=small_note(request),
        paper=MEASURED_ON[request.benchmark],
    )


REPRODUCTION = Reproduction(
    name="table2",
    title="Table 2: RetinaNet with four losses",
    shows="CE + OHEM, focal, AUC and AP on RetinaNet",
    plan=plan,
    text=text,
    benchmarks=("voc", "coco"),
)
