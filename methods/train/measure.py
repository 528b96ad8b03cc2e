"""`ssbench train NAME --measure HEADS`: how often heads that there are guess right, on the user's text."""

from __future__ import annotations

import json
import math
import shlex
from typing import TYPE_CHECKING

from specbench_ss.methods.accuracies import mean_accuracies
from specbench_ss.methods.together import Budget
from specbench_ss.methods.train.packed import PackedText
from specbench_ss.methods.train.session import opened, training_text
from specbench_ss.trainer import TrainConfig

if TYPE_CHECKING:
    from specbench_ss.methods.trainers.heads import MeasurableHeadsTrainer

MEASURED = "accuracies.json"


def measure(trainer: MeasurableHeadsTrainer, config: TrainConfig) -> None:
    """Write accuracies.json, which the method's option `tree` takes: all rows of the text, once; nothing is learnt."""
    processes, target = opened(config)
    heads = trainer.options.measure
    trainee = trainer.loaded(target, heads)
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
    name = trainer.method
    chosen = f"--set {name}.weights={shlex.quote(heads)} --set {name}.tree={shlex.quote(str(path))}"
    print(f"use it: ssbench run --model {shlex.quote(config.model)} --methods {name} {chosen}")
