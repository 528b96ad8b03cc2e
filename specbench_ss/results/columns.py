"""The columns of a run's frames. This is the one schema, which docs/api.md repeats; a test compares the two.

Names and meanings are stable. A dtype is pandas' nullable one, so a missing value is `pandas.NA`; `object` columns hold
tuples or lists.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a frame. unit: '' where it has none. meaning: for readers of the frame who do not know the code."""

    name: str
    dtype: str
    unit: str
    meaning: str


def _columns(*lines: str) -> tuple[Column, ...]:
    """Make columns from lines of the form 'name | dtype | unit | meaning'."""
    return tuple(Column(*(part.strip() for part in line.split("|"))) for line in lines)


_KEY = (
    "question_id | string | | id of the question",
    "turn | Int64 | | number of the turn within the question, from 0",
    "method | string | | label of the method: its name, with the options that were given for it",
    "repeat | Int64 | | number of the repeat, from 0",
)
_CATEGORY = "category | string | | task of the suite that the question belongs to"

SAMPLES = _columns(
    *_KEY,
    _CATEGORY,
    "index | Int64 | | place of the sample in the schedule of the whole run, from 0",
    "position | Int64 | | place of the method among those that answered this prompt, from 0",
    "seed | Int64 | | seed of the sample's random numbers, the same for every method",
    "suite_edition | string | | edition of the suite",
    "suite_hash | string | | sha256 of the suite's questions as asked",
    "status | string | | `ok` or `failed`; of a failed sample every number is missing",
    "error | string | | what the failed sample raised",
    "started | Float64 | s | Unix time at which the sample began",
    "ended | Float64 | s | Unix time at which the sample ended",
    "prompt_tokens | Int64 | tokens | length of the prompt",
    "tokens | Int64 | tokens | length of the answer, its end token included",
    "prefill_tokens | Int64 | tokens | tokens of the answer that came from prefill, not from a step",
    "steps | Int64 | steps | forward passes of the model that verify a draft",
    "drafted | Int64 | nodes | nodes of all draft trees, roots left out",
    "verified | Int64 | nodes | of these, nodes that reached the model's last layer",
    "depth | Int64 | tokens | sum of the depths of all draft trees",
    "accepted | Int64 | tokens | drafted tokens that were accepted, before the answer was cut at its end",
    "overshoot | Int64 | tokens | accepted tokens that lay beyond the end of the answer",
    "draft_calls | Int64 | passes | forward passes of a draft model",
    "finish | string | | why the answer ended: `eos`, `stop`, `length` or `context`",
    "prefill_s | Float64 | s | time to read the prompt, up to the first token",
    "decode_s | Float64 | s | time of all steps",
    "wall_s | Float64 | s | prefill_s + decode_s",
    "peak_memory_bytes | Int64 | bytes | peak of the CUDA memory that it took besides; missing where replayed",
    "quality | Float64 | 0 to 1 | the suite's score of the answer; missing where the question has no reference",
    "judged | Float64 | 0 to 1 | a judge's rating over ten; missing where none was asked, or gave none",
    "text | string | | the answer as text, special tokens left out",
    "token_ids | object | | the answer as a list of token ids",
    "disturbed | string | | what disturbed the sample, in words; empty where nothing did, missing without telemetry",
    "remade | Int64 | | how often it was made again since it was disturbed; missing without telemetry",
    "host_cpu_share | Float64 | 0 to 1 | share of the usable cores that this process took, its mean over the sample",
    "host_foreign_share | Float64 | 0 to 1 | share of the usable cores that everything else took",
    "host_rss_bytes | Int64 | bytes | most memory that this process had resident when it was read",
    "host_page_faults | Int64 | | page faults of this process, minor ones included",
    "nvml_kernel_busy | Float64 | 0 to 1 | share of the time in which any kernel ran, as NVML samples it",
    "nvml_memory_busy | Float64 | 0 to 1 | share of the time in which device memory was read or written, by NVML",
    "nvml_sm_mhz | Float64 | MHz | mean clock of the multiprocessors",
    "nvml_power_w | Float64 | W | mean power of the device",
    "energy_j | Float64 | J | energy of the device: the difference of NVML's counter",
    "joules_per_token | Float64 | J | energy_j over tokens of the answer",
    "gpm_sm_active | Float64 | 0 to 1 | share of the multiprocessors that were busy, by the device's GPM counters",
    "gpm_tensor_active | Float64 | 0 to 1 | share of the time in which tensor cores worked, by GPM",
    "gpm_dram_active | Float64 | 0 to 1 | share of the device memory's bandwidth that was used, by GPM",
    "counted | string | | of a server: `usage` where it told the number of tokens, `chunks` where pieces were counted",
    "chunks | Int64 | chunks | of a server: pieces of text that came",
    "drafts | Int64 | drafts | of a server: how often it drafted, by its own counters; missing where not measured",
    "concurrency | Int64 | requests | requests at a time, where more than one; missing in this frame",
    "unreplayed | Int64 | passes | passes made operator by operator where steps are replayed; missing where none are",
    "unreplayed_why | string | | why they were not replayed; empty where all were, missing where no steps are replayed",
)

TELEMETRY = _columns(
    *_KEY,
    "attempt | Int64 | | which try at the sample this belongs to, from 0; the last one is the sample's",
    "disturbed | string | | what disturbed that try, in words, or empty",
    "t_s | Float64 | s | time since the try's first reading, which was made just before it",
    "host_cpu_share | Float64 | 0 to 1 | share of the usable cores that this process took since the reading before",
    "host_foreign_share | Float64 | 0 to 1 | share of the usable cores that everything else took since then",
    "host_core_share | object | 0 to 1 | how busy each usable core was since then, whoever it worked for; a list",
    "host_mhz | Float64 | MHz | the processor's frequency, where the system tells it; read before and after a try",
    "host_rss_bytes | Int64 | bytes | memory of this process that was resident",
    "host_page_faults | Int64 | | page faults of this process so far, minor ones included",
    "nvml_kernel_busy | Float64 | 0 to 1 | share of NVML's last sample period in which any kernel ran",
    "nvml_memory_busy | Float64 | 0 to 1 | share of that period in which device memory was read or written",
    "nvml_sm_mhz | Int64 | MHz | clock of the multiprocessors",
    "nvml_mem_mhz | Int64 | MHz | clock of the device's memory",
    "nvml_clock_events | Int64 | | NVML's reasons for that clock, as bits",
    "nvml_power_w | Float64 | W | power of the device",
    "nvml_energy_j | Float64 | J | energy that the device has used since its driver was loaded",
    "nvml_used_bytes | Int64 | bytes | device memory in use, whoever uses it",
    "nvml_foreign_processes | Int64 | | processes that compute on the device besides this one",
    "gpm_sm_active | Float64 | 0 to 1 | share of the multiprocessors that were busy since the reading before",
    "gpm_tensor_active | Float64 | 0 to 1 | share of the time since then in which tensor cores worked",
    "gpm_dram_active | Float64 | 0 to 1 | share of the memory's bandwidth that was used since then",
)

STEPS = _columns(
    *_KEY,
    _CATEGORY,
    "index | Int64 | | number of the step within the sample, from 0",
    "nodes | Int64 | nodes | drafted nodes of the step's tree, its root left out",
    "verified | Int64 | nodes | of these, nodes that reached the model's last layer",
    "depth | Int64 | tokens | depth of the tree as drafted",
    "accepted | Int64 | tokens | drafted tokens that were accepted, before the answer was cut at its end",
    "tokens | Int64 | tokens | tokens that the step added to the answer",
    "draft_s | Float64 | s | making the draft, and preparing for the next one",
    "verify_s | Float64 | s | the model's pass over the draft",
    "accept_s | Float64 | s | choosing the accepted path and compacting the cache",
    "host_s | Float64 | s | the rest of the step",
    "total_s | Float64 | s | the whole step: the sum of the four parts",
)

SAMENESS = _columns(
    *_KEY,
    _CATEGORY,
    "verdict | string | | one of `identical`, `near-tie`, `length`, `mismatch`, `other text`, `not compared`",
    "first_difference | Int64 | | index of the first token that differs from the reference's answer",
    "gap | Float64 | logits | there, the model's best logit minus its second best",
    "drop | Float64 | logits | there, the model's best logit minus the lower one of the two tokens chosen",
    "reason | string | | why the answers were not compared, or what else there is to say; may be empty",
)

_OF_INTERVAL = "end of its 95 % interval; missing below four questions"
SUMMARY = _columns(
    "category | string | | task of the suite; `overall` is all of them together",
    "method | string | | label of the method: its name, with the options that were given for it",
    "lossless | boolean | | whether the method promises the output of its reference",
    "n_prompts | Int64 | prompts | turns that both the method and `ar` answered: what all numbers of the row are of",
    "n_questions | Int64 | questions | questions that these turns belong to: what intervals resample",
    "n_failed | Int64 | samples | the method's own samples that failed",
    "speedup | Float64 | × | time per token of `ar` over that of the method, same prompts; missing where void",
    f"speedup_low | Float64 | × | lower {_OF_INTERVAL}",
    f"speedup_high | Float64 | × | upper {_OF_INTERVAL}",
    "speedup_geomean | Float64 | × | the same ratio taken prompt by prompt, its geometric mean",
    "speedup_specbench | Float64 | × | Spec-Bench's formula: mean tokens per second over questions, method over `ar`",
    "comparison | string | | `faster`, `slower`, `not distinguishable`, `too few` (questions), `void` or `reference`",
    "reference | string | | label of the method whose output this one is held against",
    "reference_speedup | Float64 | × | speedup over that method, where it is not `ar`",
    f"reference_speedup_low | Float64 | × | lower {_OF_INTERVAL}",
    f"reference_speedup_high | Float64 | × | upper {_OF_INTERVAL}",
    "reference_of | object | | labels of the methods held against this one, where it is not `ar`; a tuple",
    "tokens_per_s | Float64 | tokens/s | all tokens over all seconds, prefill included",
    "tokens | Float64 | tokens | mean length of an answer",
    "prefill_s | Float64 | s | mean time to read a prompt, up to the first token",
    "tau | Float64 | tokens | tokens per step, pooled over all steps; 1 for `ar`",
    "tau_request_mean | Float64 | tokens | tokens per step of each sample, their mean",
    "acceptance_rate | Float64 | 0 to 1 | accepted drafted tokens over drafted ones, where a tree counts its depth",
    "acceptance_at | object | 0 to 1 | for each draft position, share of the steps that drafted it and accepted it",
    "acceptance_at_n | object | steps | for each draft position, the steps that drafted it",
    "acceptance_given | object | 0 to 1 | for each draft position, the share accepted once the one before it was",
    "acceptance_given_n | object | steps | for each draft position, the steps that had accepted the one before it",
    "target_calls | Float64 | steps | mean steps of a sample",
    "draft_calls | Float64 | passes | mean forward passes of a draft model in a sample",
    "overshoot | Int64 | tokens | accepted tokens beyond the end of an answer, in all",
    "quality | Float64 | 0 to 1 | the suite's score, a mean over questions",
    "quality_n | Int64 | questions | questions that have a score on both sides",
    "quality_difference | Float64 | | mean paired difference of quality to `ar`",
    f"quality_difference_low | Float64 | | lower {_OF_INTERVAL}",
    f"quality_difference_high | Float64 | | upper {_OF_INTERVAL}",
    "quality_verdict | string | | of a method that changes the model: `non-inferior`, `inferior` or `not shown`",
    "quality_margin | Float64 | | how much lower than `ar` its quality may be to be called non-inferior",
    "judged | Float64 | 0 to 1 | rating over ten by the judge who judged last, a mean over questions",
    "judged_n | Int64 | questions | questions that have a rating on both sides",
    "judged_difference | Float64 | | mean paired difference of the rating to `ar`",
    f"judged_difference_low | Float64 | | lower {_OF_INTERVAL}",
    f"judged_difference_high | Float64 | | upper {_OF_INTERVAL}",
    "judge | string | | that judge, its host, prompts and most tokens; empty where there is none",
    "step_s | Float64 | s | mean time of a step: the sum of the next five",
    "draft_s | Float64 | s | of it, making the draft",
    "verify_s | Float64 | s | of it, the model's pass over the draft",
    "accept_s | Float64 | s | of it, choosing the accepted path and compacting the cache",
    "host_s | Float64 | s | of it, what the host needs besides",
    "parts_residual_s | Float64 | s | of it, by what it differs from the four parts; 0 but where clocks differ",
    "step_ratio | Float64 | × | mean time of a step of `ar` over that of the method",
    "residual | Float64 | × | speedup / (tau × step_ratio): prefill, the first token, answers of other lengths",
    "ttft_s_p50 | Float64 | s | time to the first token: median over samples",
    "ttft_s_p95 | Float64 | s | time to the first token: 95th percentile over samples",
    "ttft_s_p99 | Float64 | s | time to the first token: 99th percentile over samples",
    "tpot_s_p50 | Float64 | s | time per output token after the first: median over samples",
    "tpot_s_p95 | Float64 | s | time per output token after the first: 95th percentile over samples",
    "tpot_s_p99 | Float64 | s | time per output token after the first: 99th percentile over samples",
    "latency_s_p50 | Float64 | s | time of a whole request: median over samples",
    "latency_s_p95 | Float64 | s | time of a whole request: 95th percentile over samples",
    "latency_s_p99 | Float64 | s | time of a whole request: 99th percentile over samples",
    "peak_memory_bytes | Int64 | bytes | peak of the CUDA memory that a sample took besides; missing where replayed",
    "n_identical | Int64 | answers | answers equal to the reference's, token by token",
    "n_near_tie | Int64 | answers | answers that part where two tokens are equally good to the model within rounding",
    "n_length | Int64 | answers | answers that are a beginning of the reference's, or the other way round",
    "n_mismatch | Int64 | answers | answers that differ in any other way: a bug",
    "n_other_text | Int64 | answers | answers of a server with another text, where equality is not promised",
    "n_not_compared | Int64 | answers | answers of which equality is not promised, or could not be asked",
    "output | string | | these five in words, as the report has them",
    "within_tau | boolean | | whether it is no faster than its steps allow, as it must be; missing where not checked",
    "unstable | boolean | | whether times of the same work spread by more than a tenth; missing where not checked",
    "health | object | | what is wrong with the numbers, a tuple of sentences; empty where nothing is",
    "baseline | string | | label of the run's reference, which `speedup` is over: `ar`, or the first endpoint",
)

COMPARISON = _columns(
    "category | string | | task of the suite; `overall` is all of them together",
    "method | string | | label of the method",
    "n_prompts | Int64 | prompts | turns that the method and `ar` answered in both runs: what all numbers are of",
    "n_questions | Int64 | questions | questions that these turns belong to: what intervals resample",
    "n_failed_a | Int64 | samples | the method's samples that failed in run A",
    "n_failed_b | Int64 | samples | the method's samples that failed in run B",
    "speedup_a | Float64 | × | speedup over `ar` in run A, over these prompts",
    "speedup_b | Float64 | × | speedup over `ar` in run B",
    "speedup_change | Float64 | share | speedup of B over that of A, less 1",
    f"speedup_change_low | Float64 | share | lower {_OF_INTERVAL}",
    f"speedup_change_high | Float64 | share | upper {_OF_INTERVAL}",
    "speedup_verdict | string | | `faster`, `slower`, `not distinguishable`, `too few` (questions), `failed` (in a "
    "run) or `void`",
    "tokens_per_s_a | Float64 | tokens/s | all tokens over all seconds in run A",
    "tokens_per_s_b | Float64 | tokens/s | all tokens over all seconds in run B",
    "tokens_per_s_change | Float64 | share | B over A, less 1; missing where the machine is another one",
    f"tokens_per_s_change_low | Float64 | share | lower {_OF_INTERVAL}",
    f"tokens_per_s_change_high | Float64 | share | upper {_OF_INTERVAL}",
    "tokens_per_s_verdict | string | | as that of the speedup, `other machine` or `other threads`",
    "tau_a | Float64 | tokens | tokens per step in run A",
    "tau_b | Float64 | tokens | tokens per step in run B",
    "tau_change | Float64 | share | tau of B over that of A, less 1",
    f"tau_change_low | Float64 | share | lower {_OF_INTERVAL}",
    f"tau_change_high | Float64 | share | upper {_OF_INTERVAL}",
    "tau_verdict | string | | `higher`, `lower`, `not distinguishable`, `too few` or `failed`",
    "quality_a | Float64 | 0 to 1 | the suite's score in run A, a mean over questions that have one in both",
    "quality_b | Float64 | 0 to 1 | the suite's score in run B",
    "quality_change | Float64 | | mean paired difference, B less A",
    f"quality_change_low | Float64 | | lower {_OF_INTERVAL}",
    f"quality_change_high | Float64 | | upper {_OF_INTERVAL}",
    "quality_verdict | string | | `higher`, `lower`, `not distinguishable`, `too few` or `failed`",
    "n_answers | Int64 | answers | answers of the same prompt and repeat in both runs",
    "n_other_answers | Int64 | answers | of these, answers with other tokens",
)

LEVELS = _columns(
    "concurrency | Int64 | requests | requests in flight at a time",
    "method | string | | label of the server",
    "requests | Int64 | requests | requests that were sent, all repeats together",
    "failed | Int64 | requests | of them, requests without a whole answer; no other number includes them",
    "wall_s | Float64 | s | time of all requests together; with one in flight, the sum of their times",
    "tokens | Int64 | tokens | tokens of all answers",
    "tokens_per_s | Float64 | tokens/s | throughput: tokens over wall_s",
    "requests_per_s | Float64 | requests/s | answers over wall_s",
    "throughput_ratio | Float64 | × | tokens_per_s over the baseline's with as many in flight",
    "speedup | Float64 | × | of single requests: the baseline's seconds per token over its own, paired by prompt",
    f"speedup_low | Float64 | × | lower {_OF_INTERVAL}",
    f"speedup_high | Float64 | × | upper {_OF_INTERVAL}",
    "comparison | string | | `reference`, `faster`, `slower`, `not distinguishable` or `too few`",
    "tau | Float64 | tokens | tokens per step by the server's own counts; missing where not measured",
    "acceptance_rate | Float64 | 0 to 1 | accepted over drafted tokens, by the same counts",
    *(
        f"{name}_s_{quantile} | Float64 | s | {what}: {words} over requests"
        for name, what in (
            ("ttft", "time to the first piece of text"),
            ("tpot", "time per output token after the first"),
            ("latency", "time of a whole request"),
        )
        for quantile, words in (("p50", "median"), ("p95", "95th percentile"), ("p99", "99th percentile"))
    ),
)

DIFFERENCES = _columns(
    "what | string | | what differs, in words",
    "a | string | | its value in run A",
    "b | string | | its value in run B",
    "hinders | boolean | | whether results do not compare for it",
)

MACHINE = _columns(
    "method | string | | label of the method: its name, with the options that were given for it",
    "step_s | Float64 | s | mean time of a step, over all good samples",
    "draft_share | Float64 | 0 to 1 | share of it that making the draft took",
    "verify_share | Float64 | 0 to 1 | share that the model's pass over the draft took",
    "accept_share | Float64 | 0 to 1 | share that choosing the accepted path and compacting the cache took",
    "host_share | Float64 | 0 to 1 | share that these three leave of the step",
    "parts_residual | Float64 | 0 to 1 | share by which the step differs from these four; 0 but where clocks differ",
    "flops_per_step | Float64 | FLOP | operations of a step, counted from shapes, the drafter's included",
    "bytes_per_step | Float64 | bytes | bytes that a step reads, counted from shapes, the drafter's included",
    "drafter_bytes_per_step | Float64 | bytes | of them, weights of its own drafter; missing where not stated",
    "intensity | Float64 | FLOP/byte | flops_per_step over bytes_per_step",
    "bandwidth_share | Float64 | | counted bytes per second over the limit; over 1 where caches hold all",
    "compute_share | Float64 | | counted operations per second over the measured limit of the dtype",
    "fastest_step_s | Float64 | s | a step that reaches the nearer of these two limits",
    "predicted_speedup | Float64 | × | tau × fastest_step_s of `ar` over its own; missing where void or unknown",
    "decode_speedup | Float64 | × | tau × step_s of `ar` over its own: prefill is left out; missing where void",
    "samples | Int64 | samples | good samples of the method",
    "disturbed | Int64 | samples | of them, samples that something else disturbed",
    "remade | Int64 | | how often disturbed samples were made again",
    "host_cpu_share | Float64 | 0 to 1 | share of the usable cores that this process took, weighted by time",
    "host_foreign_share | Float64 | 0 to 1 | share of the usable cores that everything else took",
    "nvml_kernel_busy | Float64 | 0 to 1 | share of the time in which any kernel ran, as NVML samples it",
    "nvml_memory_busy | Float64 | 0 to 1 | share of the time in which device memory was read or written, by NVML",
    "gpm_sm_active | Float64 | 0 to 1 | share of the multiprocessors that were busy, by the device's GPM counters",
    "gpm_tensor_active | Float64 | 0 to 1 | share of the time in which tensor cores worked, by GPM",
    "gpm_dram_active | Float64 | 0 to 1 | share of the device memory's bandwidth that was used, by GPM",
    "nvml_power_w | Float64 | W | mean power of the device",
    "joules_per_token | Float64 | J | energy of all samples over tokens of their answers",
    "trace_busy_share | Float64 | 0 to 1 | share of a traced request in which a kernel ran; on a CPU, an operator",
    "trace_launches_per_token | Float64 | | kernels, or on a CPU operators, that it started for each token",
)
