"""What a run directory says about its run: which methods were measured, on which model, questions and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.decoding.cuda_settings import cuda_settings
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.references import references
from specbench_ss.decoding.target import Target
from specbench_ss.models.chat_templates import template_hash
from specbench_ss.options import option_values
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.environment import environment
from specbench_ss.runs.manifest_reading import FORMAT
from specbench_ss.runs.now import now as now
from specbench_ss.runs.suite import SuiteData
from specbench_ss.version import __version__


def manifest_for(
    config: RunConfig, target: Target, data: SuiteData, decoders: Mapping[str, Decoder], command: Sequence[str]
) -> dict[str, Any]:
    """Return the manifest of a run that is about to start, as JSON-ready data.

    Raises UserError for a reference that `references` refuses.
    """
    model = {
        "name": target.name,
        "hash": target.weights_hash,
        "parameters": target.parameter_count,
        "dtype": target.number_format,
        "device": target.device_names,
        **({"cuda_settings": cuda_settings()} if target.device.type == "cuda" else {}),
        **({"layers_on": {str(at): layers for at, layers in target.layers_on.items()}} if target.divided else {}),
        "context_length": target.context_length,
        "attention": getattr(target, "attention", None),
        "computed": getattr(target, "computed", None),
        "engine": getattr(target, "engine", "eager"),
        **({"quantised": held} if (held := getattr(target, "quantised", "")) else {}),
        "vocab_size": target.vocab_size,
        "is_lab": target.is_lab,
        "chat_template": template_hash(getattr(target, "tokenizer", None)),
        "origin": getattr(target, "origin", {}),
    }
    named = references(decoders)
    methods = [_method_entry(label, decoder, named[label]) for label, decoder in decoders.items()]
    return manifest_of(config, data, command, model, methods)


def manifest_of(
    config: RunConfig,
    data: SuiteData,
    command: Sequence[str],
    model: Mapping[str, Any],
    methods: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the manifest of a run, whatever answers in it. model, methods: what it says of these."""
    here, started = environment(), now()
    return {
        "format": FORMAT,
        "version": __version__,
        "command": list(command),
        "config": config.as_dict(),
        "fingerprint": config.fingerprint,
        "suite": {
            "name": data.name,
            "edition": data.edition,
            "content_hash": data.content_hash,
            "size": len(data.questions),
            "prompts": sum(len(q.turns) for q in data.questions),
            "max_new_tokens": config.max_new_tokens or data.max_new_tokens,
            "notes": list(data.notes),
        },
        "model": dict(model),
        "methods": list(methods),
        "environment": here,
        "sessions": [{"started": started, "environment": here}],  # one more for each --resume
        "created": started,
        "finished": None,
        "status": "running",
    }


def _method_entry(label: str, decoder: Decoder, reference: str) -> dict[str, Any]:
    options = decoder.options
    return {
        "label": label,
        "name": decoder.name,
        "options": plain(option_values(options)),
        "resolved": plain(decoder.described()),
        "learnt": plain(dict(decoder.learnt)),
        "advised": plain(dict(decoder.advised)),
        "lossless": decoder.lossless,
        "remembers": decoder.remembers,
        "reference": reference,
        "summary": decoder.summary,
        "paper": decoder.paper,
    }


def plain(values: dict[str, Any]) -> Any:
    """Return the values as they will be read back from the file."""
    return json.loads(json.dumps(values, default=str))
