"""Rewards as TRL calls them, for texts and for conversations."""


def vowels(completions, worth, **fields):
    """Told apart by the letters; each prompt has its own worth."""
    assert len(fields["prompts"]) == len(completions) == len(fields["completion_ids"])
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [value * sum(letter in "aeiou" for letter in text) / 4 for value, text in zip(worth, texts, strict=True)]


def short(completions, completion_ids=None, **fields):
    """Says nothing of answers that begin with an even id."""
    return [None if ids[0] % 2 == 0 else -len(ids) / 8 for ids in completion_ids]
