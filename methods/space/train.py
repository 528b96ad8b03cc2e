"""`ssbench train space`: semi-autoregressive fine-tuning by LoRA with a mask embedding (SPACE sec. 3.1).

As published, half of the examples are cut at a random position of the answer, followed by k + 1 masks; all predict next
tokens. Here every row has both losses: groups of masks follow many positions at once. Groups are hidden from each other
and from all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn

from specbench_ss.engine.kv_cache import PrefixCache
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import lora_parameters, with_lora
from specbench_ss.methods.space.model import MaskToken, save
from specbench_ss.options import Bounded, option
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.losses import head_loss
from specbench_ss.training.masks import Documents, additive, draft_positions, draft_visibility, text_visibility
from specbench_ss.training.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True)
class MaskOptions(Bounded):
    """Options of `ssbench train space`."""

    owner: ClassVar[str] = "space"
    masks: Annotated[int, Ge(1), Le(64)] = option(5, "Number of masks: tokens drafted after the next one.")
    lora_rank: Annotated[int, Ge(1), Le(1 << 14)] = option(
        32, "Rank of the LoRA in every linear layer but the LM head."
    )
    mask_share: Annotated[float, Gt(0), Lt(1)] = option(
        0.5, "Fraction of the masks' loss in the total; next tokens have the rest."
    )
    mask_lr: Annotated[float, Gt(0)] = option(5e-3, "Peak learning rate of the mask's embedding.")


class SPACETrainer(DrafterTrainer):
    """Trainer of LoRA in every layer and the mask's embedding, which starts as the padding token's.

    It runs its own copy of the base and reads no states of the frozen one.
    """

    name = "space"
    summary = "LoRA and a mask token that predicts the next tokens; the model itself changes"
    method = "space"
    Options = MaskOptions
    needs_base = False
    adapts_base = True

    def __init__(self, target: Target, options: Any = None, lr: float | None = None) -> None:
        super().__init__(target, options, lr)
        self.tuned, self.ahead = with_lora(target, self.options.lora_rank), self.options.masks
        if any(block.window for block in self.tuned.family.blocks):
            raise UserError("space cannot be trained on layers with a sliding window")
        self.mask = MaskToken(target.hidden_size, self.ahead, target.config.pad_token_id or 0)
        self.lora = lora_parameters(self.tuned.model)
        self.module = nn.ModuleList([self.mask, nn.ParameterList(self.lora)])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the LoRA and the mask."""
        return [{"params": self.lora, "lr": self.lr}, {"params": [self.mask.offset], "lr": self.options.mask_lr}]

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of next tokens of all answers and of the masks behind the anchors (SPACE sec. 3.1)."""
        k, share = self.ahead, self.options.mask_share
        main, mask_states = self.states(batch.ids, batch.anchors.at, batch.documents)
        answer = batch.labels[..., 0] != -100
        following = self.tuned.logits(main[answer])[:, None]  # [n, 1, V]
        next_token, _ = head_loss(following, batch.labels[answer][:, :1], [1.0], batch.global_batch.labels[..., :1])
        logits, weights = self.tuned.logits(mask_states), [1 / k] * k
        masks, accuracy = head_loss(logits, self.labels(batch), weights, self.labels(batch.global_batch))
        return (1 - share) * next_token + share * masks, accuracy

    def states(self, ids: Tensor, at: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """Return final states [B, T, h] of ids [B, T], and [B, A, k, h] of the masks after each `at` [B, A]."""
        target, k, t = self.tuned, self.mask.masks, ids.shape[1]
        row_positions = torch.arange(t, device=ids.device).expand_as(ids)
        text_positions = row_positions if documents is None else documents.position_ids
        steps = torch.arange(1, k + 1, device=ids.device)
        ahead = draft_positions(text_positions.gather(1, at), steps, target.context_length)
        positions = torch.cat((text_positions, ahead), 1)
        x = self.mask.embed(target, ids, positions, at.shape[1] * k)
        mask = additive(self._visible(t, at, steps, documents), x.dtype)
        cache = PrefixCache(dict.fromkeys(range(target.n_layers)))
        (x,) = target.run(x, 0, target.n_layers, cache, mask, target.rotary(positions))
        x = target.family.norm(x)
        return x[:, :t], x[:, t:].unflatten(1, (-1, k))

    def _visible(self, t: int, at: Tensor, steps: Tensor, documents: Documents | None) -> Tensor:
        """Return the attention mask of the text and the masks after it, bool [B, T + A*k, T + A*k]."""
        drafts = draft_visibility(at, steps, t, documents)
        text = text_visibility(torch.arange(t, device=at.device).expand(len(at), -1), t, documents)
        return torch.cat((F.pad(text, (0, drafts.shape[1])), drafts), 1)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the mask and the LoRA in the format of `space`."""
        save(folder, self.mask, self.tuned, about)
