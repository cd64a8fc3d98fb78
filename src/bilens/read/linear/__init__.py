"""Layers as linear maps: on one text with norms and patterns frozen, or between two texts."""
