"""Figures of a run for papers: vector graphics with fixed fonts."""
