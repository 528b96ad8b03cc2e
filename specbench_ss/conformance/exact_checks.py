"""Checks of greedy decoding, of several prompts, of descriptions and of long requests.

Acceptance is drawn at random, so that 200 tokens take few steps, and drafts are seen at T=0 as they would be in a
run.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from specbench_ss.conformance.harness import (
    CLOSE,
    Case,
    Check,
    DecodingFailed,
    StepRecord,
    Subject,
    Trace,
    counts_of,
    max_difference,
    seeded,
)
from specbench_ss.engine.batching import BatchEngine, BatchRequest, RequestOutput, check_together
from specbench_ss.engine.decoder import Decoder, Generation
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.options import REFERENCE, describe_options
from specbench_ss.runs.manifest import plain

WARM = SamplingParams(1.0, seed=3)
REPEATING = (3, 4, 5, 3, 4, 6, 3, 4, 5, 3, 4)  # for those that look back
LOSSY = "the method declares lossless = False"  # exempts from checks of exact outputs
GREEDY = Case(REPEATING, 12)  # asked by most checks, and so answered once for all of them


def few_cases(subject: Subject) -> Iterator[Case]:
    """Yield requests with forced acceptance, for blocks of many lengths, and one where the method accepts at T=0."""
    for i, prompt in enumerate((REPEATING, subject.random_prompt(19))):
        yield Case(prompt, 14, replace(WARM, seed=i), forced=True)
    yield GREEDY


def forced_cases(subject: Subject) -> Iterator[Case]:
    """Yield requests with forced acceptance, for blocks of many lengths."""
    return (case for case in few_cases(subject) if case.forced)


def accepting_cases(subject: Subject) -> Iterator[Case]:
    """Yield requests where the method itself accepts."""
    yield GREEDY
    yield Case(REPEATING, 10, WARM)
    yield Case(subject.random_prompt(19), 10, SamplingParams(1.5, top_p=0.9, seed=1))


def greedy_cases(subject: Subject) -> Iterator[Case]:
    """Yield greedy requests with prompts of many lengths."""
    yield GREEDY
    for seed, length in enumerate((2, 3, 6, 11, 20, 37)):
        yield Case(subject.random_prompt(length, seed), 8)


def one_case(subject: Subject) -> Iterator[Case]:
    """Yield one request."""
    yield GREEDY


def outputs(subject: Subject, case: Case) -> str:
    """Test that the output has any token at all."""
    return "" if subject.watch(case).tokens else "the output is empty"


def draft(subject: Subject, case: Case) -> str:
    """Test every draft of an answer."""
    try:
        steps = subject.watch(case).steps
    except DecodingFailed as failure:  # the draft may be the cause, which is tested below
        steps = failure.steps
        if steps and not isinstance(getattr(steps[-1].drafted, "tokens", None), torch.Tensor):
            raise  # the error names the draft already
    for step in steps:
        if problem := tree_problem(step, subject.target.vocab_size):
            return f"after {step.ids[len(case.prompt) :]}: {problem}"
    return ""


def tree_problem(step: StepRecord, vocab_size: int) -> str:
    """Return what is wrong with a step's draft; '' for nothing."""
    drafted, kept = step.drafted, step.tree
    tokens = drafted.tokens
    if tokens.dtype != torch.int64 or tokens.shape != (len(drafted),):
        return f"tokens are {tokens.dtype} {list(tokens.shape)}, not int64 [{len(drafted)}]"
    if int(tokens[0]) != step.root:
        return f"node 0 is {int(tokens[0])}, the root is {step.root}"
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        return f"a vocabulary of {vocab_size} tokens has not all of {tokens.tolist()}"
    if kept is not None and (made_up := {*token_paths(kept)} - {*token_paths(drafted)}):
        return f"verified {min(made_up)}, which was not drafted"
    if kept is not None and step.logits.shape != (len(kept), vocab_size):
        return f"logits {list(step.logits.shape)} for {len(kept)} verified nodes, not [{len(kept)}, {vocab_size}]"
    return "" if drafted.draft_probs is None else draft_probs_problem(drafted, drafted.draft_probs, vocab_size)


def draft_probs_problem(tree: DraftTree, q: torch.Tensor, vocab_size: int) -> str:
    """Return why the children cannot have been drawn from q; '' where they can."""
    if q.ndim != 2 or not 0 < len(q) <= len(tree) or q.shape[1] != vocab_size:
        return f"draft_probs {list(q.shape)} for {len(tree)} nodes, not [{len(tree)} or fewer, {vocab_size}]"
    for child, parent in enumerate(tree.topology.parents):
        if parent >= len(q):  # a deterministic candidate
            continue
        if child and not abs(float(q[parent].sum()) - 1) < 1e-3:
            return f"draft_probs of node {parent} sum to {float(q[parent].sum()):.4f}"
        if child and not float(q[parent, tree.tokens[child]]) > 0:
            return f"node {child} is {int(tree.tokens[child])}, whose probability in draft_probs of its parent is 0"
    return ""


def token_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return, for every node, the tokens from the root's child down to it."""
    tokens, found = tree.tokens.tolist(), list[tuple[int, ...]]([()])
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        found.append((*found[parent], tokens[node]))
    return found


def rows(subject: Subject, case: Case) -> str:
    """Test that the cache needs no more rows than were promised."""
    extra, most = subject.watch(case).extra_rows, subject.one.max_tokens_per_step()
    if most is None or extra <= most:
        return ""
    return f"{extra} rows were written after those of earlier tokens, max_tokens_per_step() is {most}"


def counts(subject: Subject, case: Case) -> str:
    """Test the counts of every step and of the whole answer."""
    trace = subject.watch(case)
    made = trace.generation
    for i, (seen, step) in enumerate(zip(trace.steps, made.steps, strict=True)):
        at, last = f"step {i + 1}", i == len(made.steps) - 1
        if problem := path_problem(seen):
            return f"{at}: {problem}"
        if (
            not 0 <= step.accepted_tokens <= step.verified_nodes <= step.draft_nodes
            or not step.accepted_tokens <= step.draft_depth <= step.draft_nodes
        ):
            return f"{at}: impossible counts {step}"
        if not last and step.tokens != step.accepted_tokens + 1:
            return f"{at} accepted {step.accepted_tokens} drafted tokens and kept {step.tokens}, not one more"
    if made.num_draft_forwards < 0:
        return f"{made.num_draft_forwards} calls of a draft model"
    made.check()
    return ""


def path_problem(seen: StepRecord) -> str:
    """Return why the accepted nodes are not a path of the verified tree with one token after it; '' where they are."""
    tree, result = seen.tree, seen.result
    if tree is None or result is None:
        return "nothing was verified"
    path, parents = result.path, tree.topology.parents
    if path[:1] != [0] or any(not 0 < b < len(tree) or parents[b] != a for a, b in zip(path, path[1:], strict=False)):
        return f"accepted nodes {path} are no path from the root of parents {list(parents)}"
    expected = [*(int(tree.tokens[i]) for i in path[1:]), *result.next_token.tolist()]
    return "" if expected == result.tokens else f"nodes {path} and the next token are {expected}, not {result.tokens}"


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
        errors = (seen.cached - fresh[:, :, :, :n]).abs().amax((1, 2, 4)).nan_to_num(torch.inf)  # [layers, n]
        if float(errors.max()) > CLOSE * (1 + float(fresh.abs().max())):
            layer, row = divmod(int(errors.argmax()), n)
            return f"{after}: row {row} of layer {layer} is off by {float(errors[layer, row]):.2g}"
    return ""


def logits(subject: Subject, case: Case) -> str:
    """Test in every step the logits of the root, of the last node and of one in between."""
    trace = subject.watch(case)
    subject.logits(case.prompt, trace.tokens[:-1])  # the roots of all steps in one pass
    for seen in trace.steps:
        if seen.tree is None:
            continue
        paths, n = token_paths(seen.tree), len(seen.tree)
        for node in sorted({0, n // 2, n - 1}, reverse=True):  # the root lies on the way to the others
            answer = [*seen.ids[len(case.prompt) :], *paths[node]]
            expected = subject.logits(case.prompt, answer)
            if error := max_difference(seen.logits[node], expected):
                what = f"node {node} of parents {list(seen.tree.topology.parents)}"
                return f"{what}, after {answer}: logits are off by {error:.2g}"
    return ""


def greedy(subject: Subject, case: Case) -> str:
    """Test the answer token by token."""
    return subject.wrong_token(case.prompt, subject.watch(case).tokens)


def model(subject: Subject, case: Case) -> str:
    """Test that its next-token logits are the target's."""
    answer = subject.watch(case).tokens[:3]
    own, target = subject.logits(case.prompt, answer), subject.target.next_logits([*case.prompt, *answer])
    error = max_difference(own, target)
    return f"after {answer} its next_logits are off from the target's by {error:.2g}" if error else ""


def another_model(subject: Subject) -> str:
    """Return why it may decode with another model than the target; '' where it may not."""
    reference = subject.one.baseline_for(subject.one.options).name
    if not subject.one.lossless:
        return LOSSY
    return "" if reference == REFERENCE else f"its baseline is {reference}"


def length_cases(subject: Subject) -> Iterator[Case]:
    """Yield requests with the shortest prompt and the longest ones."""
    context = subject.target.context_length
    yield Case(subject.random_prompt(1), 10)
    yield Case((0,), 6, WARM, forced=True)
    for missing in (1, 2):
        yield Case(subject.random_prompt(context - missing), 10)


def context_cases(subject: Subject) -> Iterator[Case]:
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


def stop_cases(subject: Subject) -> Iterator[Case]:
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
            return f"the output is {whole}; with {asked}{list(limits.stop_strings)} it is {found}"
        tokens_past_stop = 1 + sum(s.accepted_tokens + 1 for s in made.steps) - len(made.tokens)
        if made.tokens_past_stop != tokens_past_stop:
            return f"{made.tokens_past_stop} tokens past the stop are counted, there were {tokens_past_stop}"
    return ""


def endings(subject: Subject, case: Case, whole: list[int]) -> Iterator[tuple[StopParams, list[int], str]]:
    """Yield limits with what they should leave of the answer: its tokens and finish."""
    most, text = case.max_new_tokens, subject.target.decode_text
    for n in (n for n in (1, 2, 3, 5, 8) if n < len(whole)):
        yield StopParams(n), whole[:n], "length"
    for token in dict.fromkeys(whole[1::4]):
        yield StopParams(most, frozenset({token})), whole[: whole.index(token) + 1], "eos"
    for i in range(2, len(whole) - 1, 3):
        stop = text(whole[i : i + 1])[-1:] + text(whole[i + 1 : i + 2])[:1]  # from one token into the next
        if stop:
            n = next(n for n in range(1, len(whole) + 1) if stop in text(whole[:n]))
            yield StopParams(most, stop_strings=(stop,)), whole[:n], "stop"


def not_exact(subject: Subject) -> str:
    """Return why its tokens are not compared with the model's; '' where they are."""
    return "" if subject.exact else LOSSY


def no_fresh_rows(subject: Subject) -> str:
    """Return why its cache is not compared with a fresh pass; '' where it is."""
    if not subject.shows_rows:
        return "next_logits does not fill a cache"
    lossy = type(subject.one).forward is not Decoder.forward and type(subject.one).next_logits is Decoder.next_logits
    return f"{LOSSY}, and it has its own forward pass" if lossy and not subject.exact else ""


SEEDS = 12
LATER = 4  # tokens that one of several requests is longer than the others


def sampled_cases(subject: Subject) -> Iterator[Case]:
    """Yield a request with sampling."""
    yield Case(REPEATING[:5], 6, SamplingParams(1.3, seed=7))


def seed(subject: Subject, case: Case) -> str:
    """Test that the process's own random generators do not matter, and that seeds matter beyond the first token.

    The first token is drawn by the core.
    """
    one, two = (_at_global_seed(i, subject, case) for i in (1, 2))
    if problem := _differing(one.generation, two.generation, "with the process's generators at another point"):
        return problem
    if not subject.exact or case.max_new_tokens < 3:
        return ""
    after: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for i in range(SEEDS):
        first, *others = subject.watch(replace(case, sampling=replace(case.sampling, seed=i))).tokens
        after[first].add(tuple(others))
        if len(after[first]) > 1:
            return ""
    return f"{SEEDS} seeds gave only {dict(after)}"


def _at_global_seed(number: int, subject: Subject, case: Case) -> Trace:
    state, decoder = random.getstate(), subject.decoder()
    with seeded(number):
        random.seed(number)
        try:
            return subject.watch(case, decoder=decoder)
        finally:
            random.setstate(state)


def _differing(one: Generation, two: Generation, when: str, steps: bool = True) -> str:
    if one.tokens != two.tokens:
        return f"{one.tokens}; {when} {two.tokens}"
    if steps and counts_of(one) != counts_of(two):
        names = "nodes, verified, depth and accepted"
        return f"the same tokens in other steps: {names} are {counts_of(one)}; {when} {counts_of(two)}"
    return ""


def repeated_cases(subject: Subject) -> Iterator[Case]:
    """Yield requests that repeat earlier text.

    What a method remembers may change only its steps, so that one is greedy.
    """
    yield GREEDY
    if not subject.one.stateful:
        yield Case(subject.random_prompt(6), 8, SamplingParams(0.9, seed=2))


def memory(subject: Subject, case: Case) -> str:
    """Test that a decoder that has answered other prompts, and this one, answers as a new one does."""
    used, alone = subject.decoder(), subject.watch(case)
    others = ((*case.prompt, *alone.tokens, *case.prompt), subject.random_prompt(9, seed=1), case.prompt)
    for i, prompt in enumerate(others):
        subject.watch(Case(prompt[:60], 9, replace(WARM, seed=i), forced=True), decoder=used)
    again, stateful = subject.watch(case, decoder=used).generation, subject.one.stateful
    problem = _differing(alone.generation, again, "after other prompts", steps=not stateful)
    if problem or not stateful:
        return problem
    used.reset_history()
    again = subject.watch(case, decoder=used).generation
    return _differing(alone.generation, again, "after other prompts and reset_history()")


def together(subject: Subject, case: Case) -> str:
    """Test that an answer is the same next to others, of which some end earlier and some later."""
    lengths = (2, case.max_new_tokens, 3, case.max_new_tokens + LATER)
    prompts = (subject.random_prompt(3, seed=1), case.prompt, subject.random_prompt(9, seed=2), case.prompt[:4])
    requests = [BatchRequest(p, StopParams(n), case.sampling) for p, n in zip(prompts, lengths, strict=True)]
    found: dict[int, RequestOutput] = {}
    BatchEngine(subject.decoder(), 3).answer(requests, found.__setitem__)
    for place, request in enumerate(requests):
        alone = subject.watch(Case(tuple(request.prompt), request.limits.max_new_tokens, case.sampling)).generation
        made, error = found[place].generation, found[place].error
        prefix = (
            f"prompt {list(request.prompt)}, at most {request.limits.max_new_tokens} tokens, next to three others: "
        )
        if made is None:
            return prefix + str(error)
        if problem := _differing(made, alone, "alone"):
            itself = subject.one.clone() is subject.one
            hint = (
                "its clone() returns the method itself" if itself else "the result of clone() may share state with it"
            )
            return f"{prefix}{problem}; {hint}"
    return ""


def not_together(subject: Subject) -> str:
    """Return why its requests are never decoded together with others."""
    try:
        check_together(subject.one)
    except UserError as e:
        return str(e)
    return ""


def untouched(subject: Subject, case: Case) -> str:
    """Test that the target's logits are, to the last bit, what they were before the method was made."""
    subject.watch(case)
    change = float((subject.tiny_model.now() - subject.tiny_model.before).abs().max())
    return "" if change == 0 else f"the target's logits changed by {change:.2g}"


def tuning_cases(subject: Subject) -> Iterator[Case]:
    """Yield one request."""
    if subject.whole:
        yield GREEDY


def search_space(subject: Subject, case: Case) -> str:
    """Test every value of every option that tuning may try."""
    decoder = subject.decoder()
    for option, values in decoder.search_space().items():
        for value in values:
            try:
                other = decoder.with_options(replace(decoder.options, **{option: value}))
            except UserError:  # tuning leaves such a value out too
                continue
            tokens = subject.watch(case, decoder=other).tokens
            if problem := subject.wrong_token(case.prompt, tokens):
                return f"with {option}={value}: {problem}"
    return ""


def metadata(subject: Subject, case: Case) -> str:
    """Test name and options, and the description that goes into the manifest."""
    decoder, again = subject.decoder(), subject.decoder()
    if problem := listing_problem(decoder):
        return problem
    first, second = plain(decoder.metadata()), plain(again.metadata())
    if first != second:
        return f"metadata() of two equal instances: {first} and {second}"
    subject.watch(case, decoder=decoder)
    if plain(decoder.metadata()) != first:
        return f"metadata() was {first}, and after an output {plain(decoder.metadata())}"
    return ""


def listing_problem(decoder: Decoder) -> str:
    """Return what `ssbench methods` cannot show of the method; '' where it can show everything."""
    kind = type(decoder)
    for name in ("name", "summary"):
        text = getattr(kind, name, None)
        if not isinstance(text, str) or not text or "\n" in text:
            return f"{name} is {text!r}, not one line of text"
    if not dataclasses.is_dataclass(decoder.options):
        return f"its options are {type(decoder.options).__name__}, not a dataclass"
    if decoder.baseline_for(decoder.options).name == kind.name != REFERENCE:
        return f"baseline_for names {kind.name} itself; name {REFERENCE!r}, or an autoregressive method of its model"
    silent = [option.name for option in describe_options(kind.Options) if not option.help]
    if silent:
        return f'option {silent[0]} has no metadata={{"help": ...}}'
    helps = [option.help for option in describe_options(kind.Options)]
    if kind.lossless and not decoder.lossless and not any("loss" in text for text in helps):
        return "an option made it lossy, but no option's help contains 'lossy'"
    return ""


WORDS, CONTEXT = 10_000, 512  # of the model
PROMPT = random.SystemRandom().randint(201, 260)  # tokens, drawn: a method must be right at every length
ANSWER, AGAIN, OWN = 200, 80, 44  # tokens: of the answer; when asked again; accepted by itself
LOOKED_AT = 6  # steps whose logits are compared


def long_cases(subject: Subject) -> Iterator[Case]:
    """Yield one long request; only the first instance is asked it."""
    if subject.number == 0:
        yield Case(subject.random_prompt(PROMPT), ANSWER, forced=True)


def long(subject: Subject, case: Case) -> str:
    """Test that the long answer is right, and the same in the same steps when the same decoder is asked again."""
    decoder = subject.decoder()
    first = subject.watch(case, decoder=decoder)
    if problem := _wrong_logits(subject, case, first.steps) if subject.exact else "":
        return problem
    if subject.one.stateful:
        decoder.reset_history()
    again = subject.watch(Case(case.prompt, min(AGAIN, case.max_new_tokens), forced=True), decoder=decoder)
    if problem := _other_steps(first.steps, again.steps[:-1]):  # the last step may be cut
        return problem
    own = subject.watch(Case(case.prompt, min(OWN, case.max_new_tokens)))
    return subject.wrong_token(case.prompt, own.tokens) if subject.exact else ""


def _other_steps(first: Sequence[StepRecord], again: Sequence[StepRecord]) -> str:
    """Return in which step the second answer was drafted otherwise than the first; '' for none."""
    for i, (one, two) in enumerate(zip(first, again, strict=False), start=1):
        drafts = [[seen.ids, seen.drafted.tokens.tolist(), seen.drafted.topology.parents] for seen in (one, two)]
        if drafts[0] != drafts[1]:
            (_, was, _), (_, now, _) = drafts
            return f"step {i} drafted {was}; the repeated request drafted {now}"
    return ""


def _wrong_logits(subject: Subject, case: Case, steps: Sequence[StepRecord]) -> str:
    """Return where the root's logits are not those of a fresh pass; '' for nowhere. Some steps are looked at."""
    for seen in reversed(steps[:: max(1, len(steps) // LOOKED_AT)]):  # the longest first: it shows the others too
        answer = seen.ids[len(case.prompt) :]
        if error := max_difference(seen.logits[0], subject.logits(case.prompt, answer)):
            return f"after {len(answer)} tokens the root's logits are off by {error:.2g}"
    return ""


EXACT_CHECKS = (
    Check("draft", "drafts are trees under the root, of tokens of the vocabulary; draft_probs are valid", few_cases,
        draft),
    Check("outputs", "every prompt has an output", few_cases, outputs),
    Check("rows", "no pass adds more query tokens than max_tokens_per_step() declares", few_cases, rows,
        lambda subject: "max_tokens_per_step() is None" if subject.one.max_tokens_per_step() is None else ""),
    Check("counts", "accepted tokens are a path of the draft, plus one token; all counts agree", accepting_cases,
        counts, on=("small",)),
    Check("cache", "after every step the KV cache equals that of a fresh prefill", few_cases, cache, no_fresh_rows),
    Check("model", "a method whose baseline is `ar` has the target's next-token logits", one_case, model,
        another_model),
    Check("logits", "the logits of every node equal those of a fresh pass over its path", forced_cases, logits,
        not_exact),
    Check("greedy", "at temperature 0 every token is the argmax of a fresh pass", greedy_cases, greedy, not_exact,
        on=("large", "small")),
    Check("context", "outputs are correct up to the context length, with drafts that exceed it", context_cases,
        within_context),
    Check("lengths", "the shortest prompt (1 token) and the longest ones (context length - 1) work", length_cases,
        within_context),
    Check("ends", "end tokens, stop strings and max_new_tokens stop at the exact token, inside a draft too", stop_cases,
        ends, on=("small",)),
    Check("seed", "equal seeds give equal outputs, other seeds other outputs", sampled_cases, seed, on=("small",)),
    Check("memory", "earlier requests do not change the output", repeated_cases, memory, on=("small",)),
    Check("together", "concurrent requests have the outputs of single ones", repeated_cases, together, not_together),
    Check("target", "the target's logits are unchanged", one_case, untouched),
    Check("search_space", "no value in search_space changes the output", tuning_cases, search_space,
        lambda subject: not_exact(subject) or ("" if subject.one.search_space() else "search_space is empty"),
        on=("small",)),
    Check("long", f"prompt and output of {PROMPT} tokens, vocabulary of {WORDS:,}: correct logits, repeatable drafts",
        long_cases, long, on=("long",)),
    Check("description", "name, summary, help and metadata exist; help of lossy options contains `lossy`", one_case,
        metadata, on=("small",)),
)  # fmt: skip
