"""Whole runs whose reward fails: the books balance, and the gradients are those of the groups that survived."""

import json
import pickle
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.ledger import read_balance
from slipstream.observe.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS, SAMPLES, STEPS = 8, 4, 3

FAULTY = '''\
"""A reward that fails on about one response in ten, each time in the next of five ways."""

import os
import time
import zlib
from pathlib import Path


def digest(response):
    return sum(response.encode()) % 7 / 7


def fails(response):
    return zlib.crc32(response.encode()) % 10 == 3


def reward(text):
    if not fails(text.response):
        return digest(text.response)
    with open("faults", "a") as faults:
        faults.write(".")
    way = len(Path("faults").read_text()) % 5
    if way == 0:
        raise KeyError("no such answer")
    if way == 1:
        time.sleep(600)
    if way == 2:
        os._exit(3)
    if way == 3:
        return float("nan")
    return len(bytearray(1 << 40))
'''

RECORDED_RUN = """
import pickle
from slipstream import RLConfig, train_rl
from slipstream.config.loader import load_config
from slipstream.workflows import rl

prepare, batches = rl.prepare, []

def recorded(groups, *arguments, **options):
    batches.append([[(t.tokens, t.loss_mask, t.reward, t.response_text) for t in g.trajectories] for g in groups])
    return prepare(groups, *arguments, **options)

rl.prepare = recorded
train_rl(load_config(RLConfig, None, {overrides!r}))
with open("batches.pickle", "wb") as file:
    pickle.dump(batches, file)
"""


@pytest.fixture(scope="module")
def faulty_run(make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run with that reward: its workbench, and for each step its groups of (tokens, mask, reward, text)."""
    bench = make_workbench(tmp_path_factory.mktemp("faults"))
    (bench.folder / "faulty.py").write_text(FAULTY)
    settings = bench.rl_settings(
        steps=STEPS,
        reward__function="faulty.py:reward",
        reward__on_failure="drop_group",
        reward__timeout_s=1,
        reward__memory_bytes=1 << 30,
        rollout__groups_per_step=GROUPS,
        rollout__samples_per_prompt=SAMPLES,
        checkpoint__every_steps=1,
        checkpoint__keep=STEPS,
        output_dir="run",
    )
    process = bench.script(RECORDED_RUN.format(overrides=[f"--{key}={value}" for key, value in settings.items()]))
    assert process.finish() == 0, f"{process.stdout}\n{process.stderr}"
    assert process.survivors(limit_s=10) == [], "the calls that never returned were killed"
    return bench, pickle.loads((bench.folder / "batches.pickle").read_bytes())


def test_five_kinds_of_faults_are_counted_and_the_books_balance(faulty_run: Any) -> None:
    bench, _ = faulty_run
    run = bench.folder / "run"
    faults = len((bench.folder / "faults").read_text())
    assert faults >= 5, "every way of failing occurred"
    ways = Counter(number % 5 for number in range(1, faults + 1))
    counted: Counter[str] = Counter()
    for line in read_metrics(run / "metrics.jsonl"):
        counted.update({name: value for name, value in line.items() if name.startswith("reward/failures")})
    assert counted == {
        "reward/failures": faults,
        "reward/failures/raised": ways[0] + ways[4],
        "reward/failures/timed_out": ways[1],
        "reward/failures/killed": ways[2],
        "reward/failures/returned": ways[3],
    }

    balance = read_balance(run / "ledger.jsonl")
    assert (balance.trained, balance.pending, balance.filtered) == (STEPS * GROUPS, 0, {})
    assert balance.issued == balance.accounted == balance.trained + sum(balance.failed.values())
    failed = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines() if '"failed"' in line]
    assert len(failed) <= faults <= len(failed) * SAMPLES
    assert {record["kind"] for record in failed} <= {"raised", "timed_out", "killed", "returned"}
    assert all(record["why"] for record in failed)


def test_groups_are_trained_on_whole_or_not_at_all(faulty_run: Any) -> None:
    _, batches = faulty_run
    rules: dict[str, Any] = {}
    exec(FAULTY, rules)
    assert [len(batch) for batch in batches] == [GROUPS] * STEPS
    for group in (group for batch in batches for group in batch):
        assert len(group) == SAMPLES
        assert not any(rules["fails"](response) for *_, response in group), "its group was dropped"
        assert [reward for _, _, reward, _ in group] == [rules["digest"](response) for *_, response in group]


def gradient_norm(folder: Path, groups: list[Any], state: dict[str, Any] | None = None) -> float:
    """The norm of the gradient of one on-policy GRPO step, written down plainly: sequence by sequence, no packing.

    The loss is - sum over all policy tokens of advantage * log-prob, divided by their number; the advantage of a
    response is its reward less the mean of its group, divided by the group's standard deviation.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if state is not None:
        model.load_state_dict({name: state[name] for name in dict(model.named_parameters())}, strict=False)
    total = sum(int(mask.sum()) for group in groups for _, mask, _, _ in group)
    for group in groups:
        rewards = torch.tensor([reward for _, _, reward, _ in group], dtype=torch.float64)
        if (rewards == rewards[0]).all():
            continue
        advantages = (rewards - rewards.mean()) / rewards.std()
        for (tokens, mask, _, _), advantage in zip(group, advantages.tolist(), strict=True):
            row = torch.from_numpy(tokens)
            log_probs = model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
            (-advantage * log_probs[torch.from_numpy(mask[1:])].sum() / total).backward()
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def test_every_update_is_the_one_computed_from_the_surviving_groups_alone(faulty_run: Any) -> None:
    import torch

    bench, batches = faulty_run
    reported = [line["policy/gradient_norm"] for line in read_metrics(bench.folder / "run/metrics.jsonl")]
    for step, batch in enumerate(batches):
        state = None
        if step:
            path = bench.folder / f"run/checkpoints/step-{step:06d}/learner/engine/mp_rank_00_model_states.pt"
            weights = torch.load(path, weights_only=False)["module"]
            state = {name.removeprefix("model."): value for name, value in weights.items()}
        assert reported[step] == pytest.approx(gradient_norm(bench.policy, batch, state), rel=1e-4)
        assert reported[step] != pytest.approx(gradient_norm(bench.policy, batch[:-1], state), rel=1e-3)


# ---------------------------------------------------------------- a service


def test_with_a_service_every_reward_comes_from_it(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the handle of the service was overwritten, and runs went on without it (OpenRLHF/OpenRLHF#1113)."""
    monkeypatch.setenv("SLIPSTREAM_REWARD_TOKEN", "sesame-17")
    requests: list[dict[str, Any]] = []
    tokens: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(request)
            tokens.add(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            reward = len(requests) / 64
            self.wfile.write(json.dumps({"reward": reward, "answer": request["response"][:3]}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        settings = bench.rl_settings(steps=2, reward__urls=[url]) | {"reward.function": "null"}
        bench.run("rl", "run", settings)
        server.shutdown()

    run = bench.folder / "run"
    balance = read_balance(run / "ledger.jsonl")
    assert (balance.issued, balance.trained, len(requests)) == (8, 8, 8 * 4)
    assert tokens == {"Bearer sesame-17"}
    assert not [path for path in run.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]
    given = {(request["prompt"], request["response"]): index for index, request in enumerate(requests, start=1)}
    kept = [json.loads(line) for line in bench.rollouts("run")]
    assert len(kept) == 8
    assert [line["answer"] for line in kept] == [line["response"][:3] for line in kept]
    assert all((line["prompt"], line["response"]) in given for line in kept)
    means = [line["reward/mean"] for line in read_metrics(run / "metrics.jsonl")]
    assert sum(means) / 2 == pytest.approx(sum(range(1, 33)) / 32 / 64), "each of the 32 rewards was used once"


def test_a_service_that_is_not_there_stops_the_run_before_its_first_step(bench: Any) -> None:
    settings = bench.rl_settings(reward__urls=["http://127.0.0.1:9"]) | {"reward.function": "null"}
    process = bench.start("rl", "run", settings)
    assert process.finish() == 1
    assert "Traceback" not in process.stderr
    assert "the reward service at http://127.0.0.1:9 does not answer" in process.stderr.splitlines()[-1]
    assert not (bench.folder / "run/metrics.jsonl").read_text()
