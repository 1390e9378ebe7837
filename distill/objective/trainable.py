"""Everything that the optimizer moves: the student, and the modules of loss terms such as projections."""

from torch import Tensor, nn

from distill.models.language_model import LanguageModel, Outputs, OutputSpec


class Trainable(nn.Module):
    """One module to be wrapped, optimised, clipped and checkpointed as a whole; only the student in it is exported.

    The terms' modules come first in `parameters()`. Backward comes to the student's parameters last, and the exchange
    of gradients starts from the end: behind the student, a module that a micro-batch does not touch would hold it up.
    """

    def __init__(self, student: LanguageModel, terms: dict[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.terms = nn.ModuleDict(terms or {})
        self.student = student

    def forward(self, inputs: dict[str, Tensor], documents: Tensor | None, spec: OutputSpec) -> Outputs:
        """The student's forward, as `LanguageModel`."""
        outputs: Outputs = self.student(inputs, documents, spec)
        return outputs
