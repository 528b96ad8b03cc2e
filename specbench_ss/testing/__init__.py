"""For those who write methods: `check_decoder` holds one to the laws of docs/conformance.md, on tiny random models."""

from specbench_ss.testing.kit import FEW, LAWS, Kit, check_decoder
from specbench_ss.testing.law import Case, Law, LawBroken
from specbench_ss.testing.tiny import ARCHITECTURES, randomise, tiny_model, tiny_target, tiny_tokenizer

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
