"""Hidden directions of chosen layers: the angle between student and teacher."""

from torch import Tensor

from distill.objective import losses
from distill.objective.terms._pairs import Hidden


class HiddenCosine(Hidden):
    """Sum over pairs of layers (m, n) of 1 - cos(h_m W, t_n) at every non-padding position; see `losses.cosine`.

    What DistilBERT (Sanh et al. 2019) does with the last layer, for any layers; W is a projection that is trained
    beside the student where widths differ.
    """

    title = "Hidden layers (cosine)"

    def losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        return losses.cosine(student, teacher)
