"""Table 3: the final detector, tested at one scale and at several."""

from aploss.reporting.blocks import Details, Section, Table
from aploss.reproduction.loss_rows import STEPS, TRIAL_STEPS
from aploss.reproduction.multi_scale_measure import MultiScaleMeasure
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import TABLE_3, TABLE_3_OTHERS
from aploss.reproduction.plan import Plan, Variant
from aploss.reproduction.request import Reproduction, Request, small_note
from aploss.reproduction.results import Results

__all__ = ["REPRODUCTION"]

ONE_SCALE, SEVERAL_SCALES = "one scale", "several scales"
METRICS = {
    "voc": ("VOC AP50", "AP", "AP50", "AP75"),
    "coco": ("AP", "AP50", "AP75", "APs", "APm", "APl"),
}
PAPER = {
    "voc": "VOC 2007 test, RetinaNet500 + AP-loss with ResNet-101",
    "coco": "COCO test-dev, RetinaNet500 + AP-loss with ResNet-101",
}


def plan(request: Request) -> Plan:
    """Two rows of the same runs."""
    config = request.config("retinanet-r101", {"loss": "ap"}, steps=STEPS)
    paper = TABLE_3[_columns_of(request)]
    rows = [
        Variant(name=ONE_SCALE, config=config, paper=paper[False]),
        Variant(name=SEVERAL_SCALES, config=config, paper=paper[True], measure=MultiScaleMeasure()),
    ]
    return Plan(variants=rows, seeds=request.all_seeds, tuning=request.tuning(TRIAL_STEPS))


def text(request: Request, results: Results) -> PageText:
    """Do several scales help?"""
    metrics = METRICS[_columns_of(request)]
    notes = (
        "Several scales: the image at 0.75, 1, 1.25 and 1.5 times the test size, each also "
        "mirrored, merged by NMS; the paper does not say which scales it used.\n\n"
        "The annotations of VOC 2012 test and COCO test-dev are not public: their columns need "
        "the benchmarks' servers. On COCO minival is measured instead."
    )
    return PageText(
        title=REPRODUCTION.title,
        summary="The final detector with AP-loss. Both rows are the same weights; only the test "
        "differs.",
        metrics=metrics,
        reference=SEVERAL_SCALES,
        verdicts=[results.verdict(SEVERAL_SCALES, ONE_SCALE, metric=metrics[0])],
        notes="\n\n".join(filter(None, [notes, small_note(request)])),
        paper=PAPER[_columns_of(request)],
        sections=[_others()],
        row_name="test",
    )


def _columns_of(request: Request) -> str:
    """The small scale is measured as COCO is, so it stands beside COCO's columns."""
    return "coco" if request.is_small else request.benchmark


def _others() -> Section:
    rows = [
        [method, backbone, "several" if several else "one", *numbers]
        for method, backbone, several, *numbers in TABLE_3_OTHERS
    ]
    columns = ["method", "backbone", "scales", "VOC07 AP50", "VOC12 AP50", "COCO AP"]
    table = Table(columns=columns, rows=rows, digits=1, caption="As printed in the paper.")
    return Section("The paper's Table 3", [Details("All detectors of the table", [table])])


REPRODUCTION = Reproduction(
    name="table3",
    title="Table 3: the final detector, at one scale and at several",
    shows="the final detector, single- and multi-scale",
    plan=plan,
    text=text,
    benchmarks=("voc", "coco"),
)
