"""Figures that stand still: files, and the pages that are made of notebooks."""
