"""EAGLE, EAGLE-2 and EAGLE-3: one decoder layer drafts the target's features, and tokens from them. Lossless."""

from specbench_ss.methods.eagle.dynamic import DynamicOptions, Eagle2, Eagle3, Eagle3Options
from specbench_ss.methods.eagle.static import Eagle, EagleOptions

__all__ = ["DynamicOptions", "Eagle", "Eagle2", "Eagle3", "Eagle3Options", "EagleOptions"]
