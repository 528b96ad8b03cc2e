"""For authors of methods: `check_decoder` tests a method against the laws of docs/conformance.md, on tiny models."""

from specbench_ss.conformance.harness import Case, Law, LawBroken
from specbench_ss.conformance.kit import FEW, LAWS, Kit, check_decoder
from specbench_ss.models.tiny import ARCHITECTURES, randomise, tiny_model, tiny_target, tiny_tokenizer

__all__ = [
    "ARCHITECTURES",
    "FEW",
    "LAWS",
    "Case",
    "Kit",
    "Law",
    "LawBroken",
    "check_decoder",
    "randomise",
    "tiny_model",
    "tiny_target",
    "tiny_tokenizer",
]
