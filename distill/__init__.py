"""Distill: a frozen teacher, a small student, and a report that shows how close they came."""

__version__ = "0.1.0"
