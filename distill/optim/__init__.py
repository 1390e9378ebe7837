"""Optimizers, schedules of the learning rate, clipping and the scale of the loss."""
