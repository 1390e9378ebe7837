"""What a stranger does with a student's folder, without this package: the Auto classes and a pipeline.

Run by any Python that has transformers: `python elsewhere.py FOLDER ...` writes seen.json into each folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

TEXTS = ["the of and to in", "he was not so [MASK] the one, and she said that it was all the longest"]
IDS = [[2, 9, 10, 11, 17, 12, 13, 14, 20, 25, 15, 16, 17, 18, 30, 19, 20, 21, 22, 3]]


def look(folder: Path) -> dict[str, Any]:
    """Logits, token ids, decoded text, special tokens and a pipeline's answer."""
    config = transformers.AutoConfig.from_pretrained(folder)
    causal = config.architectures[0].endswith(("CausalLM", "LMHeadModel"))
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    # Version 4.57 takes torch's attention for Gemma 2 too, which leaves the soft cap of its scores out.
    capped = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model, loading = kind.from_pretrained(folder, output_loading_info=True, **capped)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    task = "text-generation" if causal else "fill-mask"
    ask = transformers.pipeline(task, model=str(folder), tokenizer=str(folder), device="cpu", model_kwargs=capped)
    with torch.no_grad():
        return {
            "class": type(model).__name__,
            "missing": sorted(map(str, loading["missing_keys"])),
            "logits": model.eval()(torch.tensor(IDS)).logits[0].tolist(),
            "batch_logits": model(**batch).logits[-1].tolist(),
            "inputs": {name: tensor.tolist() for name, tensor in sorted(batch.items())},
            "pair": tokenizer(*TEXTS).input_ids,
            "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]],
            "special": sorted(tokenizer.all_special_tokens),
            "longest": tokenizer.model_max_length,
            "answer": _generate(ask) if causal else [found["token"] for found in ask(TEXTS[1])],
        }


def _generate(ask: Any) -> str:
    return ask(TEXTS[0], max_new_tokens=5, do_sample=False)[0]["generated_text"]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            seen = look(Path(name))
        except Exception as error:
            seen = {"error": f"{type(error).__name__}: {error}"}
        (Path(name) / "seen.json").write_text(json.dumps(seen))
