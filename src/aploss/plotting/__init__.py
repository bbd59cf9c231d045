"""One look for all plots and pictures: numbers and boxes in, SVG text and PIL images out."""
