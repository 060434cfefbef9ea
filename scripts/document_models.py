"""The families of models that are tried, the table of docs/models.md, and the comparison of each with vLLM.

`scripts/document_models.py` rewrites the table from the list below; tests/models/test_families.py shows that the table
is true. `scripts/document_models.py --vllm [FAMILY ...]` starts vLLM on a tiny random model of each family (all of
those that the table says vLLM runs), publishes other weights to it, and prints how far its log-probs are from those of
Transformers before and after.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN = "<!-- begin: written by scripts/document_models.py -->"
END = "<!-- end: written by scripts/document_models.py -->"

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# vLLM's kernels want heads of at least 32.
VLLM_SIZES = {"head_dim": 32, "hidden_size": 128, "vocab_size": 320, "max_position_embeddings": 256}
LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Family:
    """A family by Transformers' name of it, and what a tiny model of it has.

    `traits` is for the document; `in_vllm` whether `--vllm` has shown that vLLM computes the same; `in_pieces` whether
    tests show that tensor-parallel ranks compute the same.
    """

    traits: str
    settings: dict[str, Any] = field(default_factory=dict)
    in_vllm: bool = False
    in_pieces: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "grouped queries, biases in attention and MLP",
        {"attention_bias": True, "mlp_bias": True},
        in_vllm=True,
        in_pieces=True,
    ),
    "qwen2": Family("biases of query, key and value", in_vllm=True, in_pieces=True),
    "qwen3": Family(
        "normalised queries and keys, tied embeddings", {"tie_word_embeddings": True}, in_vllm=True, in_pieces=True
    ),
    "qwen3_moe": Family(
        "experts",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True},
        in_vllm=True,
    ),
    "mistral": Family("sliding window", {"sliding_window": 4}, in_vllm=True, in_pieces=True),
    "mixtral": Family(
        "experts, stored under other names", {"num_local_experts": 4, "num_experts_per_tok": 2}, in_vllm=True
    ),
    "gemma2": Family(
        "soft-capped scores and logits, sliding window in every other layer, tied embeddings",
        {"sliding_window": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
        in_vllm=True,
        in_pieces=True,
    ),
    "gemma3_text": Family(
        "two kinds of rotary positions, sliding window, tied embeddings",
        {"sliding_window": 4, "final_logit_softcapping": 3.0, "num_hidden_layers": 6},
        in_vllm=True,
        in_pieces=True,
    ),
    "phi3": Family("query, key and value in one matrix", {"sliding_window": 4}),
    "olmo2": Family("normalisation after the layers, of whole queries and keys", in_vllm=True),
    "gpt_neox": Family("biases, layer norm, partial rotary positions, head stored under another name", in_pieces=True),
    "gpt2": Family(
        "learned positions, transposed matrices, tied embeddings",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "smollm3": Family(
        "layers without positions, tied embeddings",
        {"num_hidden_layers": 4, "tie_word_embeddings": True},
        in_vllm=True,
        in_pieces=True,
    ),
    "granite": Family(
        "divided logits, scaled residuals",
        {"logits_scaling": 4.0, "residual_multiplier": 0.5},
        in_vllm=True,
        in_pieces=True,
    ),
    "cohere": Family(
        "multiplied logits, parallel layers, tied embeddings", {"logit_scale": 0.25}, in_vllm=True, in_pieces=True
    ),
    "deepseek_v3": Family(
        "latent attention (keys and values of different size), experts with a balancing bias",
        LATENT_ATTENTION | DEEPSEEK_EXPERTS,
    ),
    "gpt_oss": Family(
        "attention sinks, sliding window in every other layer, experts with biases",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("position biases, which packed rows would get wrong", {}),
    "mpt": ("position biases, which need a mask", {}),
    "gptj": ("attention from a table of its own", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    "mamba": ("a state from token to token", {}),
    "qwen3_next": ("a state from token to token", {"num_experts": 4, "num_experts_per_tok": 2}),
    "llama4_text": ("attention in chunks", {"num_local_experts": 2}),
}


def save_model(family: str, folder: Path, *, seed: int = 11, **changes: Any) -> Path:
    """A tiny random model of the family in `folder`: float32 weights, no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = FAMILIES[family].settings if family in FAMILIES else REFUSED[family][1]
    config = AutoConfig.for_model(family, **(SIZES | settings | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        # Zeros and ones, as biases and scales begin with, would hide a mistake in them.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------------------------------- the document


def updated(document: str) -> str:
    """The document with the text between the markers replaced. Raises ValueError where the markers are missing."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(document)) != 1:
        raise ValueError(f"{DOCUMENT} must contain the two markers once: {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{generated()}\n\n{END}", document)


def generated() -> str:
    """The table of families that hold, and of those that are refused."""
    lines = ["| family | what is special about it | equal in vLLM | tensor parallel |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        in_vllm, in_pieces = "yes" if family.in_vllm else "not shown", "yes" if family.in_pieces else "refused"
        lines.append(f"| `{name}` | {family.traits} | {in_vllm} | {in_pieces} |")
    lines += ["", "Refused when the model is loaded:", "", "| family | because of |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, (reason, _) in REFUSED.items()]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- the comparison


def compare_with_vllm(family: str) -> tuple[float, float]:
    """Largest difference of a probe's log-probs between vLLM and Transformers: as loaded, and after a publish."""
    from slipstream.data.tokenizer import train_tokenizer
    from slipstream.rollout.messages import RolloutEngineSpec
    from slipstream.rollout.vllm_engine import VLLMEngine, vllm_environment

    with tempfile.TemporaryDirectory() as directory:
        first, second = (save_model(family, Path(directory) / str(s), seed=s, **_vllm_sizes(family)) for s in (1, 2))
        train_tokenizer(["What is 2 + 3?5"], 300).save_pretrained(first)
        spec = RolloutEngineSpec(
            model_path=str(first),
            dtype="float32",
            device="cpu",
            max_sequence_tokens=64,
            max_concurrent_sequences=8,
            kv_cache_bytes=1 << 26,
            gpu_memory_share=0.5,
            threads=1,
            seed=0,
            engine_index=0,
        )
        os.environ.update(vllm_environment(spec))
        return asyncio.run(_compare(VLLMEngine(spec), first, second))


def _vllm_sizes(family: str) -> dict[str, Any]:
    return VLLM_SIZES | {name: value for name, value in FAMILIES[family].settings.items() if name not in SIZES}


async def _compare(engine: Any, first: Path, second: Path) -> tuple[float, float]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from slipstream.models.stored_weights import model_tensors, stored_weights
    from slipstream.weights.channel import open_sender
    from slipstream.weights.plan import ChannelAddress, make_plan

    tokens = np.arange(3, 19) * 17 % 300
    row = torch.from_numpy(tokens)

    async def difference(model: Any) -> float:
        with torch.no_grad():
            expected = model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0].numpy()
        return float(np.abs(np.asarray(await engine.probe(tokens)) - expected).max())

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()

    await engine.start()
    try:
        loaded = await difference(load(first))
        model = load(second)
        tensors = model_tensors(model)
        stored = stored_weights(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        channel = ChannelAddress("shared_memory", f"families-{os.getpid()}")
        plan = make_plan(((name, "float32", weight.shape) for name, weight in stored.items()), 1 << 18, channel=channel)
        sender = open_sender(plan, None)
        try:
            await engine.begin_update()
            for index, bucket in enumerate(plan.buckets):
                pieces = {s.name: stored[s.name].view(tensors[stored[s.name].source].detach()) for s in bucket.tensors}
                sender.send(bucket, pieces)
                await engine.load_bucket(plan, index)
            await engine.finish_update(1)
        finally:
            sender.close()
        return loaded, await difference(model)
    finally:
        await engine.shutdown()


def main() -> int:
    """Rewrite the table, or with --vllm compare families with vLLM, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", nargs="*", metavar="FAMILY", choices=list(FAMILIES), help="compare with vLLM")
    families = parser.parse_args().vllm
    if families is None:
        before = DOCUMENT.read_text(encoding="utf-8")
        after = updated(before)
        DOCUMENT.write_text(after, encoding="utf-8")
        print(f"{DOCUMENT.relative_to(ROOT)}: {'unchanged' if after == before else 'rewritten'}")
        return 0
    if len(families) == 1:
        loaded, published = compare_with_vllm(families[0])
        print(f"{families[0]}: {loaded:.3g} as loaded, {published:.3g} after a publish", flush=True)
        return 0
    chosen = families or [name for name, family in FAMILIES.items() if family.in_vllm]
    codes = [subprocess.run([sys.executable, __file__, "--vllm", family], check=False).returncode for family in chosen]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
