"""The lab's streams that have their root and parent, which no paper has: the base's answers, in fewer steps."""

from __future__ import annotations

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss import load_model
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.options import MethodSpec
from specbench_ss.registry import load_method
from specbench_ss.suite import Question
from tests.tiny import thorough

AS_IN_THE_PAPERS, ALL_THAT_HELPS = "ss[k=3,n_draft=8,prune=off]", "ss[parent=on,k=3,n_draft=8,prune=off]"


@thorough
def test_they_give_the_bases_answers_with_a_quarter_more_tokens_a_step_than_the_papers_streams() -> None:
    """At equal nodes and training. Over the 39 questions of docs/results it is 1.40 times as many."""
    target, steps, answers = load_model("lab", device="cpu", dtype="float32"), {}, {}
    prompts = [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in asked()]
    for method in ("ar", AS_IN_THE_PAPERS, ALL_THAT_HELPS):
        decoder = load_method(MethodSpec.parse(method), target)
        made = [generate(decoder, prompt, StopParams(40, target.eos_ids), SamplingParams()) for prompt in prompts]
        answers[method] = [one.tokens for one in made]
        steps[method] = sum(len(one.steps) for one in made)
    assert answers[AS_IN_THE_PAPERS] == answers[ALL_THAT_HELPS] == answers["ar"]
    assert steps[AS_IN_THE_PAPERS] >= 1.25 * steps[ALL_THAT_HELPS]


def asked() -> list[Question]:
    """One question of every other category."""
    return list(questions(SPECBENCH_CATEGORIES[::2], "eval", 1))
