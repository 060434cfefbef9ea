# examples/first_run/train.py
from slipstream import RLConfig, ScoredText, train_rl


def right(text: ScoredText) -> float:
    return 1.0 if text.response.strip().rstrip(".") == text.label else 0.0


config = RLConfig.model_validate(
    {
        "output_dir": "runs/first_from_python",
        "steps": 20,
        "model": {"path": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "data": {"source": "examples/first_run/questions.jsonl"},
        "rollout": {"groups_per_step": 8, "samples_per_prompt": 8, "max_response_tokens": 32},
        "training": {"learning_rate": 1.0e-5},
        "evaluation": {"data": {"source": "examples/first_run/held_out.jsonl"}},
    }
)
summary = train_rl(config, reward=right)
print(f"{summary['accuracy_before']:.0%} before, {summary['accuracy_after']:.0%} after")
