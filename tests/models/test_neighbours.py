"""The start that lets a small BERT look at neighbouring words."""

import pytest
import tiny
import torch

from distill.config.settings import StudentConfig
from distill.models.initialisation import attend_to_neighbours
from distill.models.student import make_student
from distill.runtime.errors import SettingError


@pytest.mark.parametrize("family", ["bert", "distilbert", "albert"])
def test_every_head_of_the_first_layer_attends_to_its_offset(family: str) -> None:
    """On random words at 48 positions: over six times the attention of a uniform head, at -1, +1, -2, +2."""
    torch.manual_seed(0)
    config = {"dim": 128, "n_heads": 4} if family == "distilbert" else {"hidden_size": 128, "num_attention_heads": 4}
    if family == "albert":
        config |= {"embedding_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
    settings = StudentConfig(init="neighbours", architecture=family, dropout=0.0, config=config)
    model = make_student(settings, None, tiny.make_tokenizer(), 48).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(5, model.config.vocab_size, (4, 48))
    attention = model(input_ids=ids, output_attentions=True).attentions[0].mean(0)  # [heads, S, S]
    for head, offset in enumerate((-1, 1, -2, 2)):
        share = torch.diagonal(attention[head], offset).mean()
        assert share > 6 / 48, (head, share)
        assert share > 3 * torch.diagonal(attention[head], -offset).mean()


def test_a_family_without_learned_positions_is_refused() -> None:
    with pytest.raises(SettingError, match=r"student\.init=neighbours"):
        attend_to_neighbours(tiny.make_model("modernbert", 2))
