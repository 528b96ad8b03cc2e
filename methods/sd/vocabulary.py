"""Whether two models speak of the same tokens: by what each id stands for, not by how many there are."""

from __future__ import annotations

from specbench_ss.engine.architectures import Outline


def mismatch(base: Outline, draft: Outline) -> str:
    """Where the draft's vocabulary differs from the base's, '' if nowhere.

    Embeddings padded to other widths, and tokens that only one of them has at ids that the other has not, do not count.
    Without tokenizers there are only the widths to go by.
    """
    if base.tokenizer is None or draft.tokenizer is None:
        sizes = (draft.vocab_size, base.vocab_size)
        return "" if sizes[0] == sizes[1] else f"{sizes[0]} tokens, the model has {sizes[1]}"
    ours, theirs = (o.tokenizer.get_vocab() for o in (base, draft))
    if ours == theirs:
        return ""
    of_id = {i: token for token, i in ours.items()}
    differing = [(i, token) for token, i in theirs.items() if of_id.get(i, token) != token]
    if not differing:
        return ""
    i, token = min(differing)
    return f"{len(differing)} ids stand for other tokens, id {i} for {token!r}, not {of_id[i]!r}"
