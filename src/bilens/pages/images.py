"""The pages of image classifiers, which these modules register."""

from bilens.pages import bonds, certify, classifier, deep, explanation

__all__ = ["bonds", "certify", "classifier", "deep", "explanation"]
