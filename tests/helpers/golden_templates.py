"""Write tests/golden/templates/NAME.txt, the result of each named template for the conversations, for people to read.

    PYTHONPATH=tests .venv/bin/python -m helpers.golden_templates

For each conversation: ids, supervised positions (from-to, the end excluded), and the text with supervised parts between
⟦ and ⟧. The tokenizer has the control tokens of all families, and a vocabulary trained here on one sentence, so ids
change only if a template does.
"""

from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helpers.conversations import CASES, ids_and_mask
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import RowFault
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.families.templates import ROWS
from surefoot.system.errors import InputError

FOLDER = Path(__file__).parents[1] / "golden" / "templates"
_WORDS = (
    "You may call one or more functions to assist with the user query. You are provided with function signatures "
    "within XML tags. For each function call, return a json object with function name and arguments. "
    "Given the following functions, please respond with a JSON for a function call with its proper arguments "
    "that best answers the given prompt. Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)


def golden_encoder() -> TextEncoder:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([_WORDS], trainer)
    control = dict.fromkeys(token for row in ROWS for token in row.control)
    bpe.add_special_tokens(["<s>", "</s>", *control])
    return TextEncoder(PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>"))


def golden(name: str, encoder: TextEncoder) -> str:
    """Return the content of a file."""
    template = make_template(name, encoder, (encoder.tokenizer.eos_token_id,))
    parts = []
    for case, conversation in CASES.items():
        try:
            ids, mask = ids_and_mask(template, encoder, conversation, encoder.bos_id)
        except (RowFault, InputError) as fault:
            parts.append(f"== {case}\nrefused: {fault}\n")
            continue
        places, text, position = [], "", 0
        for supervised, group in groupby(mask):
            end = position + len(list(group))
            shown = str(encoder.tokenizer.decode(ids[position:end]))
            text += f"⟦{shown}⟧" if supervised else shown
            places += [f"{position}-{end}"] if supervised else []
            position = end
        parts.append(f"== {case}\nids: {' '.join(map(str, ids))}\nlearned: {' '.join(places)}\n{text}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        (FOLDER / f"{row.name}.txt").write_text(golden(row.name, golden_encoder()), encoding="utf-8")
