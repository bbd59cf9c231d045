"""Draws docs/images/blood-cells.jpg: the detections of a run in the first four test images of BCCD.

Run with: python tools/draw_detections.py RUN path/to/bccd [FILE]
"""

import sys
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from aploss.data import load_dataset
from aploss.detectors import load

CLASSES = {
    "RBC": ("red blood cell", "#d55e00"),
    "WBC": ("white blood cell", "#009e73"),
    "Platelets": ("platelet", "#0072b2"),
}
WIDTH, HEIGHT, GAP = 420, 315, 6


def draw(run: str, data: str, file: str) -> None:
    detector, cells = load(run), load_dataset(data, "test")
    images = [cells[index][0] for index in range(4)]
    sheet = Image.new("RGB", (2 * WIDTH + GAP, 2 * HEIGHT + GAP + 30), "white")
    for place, (image, found) in enumerate(zip(images, detector.predict(images), strict=True)):
        photograph = Image.fromarray(image.permute(1, 2, 0).numpy())
        scale = WIDTH / photograph.width
        photograph = photograph.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
        canvas = ImageDraw.Draw(photograph)
        for box, label in zip(found.boxes.tolist(), found.labels.tolist(), strict=True):
            canvas.rectangle([scale * side for side in box], outline=CLASSES[detector.class_names[label]][1], width=2)
        sheet.paste(photograph, (place % 2 * (WIDTH + GAP), place // 2 * (HEIGHT + GAP)))
    canvas, left, top = ImageDraw.Draw(sheet), 8.0, 2 * HEIGHT + GAP + 8
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), 16)
    for name, colour in CLASSES.values():
        canvas.rectangle((left, top + 2, left + 16, top + 16), outline=colour, width=3)
        canvas.text((left + 24, top - 1), name, fill="#222222", font=font)
        left += 52 + canvas.textlength(name, font=font)
    sheet.save(file, quality=82, optimize=True)


if __name__ == "__main__":
    draw(*sys.argv[1:3], sys.argv[3] if len(sys.argv) > 3 else "docs/images/blood-cells.jpg")
