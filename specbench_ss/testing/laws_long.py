"""The law of long requests: what holds for short ones must hold with a long prompt, many words and a long answer.

Acceptance is drawn at random, so that 200 tokens take few steps, and drafts are seen at T=0 as they would be in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specbench_ss.testing.law import CLOSE, Case, Law, Subject
from specbench_ss.testing.watched_decoder import Seen

WORDS, CONTEXT = 2600, 448  # of the model; the tokenizer has no more texts than some 2,700
PROMPT, ANSWER, AGAIN, OWN = 200, 200, 80, 44  # tokens: of prompt and answer; when asked again; accepted by itself
LOOKED_AT = 6  # steps whose logits are compared


def lengthy(subject: Subject) -> Iterator[Case]:
    """Yield one long request; only the first shape is asked it."""
    if subject.number == 0:
        yield Case(subject.random_prompt(PROMPT), ANSWER, forced=True)


def long(subject: Subject, case: Case) -> str:
    """Test that the long answer is right, and the same in the same steps when the same decoder is asked again."""
    decoder = subject.decoder()
    first = subject.watch(case, decoder=decoder)
    if problem := _wrong_logits(subject, case, first.steps) if subject.exact else "":
        return problem
    if subject.one.remembers:
        decoder.forget()
    again = subject.watch(Case(case.prompt, min(AGAIN, case.max_new_tokens), forced=True), decoder=decoder)
    if problem := _other_steps(first.steps, again.steps[:-1]):  # the last step may be cut
        return problem
    own = subject.watch(Case(case.prompt, min(OWN, case.max_new_tokens)))
    return subject.wrong_token(case.prompt, own.tokens) if subject.exact else ""


def _other_steps(first: Sequence[Seen], again: Sequence[Seen]) -> str:
    """Say in which step the second answer was drafted otherwise than the first; '' for none."""
    for i, (one, two) in enumerate(zip(first, again, strict=False), start=1):
        drafts = [[seen.ids, seen.drafted.tokens.tolist(), seen.drafted.shape.parents] for seen in (one, two)]
        if drafts[0] != drafts[1]:
            (_, was, _), (_, now, _) = drafts
            return f"step {i} drafted {was}; when the same decoder was asked the same again, {now}"
    return ""


def _wrong_logits(subject: Subject, case: Case, steps: Sequence[Seen]) -> str:
    """Say where the root's logits are not those of a fresh pass; '' for nowhere. Some steps are looked at."""
    for seen in reversed(steps[:: max(1, len(steps) // LOOKED_AT)]):  # the longest first: it shows the others too
        answer = seen.ids[len(case.prompt) :]
        expected = subject.logits(case.prompt, answer)
        off = float((seen.logits[0].float() - expected).abs().max())
        if not off <= CLOSE * (1 + float(expected.abs().max())):
            return f"after {len(answer)} tokens the root's logits are off by {off:.2g}"
    return ""


LAWS = (
    Law("long", f"an answer of {ANSWER} tokens to a prompt of {PROMPT}, of {WORDS:,} words, is right, and the same "
        "in the same steps when asked again", lengthy, long, on=("long",)),
)  # fmt: skip
