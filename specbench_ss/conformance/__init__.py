"""For authors of methods: `check_decoder` tests a method against the checks of docs/conformance.md, on tiny models."""

from specbench_ss.conformance.harness import Case, Check, CheckFailed
from specbench_ss.conformance.kit import CHECKS, FEW, CheckRunner, Result, check_decoder
from specbench_ss.models.tiny import ARCHITECTURES, randomise, tiny_model, tiny_target, tiny_tokenizer

__all__ = [
    "ARCHITECTURES",
    "FEW",
    "CHECKS",
    "Case",
    "CheckRunner",
    "Check",
    "CheckFailed",
    "Result",
    "check_decoder",
    "randomise",
    "tiny_model",
    "tiny_target",
    "tiny_tokenizer",
]
