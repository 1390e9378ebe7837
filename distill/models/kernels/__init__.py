"""What makes models faster on a CPU. None of it changes what they compute beyond rounding.

`precision.kernels=plain` turns it off: linear layers, activations and memory are those of torch and transformers, and
the objective is the readable one. What stays is dropout by sequence, in layers and in attention, since it decides which
numbers are drawn.

Two files rest on private operators of torch: `packed_linear` on `torch.ops.mkldnn._reorder_linear_weight` and
`_linear_pointwise`, `int8` on `torch.ops.onednn.qlinear_prepack` and `qlinear_pointwise`. Both try them before they use
them; where an operator is gone or computes something else, torch's own layers run (int8 is refused).
"""

# Families whose layers use their weights in no other way than by calling them, and whose dropout and attention are
# laid out row by row. Others run as they are.
CAUSAL_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
FAMILIES = ("albert", "bert", "distilbert", "modernbert", "roberta", *CAUSAL_FAMILIES)


def family_of(model: object) -> str | None:
    """The transformers model type; None for a model that is none of transformers'."""
    return getattr(getattr(model, "config", None), "model_type", None)
