"""Figure 5: the same images, detected by the models of focal loss and of AP-loss."""

from aploss.reporting.blocks import Block, Legend, Missing, Section, Text
from aploss.reporting.run_files import read_run
from aploss.reporting.run_pictures import side_by_side
from aploss.reporting.style import class_colour
from aploss.reproduction.loss_rows import loss_plan
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import MEASURED_ON, TABLE_2
from aploss.reproduction.plan import Plan
from aploss.reproduction.request import Reproduction, Request, small_note
from aploss.reproduction.results import Results

__all__ = ["REPRODUCTION"]

PAIR = ("focal", "ap")
PICTURES = 10


def plan(request: Request) -> Plan:
    """Two rows of Table 2, one seed."""
    return loss_plan(
        request,
        "retinanet-r50",
        losses=PAIR,
        paper=TABLE_2[request.benchmark],
        seeds=request.all_seeds[:1],
    )


def text(request: Request, results: Results) -> PageText:
    """Pictures, not chosen by how they came out."""
    return PageText(
        title=REPRODUCTION.title,
        summary="The models of Table 2 with the first seed, on the same images.",
        notes=small_note(request),
        paper=MEASURED_ON[request.benchmark],
        sections=[Section("Side by side", _pictures(results))],
    )


def _pictures(results: Results) -> list[Block]:
    folders = {name: run.folder for name in PAIR for run in results.finished_runs(name)}
    if len(folders) < len(PAIR):
        return [Missing("There are pictures when both models are trained.")]
    runs = {name: read_run(folder) for name, folder in folders.items()}
    names = [entry["name"] for entry in runs["ap"].ground_truth.get("categories", [])]
    legend = Legend([(class_colour(place), str(name)) for place, name in enumerate(names)])
    words = (
        "Images of the test split in even steps through it, not chosen by their result. Left: "
        "focal loss, right: AP-loss. Objects are dashed white; detections have the colour of "
        "their class and are drawn from each model's own threshold on, which is the best F1 on "
        "the validation split, with calibrated scores where there is such a split."
    )
    return [Text(words), legend, side_by_side(runs, count=PICTURES)]


REPRODUCTION = Reproduction(
    name="figure5",
    title="Figure 5: focal loss and AP-loss on the same images",
    shows="the same images detected by both models",
    plan=plan,
    text=text,
    benchmarks=("voc", "coco"),
)
