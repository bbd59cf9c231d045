"""One Pascal VOC annotation file."""

from dataclasses import dataclass, field
from xml.etree.ElementTree import Element, ParseError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import fromstring

from aploss.data.problems import Problem, ProblemError
from aploss.data.records import number

__all__ = ["VocAnnotation", "VocObject", "parse_annotation"]

_MAX_BYTES = 64 << 20  # far more than any image's objects need
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


@dataclass(slots=True)
class VocObject:
    """An object with a class and four numbers, from pixel 0 on."""

    name: str
    number: int  # 1 for the first object of the file
    corners: tuple[float, float, float, float]
    difficult: bool
    crowd: bool


@dataclass(slots=True)
class VocAnnotation:
    """What a file says, and what is wrong with it apart from the values of its boxes."""

    path: str
    file_name: str = ""
    size: tuple[int, int] | None = None
    objects: list[VocObject] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    zero_based: bool = False

    def report(self, kind: str, message: str) -> None:
        """Notes a problem of this file."""
        self.problems.append(Problem(kind, self.path, message))


def parse_annotation(path: str, content: bytes) -> VocAnnotation:
    """Parses a VOC annotation.

    Coordinates in the file count pixels from 1 and include the last one, so that xmin is one more
    than the left edge and xmax is the right edge itself: a box over a whole 640 x 480 image is
    written (1, 1, 640, 480) and read as (0, 0, 640, 480).

    Args:
        path: Name of the file, for messages.
        content: What is in it.

    Raises:
        ProblemError: It is not a VOC annotation, or contains a document type or entities.
    """
    root = _parse_safely(path, content)
    annotation = VocAnnotation(path, file_name=_text(root, "filename"))
    annotation.size = _image_size(root)
    if annotation.size is None:
        annotation.report("missing-size", "no image size, or one of 0; taken from the image")
    for position, element in enumerate(root.iterfind("object"), start=1):
        _add_object(annotation, element, position)
    return annotation


def _parse_safely(path: str, content: bytes) -> Element:
    if len(content) > _MAX_BYTES:
        raise ProblemError("unreadable-annotation", path, f"larger than {_MAX_BYTES >> 20} MB")
    try:
        root: Element = fromstring(content, forbid_dtd=True)
    except DefusedXmlException:
        raise ProblemError(
            "xml-entities",
            path,
            "an XML document type or entity, which is not expanded; remove it from the file",
        ) from None
    except (ParseError, ValueError, LookupError, RecursionError) as error:
        raise ProblemError("unreadable-annotation", path, f"not valid XML: {error}") from None
    if root.tag != "annotation":
        raise ProblemError(
            "unreadable-annotation", path, f"a VOC file holds <annotation>, this one <{root.tag}>"
        )
    return root


def _add_object(annotation: VocAnnotation, element: Element, position: int) -> None:
    name = _text(element, "name")
    where = f"object {position} ({name})" if name else f"object {position}"
    if not name:
        annotation.report("missing-class", f"{where}: no class name")
        return
    box = element.find("bndbox")
    if box is None:
        annotation.report("missing-box", f"{where}: no <bndbox>")
        return
    texts = [_text(box, corner) for corner in _CORNERS]
    if not all(texts):
        absent = ", ".join(c for c, text in zip(_CORNERS, texts, strict=True) if not text)
        annotation.report("missing-coordinate", f"{where}: no {absent}")
        return
    try:
        xmin, ymin, xmax, ymax = map(number, texts)
    except ValueError as error:
        annotation.report("non-numeric-coordinate", f"{where}: {error}")
        return
    annotation.zero_based |= 0 <= xmin < 1 or 0 <= ymin < 1
    annotation.objects.append(
        VocObject(
            name,
            position,
            (_from_one(xmin), _from_one(ymin), xmax, ymax),
            difficult=_flag(annotation, element, "difficult", where),
            crowd=_flag(annotation, element, "crowd", where),
        )
    )


def _from_one(coordinate: float) -> float:
    """Pixel 1 is where 0 begins; a file that counts from 0 must not give a box outside."""
    return 0.0 if 0 <= coordinate < 1 else coordinate - 1


def _flag(annotation: VocAnnotation, element: Element, tag: str, where: str) -> bool:
    text = _text(element, tag) or "0"
    if text not in ("0", "1"):
        annotation.report("bad-flag", f"{where}: {tag} is {text!r}, neither 0 nor 1")
    return text == "1"


def _image_size(root: Element) -> tuple[int, int] | None:
    try:
        width, height = (number(_text(root, f"size/{side}")) for side in ("width", "height"))
    except ValueError:
        return None
    return (int(width), int(height)) if width >= 1 and height >= 1 else None


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
