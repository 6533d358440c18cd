"""A small byte-level BPE tokenizer with a chat template, the same one whatever the seed and the machine."""

from __future__ import annotations

from pathlib import Path

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 4; the models' pad, bos and eos ids are 0, 1 and 2."""

LEARNED = 500
"""Size of the learned vocabulary; the ids after it are fillers, so that every id a model emits has a text."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join('') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CORPUS = """
The attention part of a transformer reads the words that came before and decides which of them matter now. The
feed-forward part then works on every word alone. A mixture of experts has many feed-forward networks and a router
that sends each word to a few of them. When the two parts live on different machines, rows of numbers travel from one
to the other and back for every layer. What is the capital of France? The capital of France is Paris. Write a story
about a small model that wanted to be larger. Once upon a time there was a model with only four layers. It could not
say anything that made sense, but it said it quickly, and people who tested servers were happy with that.
How many is two and three? Two and three are five. Please answer the question in one sentence, and explain why.

def main(arguments):
    import os, sys, json
    for name in sorted(arguments):
        if name.startswith("--"):
            continue
        with open(name) as file:
            print(json.dumps({"name": name, "size": len(file.read())}))
    return 0

class Model(object):
    def __init__(self, layers, hidden_size=256, experts=8):
        self.layers = layers
        self.hidden_size = hidden_size
        self.experts = [Expert(hidden_size) for index in range(experts)]

    def forward(self, hidden_states, residual=None):
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return hidden_states + residual
"""


def save(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template for ``vocab_size`` ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(LEARNED, vocab_size),
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    known = bpe.get_vocab_size()
    bpe.add_tokens([AddedToken(f"<|id_{i}|>", normalized=False) for i in range(known, vocab_size)])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
