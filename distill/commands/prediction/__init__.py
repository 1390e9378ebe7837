"""Predictions of a trained model: tokens for masks, continuations, classes and values, and spans of a context."""
