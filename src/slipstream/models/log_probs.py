"""Log-probs and entropy of chosen tokens, without ever holding a [tokens, vocabulary] matrix.

The last hidden states of the positions that predict a loss token come in; they go through the language-model head in
chunks of rows. For more than one chunk the backward pass recomputes each chunk instead of keeping it, so memory is
bounded by one chunk of float32 logits, whatever the length of the batch.

This is the only place where the temperature divides logits, for old, new and reference log-probs and for the entropy
alike. What a family of models does to its logits after the head is applied first, as its own forward pass does.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.divergence import NO_PROBABILITY
from slipstream.errors import ModelError
from slipstream.models.attention import packed_sequences

Transform = Callable[[torch.Tensor], torch.Tensor]

# Tokens of the probe that compares this module with the model's own logits, and what float32 rounding may differ by.
PROBE_TOKENS = 8
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}


def logits_transform(config: Any) -> Transform:
    """What a model does to its logits after the head: soft-capping (Gemma), division (Granite), scaling (Cohere)."""
    softcap = getattr(config, "final_logit_softcapping", None)
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)

    def transform(logits: torch.Tensor) -> torch.Tensor:
        if factor is not None:
            logits = logits * factor
        if divisor is not None:
            logits = logits / divisor
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits

    return transform


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transform: Transform,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of the distribution it is taken from, both float32 [N].

    hidden [N, H], weight [V, H], targets [N] int64. The distribution is softmax(transform(head(hidden)) /
    temperature). Gradients flow through the log-probs, and through the entropy if `entropy_gradient`: where it is only
    a metric, the backward pass then costs nothing for it. N may be 0: the result is then empty but still depends on
    hidden and weight, with gradient 0.
    """

    def compute(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chunk, chunk_targets = rows
        logits = transform(functional.linear(chunk, weight, bias).float()) / temperature
        return log_probs_and_entropy(logits, chunk_targets, entropy_gradient)

    has_gradient = hidden.requires_grad or weight.requires_grad
    log_probs, entropy = in_chunks(compute, (hidden, targets), chunk_tokens=chunk_tokens, has_gradient=has_gradient)
    return log_probs, entropy


def log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V] float32, targets [n] int64 -> log-prob of each target and entropy, [n] each."""
    log_normalizer = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        log_distribution = logits - log_normalizer.unsqueeze(-1)
        # A logit of -inf has probability 0 and must count 0 in value and gradient, which 0 * -inf does not.
        entropy = -(log_distribution.exp() * log_distribution.clamp_min(NO_PROBABILITY)).sum(-1)
    return log_probs, entropy


def in_chunks(
    compute: Callable[..., tuple[torch.Tensor, ...]],
    rows: tuple[torch.Tensor, ...],
    *,
    chunk_tokens: int,
    has_gradient: bool,
) -> tuple[torch.Tensor, ...]:
    """What `compute` makes of `chunk_tokens` of the rows at a time, put together again: [N, ...] each -> [N] each.

    With a gradient and more than one chunk, the backward pass recomputes each chunk instead of keeping it.
    """
    chunks = list(zip(*(part.split(chunk_tokens) for part in rows), strict=True))
    recompute = len(chunks) > 1 and torch.is_grad_enabled() and has_gradient
    results = [checkpoint(compute, *chunk, use_reentrant=False) if recompute else compute(*chunk) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


@torch.no_grad()
def verify_head(model: Any) -> None:
    """Compare `token_log_probs` with the log-softmax of the model's own logits on a few tokens.

    Raises ModelError if they differ: the family then does something to its hidden states or logits that
    `logits_transform` does not know, and every log-prob would be wrong.
    """
    head = model.get_output_embeddings()
    vocabulary = head.weight.shape[0]
    tokens = torch.arange(1, PROBE_TOKENS + 1, device=head.weight.device).remainder(vocabulary).unsqueeze(0)
    positions = torch.arange(PROBE_TOKENS, device=tokens.device).unsqueeze(0)
    arguments = {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "use_cache": False}
    with packed_sequences([PROBE_TOKENS]):
        own = torch.log_softmax(model(**arguments).logits[0].float(), dim=-1)
        hidden = model.get_decoder()(**arguments).last_hidden_state[0]
    targets = own.argmin(-1)
    ours, _ = token_log_probs(
        hidden,
        head.weight,
        targets,
        bias=getattr(head, "bias", None),
        transform=logits_transform(model.config),
        temperature=1.0,
        chunk_tokens=PROBE_TOKENS,
    )
    expected = own.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    difference = (ours - expected).abs().max().item()
    if not difference <= PROBE_TOLERANCE.get(head.weight.dtype, 0.2) * max(1.0, expected.abs().max().item()):
        raise ModelError(
            f"{type(model).__name__} transforms its hidden states or logits in a way Slipstream does not know: its "
            f"log-probs differ from ours by {difference:.3g}. Known are final_logit_softcapping, logits_scaling and "
            f"logit_scale; this family cannot be trained"
        )
