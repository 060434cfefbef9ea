"""The engine that was busy most is named, with the others beside it."""

from slipstream.observe.bottleneck import bottleneck_text


def line(seconds: float, **idle: float) -> dict[str, float]:
    return {"time/step": seconds, **{f"idle/{name}": share for name, share in idle.items()}}


def test_the_busiest_engine_is_named_with_its_lead_over_the_next() -> None:
    lines = [line(10.0, learner=0.5, rollout_engine_0=0.9, reward_engine=0.1)] * 2
    assert bottleneck_text(lines) == (
        "The reward engine was the bottleneck: busy 90% of the time, 40 points more than the next "
        "(the learner 50%, the rollout engine 0 10%)."
    )


def test_of_many_engines_the_busiest_are_named() -> None:
    idle = {f"rollout_engine_{number}": number / 100 for number in range(50)}
    text = bottleneck_text([line(10.0, learner=0.3, **idle)]) or ""
    assert text.startswith(
        "The rollout engine 0 was the bottleneck: busy 100% of the time, 1 points more than the next"
    )
    assert text.count("rollout engine") == 7
    assert text.endswith("the rollout engine 6 94%, and 44 more down to 51%).")


def test_a_step_counts_by_its_length() -> None:
    lines = [line(1.0, learner=0.0, reward_engine=1.0), line(3.0, learner=1.0, reward_engine=0.0)]
    assert "The reward engine was the bottleneck: busy 75%" in (bottleneck_text(lines) or "")


def test_where_nothing_was_measured_nothing_is_said() -> None:
    assert bottleneck_text([]) is None
    assert bottleneck_text([{"time/step": 1.0, "loss": 2.0}]) is None
