"""What a trained model answers: words for masks, continuations, classes and values, and stretches of a context."""
