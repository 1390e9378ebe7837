"""Text that models write against a plain loop: no cache, no padding, one token after the other."""

from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from tiny import SEP, VOCAB

from distill.config.objective import SamplingConfig
from distill.models.generation import InverseCDF, complete, ends_of
from distill.runtime.seed import key, uniform

KEYS = key(3, "test", np.arange(3))
PROMPTS = [np.random.default_rng(length).integers(5, VOCAB, length) for length in (9, 1, 4)]  # fills of three lengths


def plain_draw(probabilities: list[float], settings: SamplingConfig, number: float) -> int:
    """The first token whose cumulative probability is above the number, in loops as the settings are defined."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if settings.temperature == 0:
        return order[0]
    powers = [each ** (1 / settings.temperature) for each in probabilities]
    kept, mass = list[int](), 0.0
    for token in order[: settings.top_k]:
        if mass < settings.top_p * sum(powers[each] for each in order[: settings.top_k]):
            kept.append(token)
            mass += powers[token]
    cumulative = 0.0
    for token in sorted(kept):
        cumulative += powers[token]
        if cumulative > number * mass:
            return token
    raise AssertionError


@torch.no_grad()
def plain(model: Any, prompt: np.ndarray, key_: np.uint64, settings: SamplingConfig) -> list[tuple[int, float, float]]:
    """Each token with its log-probability and the entropy at it."""
    ids, found = prompt.tolist(), []
    for place in range(settings.max_new_tokens):
        probabilities = model(torch.tensor([ids])).logits[0, -1, :VOCAB].double().softmax(-1)
        ids.append(plain_draw(probabilities.tolist(), settings, float(uniform(key(0, "draw", key_, place)))))
        entropy = -(probabilities * probabilities.log()).sum()
        found.append((ids[-1], float(probabilities[ids[-1]].log()), float(entropy)))
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])  # heads share keys in two, layers have windows in one
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 9, "top_p": 0.8}, {"temperature": 0}])
def test_a_group_gets_the_tokens_of_a_plain_loop_of_each_prompt(family: str, sampling: dict[str, Any]) -> None:
    """With a cache and padding on the left, whatever the model's own settings of generation are, and in training."""
    model = make_family(family, vocab_size=VOCAB + 3)  # more than the tokenizer has
    settings = SamplingConfig(max_new_tokens=12, **sampling)
    expected = [plain(model, *each, settings) for each in zip(PROMPTS, KEYS, strict=True)]
    own = {"top_k": 1, "repetition_penalty": 9.0, "max_length": 3, "num_beams": 2, "eos_token_id": [SEP, 9]}
    model.generation_config.update(**own)
    model.train()  # with dropout, which families have
    state, calls = torch.get_rng_state(), list[dict[str, Any]]()
    model.register_forward_pre_hook(lambda _, __, given: calls.append(given), with_kwargs=True)
    for ends in (set(), {expected[0][5][0], expected[1][7][0]}):
        for one, whole in zip(complete(model, PROMPTS, KEYS, settings, ends, VOCAB), expected, strict=True):
            length = next((place for place, (token, *_) in enumerate(whole, 1) if token in ends), len(whole))
            tokens, log_probs, entropy = zip(*whole[:length], strict=True)
            assert one.tokens.tolist() == list(tokens) and one.ended == (tokens[-1] in ends)
            np.testing.assert_allclose([one.log_probs, one.entropy], [log_probs, entropy], rtol=0, atol=2e-5)
    assert {given["input_ids"].shape[1] for given in calls} == {9, 1}, "keys and values are kept"
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert {name: getattr(model.generation_config, name) for name in own} == own


@pytest.mark.parametrize(
    "settings", [SamplingConfig(), SamplingConfig(temperature=0.5, top_k=3), SamplingConfig(top_p=0.6)]
)
def test_tokens_are_drawn_as_often_as_they_are_probable_and_never_at_probability_0(settings: SamplingConfig) -> None:
    logits = torch.tensor([-torch.inf, 0.3, -1.0, -200.0, 1.2, 0.9, -torch.inf, 5.0])  # the last pads the head
    count = 40_000
    extremes = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    uniforms = torch.cat([extremes, torch.from_numpy(uniform(key(0, "test", np.arange(count))))])[:, None]
    draw = InverseCDF(uniforms, 1, settings, vocab=7)
    drawn = draw(torch.zeros(len(uniforms), 1), logits.expand(len(uniforms), -1)).argmax(-1)
    powers = (logits[:7] / settings.temperature).softmax(-1)
    kept = powers.argsort(descending=True)[: {1.0: 7, 0.6: 2}[settings.top_p]][: settings.top_k]
    expected = torch.zeros(7).index_put_((kept,), powers[kept] / powers[kept].sum())
    found, likely = drawn.bincount(minlength=7) / len(drawn), expected.gt(1e-30).nonzero()
    assert not found[expected < 1e-30].any() and {*drawn[:2].tolist()} == {int(likely.min()), int(likely.max())}
    assert ((found - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt() + 1e-4).all()


def test_text_ends_where_either_model_ends_it() -> None:
    student, teacher, tokenizer = make_family("llama", eos_token_id=7), make_family("llama"), _Tokenizer()
    teacher.generation_config.eos_token_id = [8, 50_256]  # which the tokenizer has not
    assert ends_of(student, teacher, object(), tokenizer=tokenizer) == {SEP, 7, 8}


class _Tokenizer:
    eos_token_id = SEP

    def __len__(self) -> int:
        return VOCAB
