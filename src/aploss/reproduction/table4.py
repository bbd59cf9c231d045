"""Table 4 and its figure (Appendix 5): the four losses on SSD."""

from aploss.reproduction.loss_rows import loss_plan, order_verdicts
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import MEASURED_ON, TABLE_4
from aploss.reproduction.plan import Plan
from aploss.reproduction.request import Reproduction, Request, small_note
from aploss.reproduction.results import Results

__all__ = ["REPRODUCTION"]

STEPS, TRIAL_STEPS = 600, 200  # at small scale
FOCAL = {"alpha": 0.25, "gamma": 1.0}  # A5.1: better than gamma 2 with SSD


def plan(request: Request) -> Plan:
    """Four rows; at small scale with SSDlite, the SSD for CPUs."""
    return loss_plan(
        request,
        "ssd512",
        paper=TABLE_4,
        changes={"detector": "ssdlite"},
        options={"focal": FOCAL},
        steps=STEPS,
        trial_steps=TRIAL_STEPS,
    )


def text(request: Request, results: Results) -> PageText:
    """Is the order that of the paper?"""
    summary = (
        "The same SSD, schedule, initial weights and order of the data for each seed; only the "
        "loss differs. As in Appendix 5, focal loss has gamma 1."
    )
    if request.is_small:
        summary += " The small scale has SSDlite on MobileNetV3 in place of SSD512 on VGG-16."
    return PageText(
        title=REPRODUCTION.title,
        summary=summary,
        reference="ap",
        verdicts=order_verdicts(results),
        notes=small_note(request),
        paper=MEASURED_ON["voc"],
    )


REPRODUCTION = Reproduction(
    name="table4",
    title="Table 4: SSD with four losses",
    shows="the four losses on SSD (Appendix 5)",
    plan=plan,
    text=text,
)
