"""Help texts of options that several commands have."""

from __future__ import annotations

MODEL = (
    "Target model: lab (it comes with ssbench), smollm2 (after `ssbench models fetch smollm2`), the folder or hub id "
    "of a Hugging Face causal language model, or a GGUF file."
)
DTYPE = (
    "Number format of the model's weights and arithmetic. float16-weights: weights rounded to float16, arithmetic in "
    "float32, on CPUs. auto: bfloat16 on a GPU; on a CPU it is measured, and of float32, float16-weights and bfloat16 "
    "the first is taken that is nearly as fast as the fastest (the lab: float32)."
)
DEVICE = "Device to run on: auto (a GPU where there is one), cpu, cuda or cuda:N."
DEVICES = f"{DEVICE} `cuda:0,cuda:1` or `cuda:all` divides the model's layers over several GPUs of this machine."
ENGINE = (
    "How steps are made. eager: operator by operator. graph: passes of few rows are recorded once as CUDA graphs and "
    "replayed, so that no launch is waited for. They are held against eager ones: a few small trees when the model is "
    "loaded, and every recording once when it is made. auto: graph on one CUDA device where the model stands that, and "
    "eager elsewhere and for several requests side by side."
)
CHAT_TEMPLATE = "Chat template to use instead of the tokenizer's own: plain, vicuna, llama-2, or a Jinja file."
TRUST = "Allow Python code that comes with the model to run. Only for models whose authors you trust."
CATEGORIES = "Ask only the questions of these tasks of the suite."
SET = "Set one option of a method, for every variant of it. May be given several times."
DRY_RUN = "Check everything, say what would be run, and stop."
