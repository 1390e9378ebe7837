"""What makes models faster on a CPU. None of it changes what they compute beyond rounding.

`precision.kernels=plain` turns it off: linear layers, activations and memory are those of torch and transformers, and
the objective is the readable one. What stays is dropout by sequence, in layers and in attention, since it decides which
numbers are drawn.
"""

# Families whose layers use their weights in no other way than by calling them, and whose dropout and attention are
# laid out row by row. Others run as they are.
CAUSAL_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
FAMILIES = ("albert", "bert", "distilbert", "modernbert", "roberta", *CAUSAL_FAMILIES)


def is_known(model: object) -> bool:
    """Whether a model is of one of these families."""
    return getattr(getattr(model, "config", None), "model_type", None) in FAMILIES
