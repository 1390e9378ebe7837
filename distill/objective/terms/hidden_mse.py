"""Hidden states: the squared distance of chosen layers, as in TinyBERT."""

from torch import Tensor

from distill.objective.terms._pairs import Hidden


class HiddenMse(Hidden):
    """Sum over pairs of layers (m, n) of MSE(h_m W, t_n) at every non-padding position.

    Jiao et al., "TinyBERT: Distilling BERT for Natural Language Understanding" (2020), equations 8 and 9: h_m is the
    student's hidden state, t_n the teacher's, W a projection that is trained beside the student where widths differ.
    The mean is taken over the width; padding does not enter it.
    """

    title = "Hidden layers (MSE)"

    def losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (student - teacher).square().mean(-1)
