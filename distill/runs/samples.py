"""The samples of text that a record keeps: how the models of a run continue the same beginnings."""

from collections.abc import Mapping
from typing import Any

from distill.data.sequence_format import causal_format
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.samples import TEMPERATURE, choose_prompts, continue_with_each, num_new_tokens, text_of
from distill.runs.record import Sample, Samples
from distill.runs.run import Run


def draw_samples(run: Run, models: Mapping[str, Any], evaluator: Evaluator) -> Samples | None:
    """How teacher, student and baseline continue the same beginnings of the first set; all ranks call it.

    None where there are none, and on ranks other than 0.

    Args:
        models: by what they are called; members of several teachers, which are among them, write none.
    """
    sets, count = run.data.sets, run.config.evaluate.num_samples(run.pair.kind.causal)
    if not count or not sets or not run.pair.trained_head:
        return None
    max_tokens = num_new_tokens(sets[0].sequences.shape[1])
    prompts = choose_prompts(sets[0], count, causal_format(run.pair.tokenizer))
    if not prompts or not max_tokens:
        return None
    models = {name: model for name, model in models.items() if name in ("teacher", "student", "baseline")}
    written = continue_with_each(models, prompts, evaluator, max_tokens)
    if not written:
        return None
    tokenizer = run.pair.tokenizer
    texts = [
        Sample(text_of(prompt, tokenizer), {name: text_of(of[number], tokenizer) for name, of in written.items()})
        for number, prompt in enumerate(prompts)
    ]
    return Samples(sets[0].name, TEMPERATURE, max_tokens, texts)
