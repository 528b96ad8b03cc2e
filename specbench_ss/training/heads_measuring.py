"""`ssbench train NAME --measure HEADS`: measure how often existing heads guess right on the user's text."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable

from specbench_ss.engine.target import Target
from specbench_ss.training.guess_accuracy import Guesser, mean_accuracies
from specbench_ss.training.session import opened, training_text
from specbench_ss.training.side_by_side import Budget
from specbench_ss.training.text.packed_batches import PackedText
from specbench_ss.training.trainer import TrainConfig

MEASURED = "accuracies.json"


def measure(name: str, heads: str, load: Callable[[Target, str], Guesser], config: TrainConfig) -> None:
    """Write accuracies.json, which the option `tree` of the method `name` takes. Nothing is trained.

    Every row of the text is read once. heads: the weights as the user named them; `load` reads them.
    """
    processes, target = opened(config)
    trainee = load(target, heads)
    text = PackedText(training_text(config, target, processes).train, config.seed)
    batches = math.ceil(len(text.rows) / config.batch_size)
    budget = Budget(batches, config.batch_size, config.anchors, trainee.module.count)  # type: ignore[arg-type]
    found = mean_accuracies(target, trainee, text, budget, batches, processes)
    if not processes.first:
        return
    config.out.mkdir(parents=True, exist_ok=True)
    content = {"base_hash": target.weights_hash, "own_answers": config.own_answers, "accuracies": found}
    path = config.out / MEASURED
    path.write_text(json.dumps(content, indent=1) + "\n")
    for i, row in enumerate(found):
        print(f"head {i}: right {row[0]:.3f}, among the best {len(row)} {sum(row):.3f}")
    chosen = f"--set {name}.weights={shlex.quote(heads)} --set {name}.tree={shlex.quote(str(path))}"
    print(f"use it: ssbench run --model {shlex.quote(config.model)} --methods {name} {chosen}")
