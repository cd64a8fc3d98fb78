"""Figures of readings, and the sections of pages that explain them."""
