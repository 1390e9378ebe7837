"""Chat templates in the manner of published ones, each with a tiny tokenizer of its kind, and a conversation."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TALK = [
    {"role": "user", "content": "the hat"},
    {"role": "assistant", "content": "an ant"},
    {"role": "user", "content": "then\nthe cat?"},
    {"role": "assistant", "content": "And the\n\nhats. "},
]
SHORT = TALK[:2]
SYSTEM = [{"role": "system", "content": "Be an ant"}]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are an ant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN = (  # it takes reasoning out of all turns but the last
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IM = ["<|im_start|>", "<|im_end|>"]


def byte_level(template: str | None, special: list[str], **names: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "an", "Ġan"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("Ġ", "an")]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with(tokenizer, template, special, names)


def sentence_pieces(template: str, special: list[str | AddedToken], **names: str) -> PreTrainedTokenizerFast:
    """BPE with a mark before words, also before what follows a special token: as of Llama 2."""
    letters = sorted({*"abcdefghijklmnopqrstuvwxyzA?.\n[]/INST"})
    pieces = ["<unk>", "▁", *letters, "th", "the", "▁the", "an", "▁an", "▁["]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "n"), ("▁", "an"), ("▁", "[")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    return _with(tokenizer, template, special, names)


def _with(tokenizer: Any, template: str | None, special: list[Any], names: dict[str, str]) -> PreTrainedTokenizerFast:
    tokens = [AddedToken(name, special=True, normalized=False) if isinstance(name, str) else name for name in special]
    tokenizer.add_special_tokens(tokens)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.chat_template = template
    return made


def smollm2(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    return byte_level(template, ["<|endoftext|>", *IM], bos_token=IM[0], eos_token=IM[1], pad_token=IM[1])


def trimmed() -> PreTrainedTokenizerFast:
    """One whose offsets leave out blanks, so that a token of blanks alone has none."""
    made = smollm2()
    made.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


FAMILIES = {
    "chatml": smollm2(),
    "trimmed": trimmed(),
    "marked": smollm2(MARKED),
    "qwen": byte_level(QWEN, ["<|endoftext|>", *IM], eos_token="<|endoftext|>", pad_token="<|endoftext|>"),
    "llama2": sentence_pieces(LLAMA2, ["<s>", "</s>"], bos_token="<s>", eos_token="</s>"),
    "llama3": byte_level(
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
    ),
    "gemma": byte_level(
        GEMMA, ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
    ),
}  # fmt: skip
