"""Fields of a model's configuration, as `student.config` names them."""

import pytest

from distill.models.fields import check_fields, family, field_names
from distill.runtime.errors import SettingError


@pytest.mark.parametrize("name", ["to_dict", "save_pretrained", "use_return_dict", "hiden_size"])
def test_what_is_no_field_is_refused_at_once(name: str) -> None:
    """A method that a number hides ends the run only when the student is saved."""
    with pytest.raises(SettingError, match=rf"^student\.config\.{name} is not a field of the bert configuration"):
        check_fields(family("bert"), {name: 1})


@pytest.mark.parametrize(
    "architecture, changes",
    [
        ("gpt2", {"n_embd": 32, "num_hidden_layers": 2}),  # by its own name and by that of other families
        ("bert", {"num_labels": 3, "tie_word_embeddings": False}),
        ("llama", {"rope_scaling": None}),
    ],
)
def test_every_name_that_can_be_set_is_taken(architecture: str, changes: dict[str, object]) -> None:
    check_fields(family(architecture), changes)


def test_no_field_of_any_common_family_is_a_method() -> None:
    for architecture in ("bert", "albert", "distilbert", "gpt2", "llama"):
        known = family(architecture)
        assert not [name for name in field_names(known) if callable(getattr(known, name, None))]
