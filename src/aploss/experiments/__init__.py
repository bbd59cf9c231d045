"""Comparisons of losses and settings over seeds, and the tables and figures of the paper."""
