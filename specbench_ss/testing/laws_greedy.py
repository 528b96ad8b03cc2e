"""The laws of single answers. Each is a function of a case that returns what is wrong, or '' for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.method_spec import REFERENCE
from specbench_ss.testing.law import CLOSE, Case, Law, Subject
from specbench_ss.testing.watched_decoder import Seen, Unanswered

WARM = Sampling(1.0, seed=3)
REPEATING = (3, 4, 5, 3, 4, 6, 3, 4, 5, 3, 4)  # for those that look back
GREEDY = Case(REPEATING, 12)  # asked by most laws, and so answered once for all of them


def few(subject: Subject) -> Iterator[Case]:
    """Yield requests with forced acceptance, for blocks of many lengths, and one where the method accepts at T=0."""
    for i, prompt in enumerate((REPEATING, subject.random_prompt(19))):
        yield Case(prompt, 14, replace(WARM, seed=i), forced=True)
    yield GREEDY


def forced(subject: Subject) -> Iterator[Case]:
    """Yield requests with forced acceptance, for blocks of many lengths."""
    return (case for case in few(subject) if case.forced)


def own(subject: Subject) -> Iterator[Case]:
    """Yield requests where the method itself accepts."""
    yield GREEDY
    yield Case(REPEATING, 10, WARM)
    yield Case(subject.random_prompt(19), 10, Sampling(1.5, top_p=0.9, seed=1))


def many(subject: Subject) -> Iterator[Case]:
    """Yield greedy requests with prompts of many lengths."""
    yield GREEDY
    for seed, length in enumerate((2, 3, 6, 11, 20, 37)):
        yield Case(subject.random_prompt(length, seed), 8)


def asked(subject: Subject) -> Iterator[Case]:
    """Yield one request."""
    yield GREEDY


def answers(subject: Subject, case: Case) -> str:
    """Test that the answer has any token at all."""
    return "" if subject.watch(case).tokens else "the answer is empty"


def draft(subject: Subject, case: Case) -> str:
    """Test every draft of an answer."""
    try:
        steps = subject.watch(case).steps
    except Unanswered as unanswered:  # whether this is why is what is asked
        steps = unanswered.steps
        if steps and not isinstance(getattr(steps[-1].drafted, "tokens", None), torch.Tensor):
            raise  # the loop has said what it is
    for step in steps:
        if problem := misshapen(step, subject.target.vocab_size):
            return f"after {step.ids[len(case.prompt) :]}: {problem}"
    return ""


def misshapen(step: Seen, words: int) -> str:
    """Say what is wrong with a step's draft; '' for nothing."""
    drafted, kept = step.drafted, step.tree
    tokens = drafted.tokens
    if tokens.dtype != torch.int64 or tokens.shape != (len(drafted),):
        return f"tokens are {tokens.dtype} {list(tokens.shape)}, not int64 [{len(drafted)}]"
    if int(tokens[0]) != step.root:
        return f"node 0 is {int(tokens[0])}, the root is {step.root}"
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < words:
        return f"a vocabulary of {words} words has not all of {tokens.tolist()}"
    if kept is not None and not branches(kept) <= branches(drafted):
        return f"verified {sorted(branches(kept) - branches(drafted))[0]}, which was not drafted"
    if kept is not None and step.logits.shape != (len(kept), words):
        return f"logits {list(step.logits.shape)} for {len(kept)} verified nodes, not [{len(kept)}, {words}]"
    return "" if drafted.draft_probs is None else undrawn(drafted, drafted.draft_probs, words)


def undrawn(tree: DraftTree, q: torch.Tensor, words: int) -> str:
    """Say why the children cannot have been drawn from q; '' where they can."""
    if q.shape != (len(tree), words):
        return f"draft_probs {list(q.shape)} for {len(tree)} nodes, not [{len(tree)}, {words}]"
    for child, parent in enumerate(tree.shape.parents):
        if child and not abs(float(q[parent].sum()) - 1) < 1e-3:
            return f"draft_probs of node {parent} sum to {float(q[parent].sum()):.4f}"
        if child and not float(q[parent, tree.tokens[child]]) > 0:
            return f"node {child} is {int(tree.tokens[child])}, which draft_probs of its parent say is never drawn"
    return ""


def branches(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the token paths from the root to every node."""
    return {tuple(path) for path in ways(tree)}


def ways(tree: DraftTree) -> list[list[int]]:
    """Return, for every node, the tokens from the root's child down to it."""
    tokens, found = tree.tokens.tolist(), list[list[int]]([[]])
    for node, parent in enumerate(tree.shape.parents[1:], start=1):
        found.append([*found[parent], tokens[node]])
    return found


def rows(subject: Subject, case: Case) -> str:
    """Test that the cache needs no more rows than were promised."""
    excess, most = subject.watch(case).excess, subject.one.max_rows()
    told = f"{excess} rows were written behind those of the tokens before, max_rows() is {most}"
    return told if most is not None and excess > most else ""


def counts(subject: Subject, case: Case) -> str:
    """Test the counts of every step and of the whole answer."""
    trace = subject.watch(case)
    made = trace.generation
    for i, (seen, step) in enumerate(zip(trace.steps, made.steps, strict=True)):
        at, last = f"step {i + 1}", i == len(made.steps) - 1
        if problem := no_path(seen):
            return f"{at}: {problem}"
        if not 0 <= step.accepted <= step.verified <= step.nodes or not step.accepted <= step.depth <= step.nodes:
            return f"{at}: impossible counts {step}"
        if not last and step.tokens != step.accepted + 1:
            return f"{at} accepted {step.accepted} drafted tokens and kept {step.tokens}, not one more"
    if made.draft_calls < 0:
        return f"{made.draft_calls} calls of a draft model"
    made.check()
    return ""


def no_path(seen: Seen) -> str:
    """Say why the accepted nodes are not a path of the verified tree with one token after it; '' where they are."""
    tree, verdict = seen.tree, seen.verdict
    if tree is None or verdict is None:
        return "nothing was verified"
    path, parents = verdict.path, tree.shape.parents
    if path[:1] != [0] or any(not 0 < b < len(tree) or parents[b] != a for a, b in zip(path, path[1:], strict=False)):
        return f"accepted nodes {path} are no path from the root of parents {list(parents)}"
    expected = [*(int(tree.tokens[i]) for i in path[1:]), *verdict.next_token.tolist()]
    return "" if expected == verdict.tokens else f"nodes {path} and the next token are {expected}, not {verdict.tokens}"


def cache(subject: Subject, case: Case) -> str:
    """Test every row in every layer after every step."""
    trace = subject.watch(case)
    if not trace.steps:
        return ""
    prompt, last = trace.prompt, trace.steps[-1].ids
    fresh = subject.fresh_rows(prompt, last[len(prompt) : -1])  # [layers, 2, kv_heads, S, head_dim]
    for seen in trace.steps:
        n, after = len(seen.ids) - 1, f"after {seen.ids[len(prompt) :]}"
        layer = next((i for i, rows in enumerate(seen.lengths) if rows != n), None)
        if layer is not None:
            return f"{after}: layer {layer} holds {seen.lengths[layer]} rows for {n} tokens before the root"
        off = (seen.held - fresh[:, :, :, :n]).abs().amax((1, 2, 4))  # [layers, n]
        if not float(off.max()) <= CLOSE * (1 + float(fresh.abs().max())):
            layer, row = divmod(int(off.nan_to_num(torch.inf).argmax()), n)
            return f"{after}: row {row} of layer {layer} is off by {float(off[layer, row]):.2g}"
    return ""


def logits(subject: Subject, case: Case) -> str:
    """Test in every step the logits of the root, of the last node and of one in between."""
    trace = subject.watch(case)
    subject.logits(case.prompt, trace.tokens[:-1])  # the roots of all steps in one pass
    for seen in trace.steps:
        if seen.tree is None:
            continue
        paths, n = ways(seen.tree), len(seen.tree)
        for node in sorted({0, n // 2, n - 1}, reverse=True):  # the root lies on the way to the others
            answer = [*seen.ids[len(case.prompt) :], *paths[node]]
            expected = subject.logits(case.prompt, answer)
            off = float((seen.logits[node].float() - expected).abs().max())
            if not off <= CLOSE * (1 + float(expected.abs().max())):
                what = f"node {node} of parents {list(seen.tree.shape.parents)}"
                return f"{what}, after {answer}: logits are off by {off:.2g}"
    return ""


def greedy(subject: Subject, case: Case) -> str:
    """Test the answer token by token."""
    return subject.wrong_token(case.prompt, subject.watch(case).tokens)


def model(subject: Subject, case: Case) -> str:
    """Test that its next-token logits are the target's."""
    answer = subject.watch(case).tokens[:3]
    own, target = subject.logits(case.prompt, answer), subject.target.next_logits([*case.prompt, *answer])
    off = float((own - target).abs().max())
    close = off <= CLOSE * (1 + float(target.abs().max()))
    return "" if close else f"after {answer} its next_logits are off from the target's by {off:.2g}"


def another_model(subject: Subject) -> str:
    """Say why it may decode with another model than the target; '' where it may not."""
    reference = subject.one.reference_for(subject.one.options).label
    if not subject.one.lossless:
        return "it declares itself lossy"
    return "" if reference == REFERENCE else f"it is compared with {reference}"


def edges(subject: Subject) -> Iterator[Case]:
    """Yield requests with the shortest prompt and the longest ones."""
    context = subject.target.context_length
    yield Case(subject.random_prompt(1), 10)
    yield Case((0,), 6, WARM, forced=True)
    for missing in (1, 2):
        yield Case(subject.random_prompt(context - missing), 10)


def crossing(subject: Subject) -> Iterator[Case]:
    """Yield requests whose answers the end of the context cuts off."""
    context = subject.target.context_length
    for missing in (3, 4, 6, 9):
        yield Case(subject.random_prompt(context - missing), 20, replace(WARM, seed=missing), forced=True)
    for missing in (3, 7):
        yield Case(subject.random_prompt(context - missing), 20)


def within_context(subject: Subject, case: Case) -> str:
    """Test that the answer fills the context as far as there is room, and that it is still right."""
    made = subject.watch(case).generation
    room = subject.target.context_length - len(case.prompt)
    most = min(room, case.max_new_tokens)
    finish = "length" if case.max_new_tokens <= room else "context"
    if (len(made.tokens), made.finish) != (most, finish):
        return f"{len(made.tokens)} tokens ({made.finish}), not {most} ({finish})"
    return "" if case.forced or not subject.exact else subject.wrong_token(case.prompt, made.tokens)


def ending(subject: Subject) -> Iterator[Case]:
    """Yield requests for blocks of many lengths; a method with an acceptance rule of its own gets one that uses it."""
    yield Case(REPEATING, 12, WARM, forced=True)
    if type(subject.one).accept is not Decoder.accept:
        yield GREEDY


def ends(subject: Subject, case: Case) -> str:
    """Test everything that may end an answer, at many places of it."""
    whole = subject.watch(case).tokens
    for limits, expected, finish in endings(subject, case, whole):
        made = subject.watch(case, limits).generation
        if (made.tokens, made.finish) != (expected, finish):
            asked = f"max_new_tokens {limits.max_new_tokens}, end tokens {sorted(limits.stop_ids)}, stop strings "
            found = f"{made.tokens} ({made.finish}), not {expected} ({finish})"
            return f"the answer is {whole}; with {asked}{list(limits.stop_strings)} it is {found}"
        overshoot = 1 + sum(s.accepted + 1 for s in made.steps) - len(made.tokens)
        if made.overshoot != overshoot:
            return f"{made.overshoot} tokens beyond the end are counted, there were {overshoot}"
    return ""


def endings(subject: Subject, case: Case, whole: list[int]) -> Iterator[tuple[Limits, list[int], str]]:
    """Yield limits with what they should leave of the answer: its tokens and finish."""
    most, text = case.max_new_tokens, subject.target.decode_text
    for n in (n for n in (1, 2, 3, 5, 8) if n < len(whole)):
        yield Limits(n), whole[:n], "length"
    for token in dict.fromkeys(whole[1::4]):
        yield Limits(most, frozenset({token})), whole[: whole.index(token) + 1], "eos"
    for i in range(2, len(whole) - 1, 3):
        stop = text(whole[i : i + 1])[-1:] + text(whole[i + 1 : i + 2])[:1]  # from one token into the next
        if stop:
            n = next(n for n in range(1, len(whole) + 1) if stop in text(whole[:n]))
            yield Limits(most, stop_strings=(stop,)), whole[:n], "stop"


def not_exact(subject: Subject) -> str:
    """Say why its tokens are not compared with the model's; '' where they are."""
    return "" if subject.exact else "it declares itself lossy"


def unstated(subject: Subject) -> str:
    """Why it may write any number of rows: its cache grows."""
    return "it states no max_rows" if subject.one.max_rows() is None else ""


def no_fresh_rows(subject: Subject) -> str:
    """Say why its cache is not compared with a fresh pass; '' where it is."""
    if not subject.shows_rows:
        return "its next_logits does not fill a cache"
    lossy = type(subject.one).forward is not Decoder.forward and type(subject.one).next_logits is Decoder.next_logits
    return "it declares itself lossy and has a pass of its own" if lossy and not subject.exact else ""


LAWS = (
    Law("draft", "a draft is a tree of known tokens under the root, which draft_probs could have drawn", few, draft),
    Law("answers", "prompts are answered", few, answers),
    Law("rows", "no pass puts more rows through the target than max_rows() says", few, rows, unstated),
    Law("counts", "a path of the draft and the next token are accepted, each counted once", own, counts, on=("small",)),
    Law("cache", "after every step the cache holds what a fresh prefill would", few, cache, no_fresh_rows),
    Law("model", "a method that is compared with plain decoding of the target decodes with the target", asked, model,
        another_model),
    Law("logits", "the logits of each node are those of a fresh pass over the path to it", forced, logits, not_exact),
    Law("greedy", "at T=0 every token is the most probable one, by a fresh pass", many, greedy, not_exact,
        on=("large", "small")),
    Law("context", "a draft that would cross the end of the context does no harm", crossing, within_context,
        exact_length=True),
    Law("lengths", "prompts of one token, and of all the context but one, work as others do", edges,
        within_context, exact_length=True),
    Law("ends", "end tokens, stop strings and max_new_tokens end an answer exactly, inside a block too", ending, ends,
        on=("small",)),
)  # fmt: skip
