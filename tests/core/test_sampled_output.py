"""The test of sampled tokens: biased methods are invalid in a run, honest ones are not, and false alarms are rare."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console
from torch import Tensor

from specbench_ss.bench.ray import MemoryStore, shards
from specbench_ss.bench.runner import run
from specbench_ss.bench.sampled_tokens import compare, judge_sampled, positions, proof_seed
from specbench_ss.bench.schedule import Sample
from specbench_ss.cli.printing import print_verbose
from specbench_ss.cli.shared import found
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import Offer, candidates, offers
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.options import MethodSpec
from specbench_ss.reports.html.report import page as page_of
from specbench_ss.reports.summary_files import MarkdownReport
from specbench_ss.results import ranking as verdict_text
from specbench_ss.results.analysis import analyse, load_run
from specbench_ss.results.checks import checks
from specbench_ss.results.quality import ENOUGH, sampling_tests
from specbench_ss.results.summary import SummaryRow, summarise
from specbench_ss.runs.config import OutputOptions, Recording, RunConfig
from specbench_ss.runs.manifest import manifest_for, method_entry
from specbench_ss.runs.records import Run, read_output_match
from specbench_ss.runs.run_dir import RunDir, read_run
from specbench_ss.stats.betting import BIASED, OUTSIDE, PIT_BINS, SampledTokens, bound, pool
from specbench_ss.suite import Question, Suite, SuiteData
from tests.core.test_runner import Recorder
from tests.fabricated import paced
from tests.planted_samplers import RULES, Drafting, bigram_target
from tests.tiny import THOROUGH, few, thorough

TOKENS = 100  # of an answer
PLAIN, FILTERED = SamplingParams(1.0), SamplingParams(0.7, top_p=0.9)


class Lossy(Drafting):
    """Promise nothing."""

    lossless = False


class Asked(Suite):
    """Ask questions of one letter."""

    name, summary, categories = "asked", "one letter each", ("x",)

    def load(self, request: Any) -> SuiteData:
        return suite_data(1)

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        return None


@cache
def target() -> Target:
    made: Any = bigram_target()
    made.encode_chat = lambda messages, *_: [3 + len(messages[-1]["content"])]
    made.decode_text = lambda ids: ""
    made.eos_ids = frozenset()
    return made  # type: ignore[no-any-return]


@cache
def suite_data(questions: int) -> SuiteData:
    asked = tuple(Question(f"q{i}", "x", ("x" * i,)) for i in range(questions))
    return SuiteData("asked", "generated", asked)


def measured(
    path: Path, decoders: dict[str, Decoder], sampling: SamplingParams, questions: int, resume: bool = False
) -> Run:
    """Return a run of these methods on the small model."""
    data = suite_data(questions)
    decoders = {"ar": Autoregressive(target()), **decoders}
    config = RunConfig(
        tuple(map(MethodSpec, decoders)),
        warmup=0,
        max_new_tokens=TOKENS,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=(),
    )
    where = OutputOptions(path, resume, recording=Recording(record_drafts="0", telemetry=0))
    entries = [method_entry(label, decoder) for label, decoder in decoders.items()]
    with RunDir.open(where, manifest_for(config, target(), data, entries, []), data.questions) as run_dir:
        run(config, target(), Asked(), data, decoders, run_dir, Recorder(), where)
    return read_run(path)


def row_of(done: Run, label: str) -> SummaryRow:
    return next(row for row in summarise(done) if row.method == label and row.task == "overall")


CASES = (  # what is planted, how answers are sampled, questions: at least the tokens of docs/design/sampled-output.md
    (("everything", "greedy", "doubled"), PLAIN, 6),
    (("everything", "greedy", "doubled", "unseen"), FILTERED, 6),
    (("best_of_two", "unseen"), PLAIN, 16),
    (("best_of_two", "warm_bonus"), FILTERED, 20),
)


@few(1)
@pytest.mark.parametrize(("names", "sampling", "questions"), CASES if THOROUGH else CASES[:2])
def test_a_biased_method_has_no_speedup(
    tmp_path: Path, names: tuple[str, ...], sampling: SamplingParams, questions: int
) -> None:
    decoders: dict[str, Decoder] = {name: Drafting(target(), RULES[name]) for name in names}
    done = measured(tmp_path / "r", decoders, sampling, questions)
    bias = {label: test.bias for label, test in sampling_tests(done).items()}
    assert bias.pop("ar") in ("no bias found", "too few tokens")
    assert set(bias.values()) == {"biased"}
    made = checks(done, summarise(done))
    stated = next(check for check in made if check.name == "biased")
    assert stated.state == "wrong" and {line.partition(":")[0] for line in stated.lines} == set(names)
    assert len(found(made, ["biased"])) == 1
    for name in names:
        row = row_of(done, name)
        assert row.comparison == "invalid" and row.speedup is None
        assert verdict_text.output(row, done.manifest["config"]).startswith("biased")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of an honest method with enough tokens for the test."""
    return measured(tmp_path_factory.mktemp("runs") / "r", {"honest": Drafting(target())}, PLAIN, questions=16)


@thorough
def test_an_honest_method_passes(honest: Run) -> None:
    done = honest
    row = row_of(done, "honest")
    assert verdict_text.output(row, done.manifest["config"]) == "no bias found (1,600)"
    assert next(check for check in checks(done, summarise(done)) if check.name == "biased").state == "ok"


def test_a_method_that_promises_nothing_is_not_invalid(tmp_path: Path) -> None:
    done = paced(measured(tmp_path / "r", {"lossy": lossy()}, PLAIN, questions=4))
    row = row_of(done, "lossy")
    assert row.bias == "biased" and row.comparison != "invalid" and row.speedup is not None
    assert verdict_text.output(row, done.manifest["config"]) == "not promised, biased"


@thorough
def test_the_report_and_the_table_show_the_test(tmp_path: Path) -> None:
    done = measured(tmp_path / "r", {"greedy": Drafting(target(), RULES["greedy"])}, PLAIN, questions=4)
    page = page_of(analyse(done))
    row = next(row for row in page["ranking"] if row.label == "greedy")
    assert ("invalid", "bad") in row.tags and "biased (400)" in (row.cells["output"], *(text for text, _ in row.tags))
    names = [column.title for column in page["output_match"].columns]
    cells = dict(zip(names, page["output_match"].rows[1], strict=True))
    assert cells["tokens"].text == "400" and float(cells["p at most"].sort) < 1e-6
    console = Console(width=120)
    with console.capture() as reported:
        print_verbose(analyse(done), console)
    assert "biased (400)" in reported.get() and "do not follow" in reported.get()
    assert "biased (400)" in MarkdownReport().content(analyse(done)).decode()
    table = analyse(done).summary(all=True).query("task == 'overall' and method == 'greedy'").iloc[0]
    assert (table["bias"], table["bias_tokens"], table["comparison"]) == ("biased", 400, "invalid")
    assert load_run(done.path).write_parquet() == ""
    assert pd.read_parquet(done.path / "output_match.parquet")["sampled_pit"].map(sum).sum() == 800


def test_few_tokens_are_no_pass(tmp_path: Path) -> None:
    done = measured(tmp_path / "r", {"honest": Drafting(target())}, PLAIN, questions=1)
    row = row_of(done, "honest")
    assert verdict_text.output(row, done.manifest["config"]) == f"too few tokens ({row.bias_tokens})"
    made = checks(done, summarise(done))
    assert next(check for check in made if check.name == "biased").state == "not checked"


def test_every_sampled_answer_is_compared_the_references_too(tmp_path: Path) -> None:
    done = measured(tmp_path / "r", {"honest": Drafting(target())}, FILTERED, questions=2)
    assert {v.key for v in done.output_match} == {row.key for row in done.rows}
    tokens = {row.key: row.tokens for row in done.rows}
    for verdict in done.output_match:
        assert verdict.verdict == "sampled" and verdict.sampled is not None
        assert verdict.sampled.tokens == tokens[verdict.key] and verdict.sampled.pit_counts[OUTSIDE] == 0
        assert (verdict.sampled.offered > 0) == (verdict.method == "honest")


def test_drafts_whose_acceptance_was_not_tested_are_no_pass(honest: Run) -> None:
    done = read_run(honest.path)
    assert row_of(done, "honest").bias == "no bias found"
    done.output_match = [
        replace(v, sampled=replace(v.sampled, offered=0, accept_variance=0.0)) for v in done.output_match if v.sampled
    ]
    assert row_of(done, "honest").bias == "too few tokens"


def test_resuming_compares_what_is_not_compared(tmp_path: Path) -> None:
    decoders: dict[str, Decoder] = {"honest": Drafting(target())}
    before = {v.key: v for v in measured(tmp_path / "r", decoders, PLAIN, 2).output_match}
    file = tmp_path / "r" / "output_match.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:3]))
    kept = {read_output_match(line).key for line in file.read_bytes().splitlines()}
    after = {v.key: v for v in measured(tmp_path / "r", decoders, PLAIN, 2, resume=True).output_match}
    assert after.keys() == before.keys() and any((of := before[key].sampled) and of.offered for key in kept)
    for key, verdict in after.items():  # what was drafted is known no more
        one, other = verdict.sampled, before[key].sampled
        assert one is not None and other is not None
        assert one.pit_counts == other.pit_counts and one.offered == (other.offered if key in kept else 0)


@pytest.mark.parametrize(("temperature", "missing"), [(1.0, 1), (0.0, 0)])
def test_workers_compare_the_references_sampled_answers_too(tmp_path: Path, temperature: float, missing: int) -> None:
    rows = measured(tmp_path / "r", {}, PLAIN, questions=1).rows
    ledger = MemoryStore(tmp_path, {"config": {"temperature": temperature}})
    ledger.rows = {row.key: row for row in rows}
    sample = Sample(suite_data(1).questions[0], 0, 0, "ar", 0, 0)
    assert len(list(shards([sample], ledger, "ar", "0", 0))) == missing


@thorough
def test_methods_are_not_testable_where_plain_decoding_fails_the_test(tmp_path: Path) -> None:
    done = paced(measured(tmp_path / "r", {"greedy": Drafting(target(), RULES["greedy"])}, PLAIN, questions=4))
    for verdict in done.output_match:  # as where a fresh pass gives other logits than the steps
        if verdict.method == "ar" and verdict.sampled is not None:
            verdict.sampled.pit_counts = [TOKENS, *[0] * PIT_BINS]
    assert row_of(done, "greedy").bias == "not testable" and row_of(done, "greedy").comparison != "invalid"
    stated = next(check for check in checks(done, summarise(done)) if check.name == "untestable")
    assert stated.state == "warning" and "greedy" in stated.lines[0]


@few(1)
@pytest.mark.parametrize(
    ("sampling", "bias"),
    [
        (SamplingParams(0.1), {"not testable"}),
        (FILTERED, {"no bias found"}),
        pytest.param(SamplingParams(0.2), {"not testable"}, marks=thorough),
        pytest.param(SamplingParams(0.5, top_p=0.9), {"not testable"}, marks=thorough),
        pytest.param(SamplingParams(0.5), {"no bias found"}, marks=thorough),
    ],
)
def test_rounding_of_half_precision_voids_no_honest_method(
    tmp_path: Path, sampling: SamplingParams, bias: set[str]
) -> None:
    """Replications of 5,000 draws; the passes they come from and those of the test differ by noise and rounding."""
    done = measured(tmp_path / "r", {"honest": Drafting(target())}, sampling, questions=1)
    done.manifest["model"]["dtype"] = "bfloat16"
    found, evidence = set(), []
    for seed in range(5):
        for place, verdict in enumerate(done.output_match):
            verdict.sampled = fp16_weights(10 * seed + place, sampling)
        tests = sampling_tests(done)
        found.add(tests["honest"].bias)
        evidence.append(tests["honest"].p)
        assert ("rounding of bfloat16" in tests["honest"].reason) == (bias == {"not testable"})
    assert found == bias
    if sampling.temperature == 0.1:
        assert min(evidence) < BIASED  # so that a verdict would be wrong
    stated = [check.lines for check in checks(done, summarise(done)) if check.name == "untestable"]
    assert bool(stated) == (bias == {"not testable"}) and all("rounding" in line for lines in stated for line in lines)


def fp16_weights(seed: int, sampling: SamplingParams, n: int = 5000, noise: float = 0.1) -> SampledTokens:
    """Return the comparison of exact draws at noisy bfloat16 logits with other noisy logits of the same passes."""
    rng = torch.Generator().manual_seed(seed)
    exact = 1.5 * torch.randn(n, 60, generator=rng)
    exact += 20 - exact.amax(1, keepdim=True)
    step, fresh = ((exact + noise * torch.randn(n, 60, generator=rng)).bfloat16().float() for _ in range(2))
    tokens = torch.multinomial(sampling.probs(step), 1, generator=rng)[:, 0].tolist()
    offers = [Offer((int(x),)) for x in (exact + torch.randn(n, 60, generator=rng)).argmax(1)]
    return compare([fresh], tokens, offers, sampling, "bfloat16", seed)


@thorough
def test_false_alarms_are_as_rare_as_stated() -> None:
    """The bound holds at every level: of 200 honest methods at most a share p has evidence of p."""
    p = [bound(drawn(seed)) for seed in range(200)]
    assert sum(x <= 0.1 for x in p) / len(p) <= 0.1 and sum(x <= 0.02 for x in p) / len(p) <= 0.02


@thorough
def test_the_parts_of_the_test_are_distributed_as_they_should_be() -> None:
    from scipy.stats import chisquare, kstest

    made = [drawn(1000 + seed) for seed in range(200)]
    assert kstest([one.surplus / one.variance**0.5 for one in made], "norm").pvalue > 1e-4
    counts = pool(made).pit_counts
    assert counts[OUTSIDE] == 0 and chisquare(counts[:PIT_BINS]).pvalue > 1e-4
    z = [(one.accepted - one.expected) / one.accept_variance**0.5 for one in made]
    assert kstest(z, "norm").pvalue > 1e-4


def drawn(seed: int, n: int = 120, sampling: SamplingParams = FILTERED) -> SampledTokens:
    """Return the comparison of exact draws from random distributions, each with a deterministic candidate."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 30, generator=rng)
    tokens = torch.multinomial(sampling.probs(logits), 1, generator=rng)[:, 0].tolist()
    offers = [Offer((int(x),)) for x in (logits + torch.randn(n, 30, generator=rng)).argmax(1)]
    return compare([logits[:50], logits[50:]], tokens, offers, sampling, "float32", seed)


@pytest.mark.parametrize(
    ("dtype", "token", "outside"),
    [
        ("float32", 1, False),  # kept
        ("float32", 2, True),  # the mass before it is 0.92
        ("bfloat16", 2, False),  # which rounding may shift below 0.9
        ("bfloat16", 3, True),
    ],
)
def test_filtered_tokens_count_where_rounding_does_not_explain_them(dtype: str, token: int, outside: bool) -> None:
    p = torch.tensor([[0.60, 0.32, 0.0796, 0.0004]])
    found = compare([p.log()], [token], [], SamplingParams(1.0, top_p=0.9), dtype, 0)
    assert found.pit_counts[OUTSIDE] == int(outside)


@pytest.mark.parametrize(("drop", "outside"), [(0.375, 0), (0.75, 0), (0.85, 1)])
def test_a_probability_of_zero_counts_where_rounding_does_not_explain_it(drop: float, outside: int) -> None:
    logits = torch.tensor([[20.0, 20.0 - drop]])  # a numerical tie is 0.5
    assert compare([logits], [1], [], SamplingParams(0.003), "bfloat16", 0).pit_counts[OUTSIDE] == outside


def test_tokens_that_rounding_may_reorder_are_both_within_top_k() -> None:
    p = torch.tensor([[0.40, 0.35, 0.25]])
    for dtype, outside in (("float32", 1), ("bfloat16", 0)):
        assert compare([p.log()], [1], [], SamplingParams(1.0, top_k=1), dtype, 0).pit_counts[OUTSIDE] == outside


def test_a_token_in_place_of_the_last_kept_one_is_compared_as_that_one() -> None:
    logits, sampling = torch.tensor([[20.0, 19.9, 19.8]]), SamplingParams(1.0, top_k=2)
    kept, other = (compare([logits], [token], [], sampling, "bfloat16", 0) for token in (1, 2))
    assert other.log_ratios == pytest.approx(kept.log_ratios) and other.pit_counts[OUTSIDE] == 0


def test_the_candidates_of_each_token_are_those_behind_its_node() -> None:
    root, q = torch.tensor([7]), torch.arange(40.0).view(4, 10)
    chosen = DraftTree.from_parents([root, 1, 2, 3], (-1, 0, 0, 1))
    drawn_ones = DraftTree.chain(root, torch.tensor([1, 2, 3]), q)
    steps = [
        candidates(chosen, [0, 1, 3], PLAIN),
        candidates(drawn_ones, [0, 1], PLAIN),
        candidates(DraftTree.root_only(root), [0], PLAIN),
    ]
    assert offers(steps) == [Offer((1, 2)), Offer((3,)), Offer(), Offer((1,), 1.0), Offer((2,), 12.0), Offer()]
    block = candidates(drawn_ones, [0, 1], replace(PLAIN, verification="block"))
    assert offers([block]) == [Offer(), Offer()]  # tokens of a block are not accepted with min(1, p / q)


def test_the_share_of_top_p_may_lie_between_two_tokens() -> None:
    """A token before which the mass is top-p up to rounding may be kept or not."""
    p = torch.tensor([[0.6, 0.3 + 2e-7, 0.1]])
    found = compare([p.log()], [2], [], SamplingParams(1.0, top_p=0.9), "float32", 0)
    assert found.pit_counts[OUTSIDE] == 0 and found.log_ratios != SampledTokens().log_ratios


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_enough_is_what_it_takes_to_see_another_temperature(scale: float) -> None:
    rng, missed = torch.Generator().manual_seed(0), 0
    for seed in range(30):
        logits = scale * torch.randn(1000, 60, generator=rng)
        tokens = torch.multinomial(SamplingParams(2 / 3).probs(logits), 1, generator=rng)[:, 0].tolist()
        found, at = SampledTokens(), 0
        while found.variance < ENOUGH:
            found += compare([logits[at : at + 50]], tokens[at : at + 50], [], PLAIN, "float32", 100 * seed + at)
            at += 50
        missed += bound(found) >= BIASED
    assert missed <= 1


def test_one_candidate_that_was_drawn_is_accepted_with_p_over_q() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    chances = {
        Offer((0,)): 0.5,
        Offer((0, 1)): 0.75,
        Offer((0, 1), 0.8): 0.625,
        Offer((0,), 0.1): 1.0,
        Offer((0,), 0.0): 1.0,
    }
    for offer, expected in chances.items():
        assert compare([logits], [0], [offer], PLAIN, "float32", 0).expected == pytest.approx(expected)


def test_logits_that_are_missing_or_not_finite_are_no_verdict(tmp_path: Path) -> None:
    row = measured(tmp_path / "r", {}, PLAIN, questions=1).rows[0]

    class Broken(Autoregressive):
        def answer_logits(self, prompt: Any, answer: Any) -> Any:
            yield torch.full((len(answer), 61), torch.nan)

    verdict = judge_sampled(Broken(target()), [3], row, PLAIN)
    assert verdict.verdict == "not compared" and "finite" in verdict.reason


def test_a_method_with_another_model_is_compared_at_a_few_positions_of_the_whole_answer(tmp_path: Path) -> None:
    class Own(Autoregressive):
        asked: list[int] = []

        def next_logits(self, prompt: Any, answer: Any, cache: Any = None) -> Tensor:
            self.asked.append(len(answer))
            return self.target.next_logits([*prompt, *answer])

    row = measured(tmp_path / "r", {}, PLAIN, questions=1).rows[0]
    verdict = judge_sampled(Own(target()), [3], row, PLAIN)
    assert verdict.sampled is not None and verdict.sampled.tokens == len(Own.asked) == len(set(Own.asked))
    assert Own.asked == positions(TOKENS, proof_seed(row)) and max(Own.asked) > TOKENS // 3


def test_the_positions_do_not_depend_on_the_length_of_the_answer() -> None:
    for seed in range(20):
        assert [at for at in positions(1000, seed) if at < 50] == positions(50, seed)
        assert len(positions(1000, seed)) < 60


def lossy() -> Lossy:
    return Lossy(target(), RULES["everything"])
