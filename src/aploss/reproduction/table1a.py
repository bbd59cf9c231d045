"""Table 1a: ranking the anchors of 1, 2, 4 or 8 images together.

At small scale every step learns from 8 images, ranked in groups of 1, 2, 4 or 8, so that nothing
but the ranking differs. At the paper's scale the batch of a GPU is varied, as in the paper.
"""

from aploss.reproduction.ablation import AP_OPTIONS, STEPS, ablation_text
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import TABLE_1A
from aploss.reproduction.plan import Plan, Variant, changed
from aploss.reproduction.request import Reproduction, Request
from aploss.reproduction.results import Results

__all__ = ["REPRODUCTION"]

IMAGES_A_STEP = 8


def row_name(images: int) -> str:
    """The name of a row."""
    return f"{images} image{'s' * (images > 1)}"


def plan(request: Request) -> Plan:
    """Four rows."""
    variants = []
    for images, paper in TABLE_1A.items():
        config = request.config("retinanet-r50", AP_OPTIONS, steps=STEPS, batch=images)
        if request.is_small:
            groups = {"size": images, "accumulate": IMAGES_A_STEP // images}
            config = changed(config, {"batches": groups})
        variants.append(Variant(name=row_name(images), config=config, paper=paper))
    return Plan(variants=variants, seeds=request.all_seeds)


def text(request: Request, results: Results) -> PageText:
    """Is 8 better than 1?"""
    how = (
        "Each step learns from 8 images whose anchors are ranked in groups of 1, 2, 4 or 8 "
        "images (gradients are summed over the groups), so that the number of steps, images and "
        "updates is the same in all rows. The paper varies the batch itself."
        if request.is_small
        else "The batch of each of two GPUs is varied; each GPU ranks its own images."
    )
    return ablation_text(
        request,
        title=REPRODUCTION.title,
        summary=f"AP-loss over more images cannot be misled by scores that shift from image to "
        f"image (Section 3.4). {how}",
        row="images ranked together",
        reference=row_name(8),
        verdicts=[results.verdict(row_name(8), row_name(1))],
    )


REPRODUCTION = Reproduction(
    name="table1a",
    title="Table 1a: how many images are ranked together",
    shows="ranking over more images is better",
    plan=plan,
    text=text,
)
