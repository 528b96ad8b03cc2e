"""Python without every optional package, for `.ci/run`: importing one fails, in child processes too."""

import sys

OPTIONAL = (
    "kaleido", "choreographer", "playwright", "axe_playwright_python", "pypdf", "gguf", "datasets", "ray", "vllm",
    "llama_cpp", "prometheus_client", "bitsandbytes", "torchao", "triton", "speculators", "loguru",
    "fastapi", "uvicorn",
)  # fmt: skip
sys.modules.update(dict.fromkeys(OPTIONAL))  # type: ignore[arg-type]
