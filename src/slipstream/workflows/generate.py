"""Answers to the prompts of a data set, scored if there is a reward, and the best of them written as data.

Prompts are answered in rounds of `rollout.groups_per_step`, each begun when the one before it is written. What an
engine is asked for at a time, and so every bit of its answers, then follows from the configuration alone, and a run
that goes on after an interruption repeats at most one round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.cluster.session import ClusterSession, terminate_as_interrupt
from slipstream.config.generate import GenerateConfig
from slipstream.config.loader import dump_config
from slipstream.data.tokenizer import load_tokenizer
from slipstream.data.trajectory import Group, Prompt, PromptOccurrence
from slipstream.errors import RewardError, RunDirectoryError
from slipstream.observe.files import JsonLinesFile, json_line_records, replace_json_lines, to_json
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.rollout.group_stream import Generators, GroupStream
from slipstream.rollout.messages import SamplingParameters
from slipstream.workflows.answers import AnswerCounts, Record, answer_record, best_rows, pair_rows
from slipstream.workflows.checks import check_config
from slipstream.workflows.engines import start_answering_engines
from slipstream.workflows.held_out import load_prompts
from slipstream.workflows.records import RunRecords
from slipstream.workflows.rl import require_reward

BEST_FILE, PAIRS_FILE = "best.jsonl", "pairs.jsonl"

logger = get_logger("generate")


@dataclass(frozen=True)
class _Question:
    """A prompt and the name of its source, '' where there is one source."""

    source: str
    prompt: Prompt

    @property
    def group_id(self) -> str:
        return f"{self.source}:{self.prompt.row}" if self.source else str(self.prompt.row)


def generate(config: GenerateConfig, *, reward: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Answer all prompts as `config` says; returns the summary that is also written to `summary.json`.

    `reward` may be a function in place of `reward.function` in the configuration. Raises a SlipstreamError for
    anything the user can mend.
    """
    check_config(config, reward=reward)
    # Before there is a run directory: data that cannot be used leaves nothing behind.
    questions = _load_questions(config, reward)
    with RunDirectory.create(config.output_dir, dump_config(config), "generate") as directory:
        return _Generation(config, directory, questions, reward).run()


def resume_generate(
    config: GenerateConfig, directory: RunDirectory, *, reward: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Go on with an interrupted run: with the prompts after the last round that was written whole."""
    return _Generation(config, directory, _load_questions(config, reward), reward).run()


def _load_questions(config: GenerateConfig, reward: Callable[..., Any] | None) -> list[_Question]:
    """The prompts of all sources, one source after the other; says what was dropped and why."""
    if reward is not None or config.reward.is_given:
        require_reward(config.reward, reward)
    tokenizer = load_tokenizer(config.model.path)
    mixture = load_prompts(config.data, tokenizer, key="data", noun="prompts", needs_label=config.reward.compares)
    return [_Question(name, prompt) for name, prompts in mixture.parts.items() for prompt in prompts]


class _Generation:
    """A run in progress."""

    def __init__(
        self,
        config: GenerateConfig,
        directory: RunDirectory,
        questions: Sequence[_Question],
        reward: Callable[..., Any] | None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.reward = reward
        self.is_scored = reward is not None or config.reward.is_given
        size = config.rollout.groups_per_step
        self.rounds = [questions[start : start + size] for start in range(0, len(questions), size)]

    def run(self) -> dict[str, Any]:
        """Answer what has no answer yet, choose, and write the summary."""
        started = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(terminate_as_interrupt())
            answers = JsonLinesFile(self.directory.answers_path)
            stack.callback(answers.close)
            done = self._rounds_done(answers)
            records = stack.enter_context(
                RunRecords(self.directory, self.config.tracking, title="generate", total_steps=len(self.rounds), keep=1)
            )
            if done < len(self.rounds):
                self._answer(stack, records, answers, done)
            selected = self._select() if self.is_scored else {}
            counts = AnswerCounts(self.config.minimum_reward)
            for record in self._records():
                counts.add(record)
            if self.is_scored and not selected["best"]:
                logger.warning(
                    f"no answer was chosen: of {counts.answers} answers {counts.truncated} were cut at "
                    f"rollout.max_response_tokens ({self.config.rollout.max_response_tokens}), {counts.unscored} have "
                    "no reward, and the others are empty or below minimum_reward"
                )
            return records.finish(
                {
                    "workflow": "generate",
                    **counts.summary(is_scored=self.is_scored),
                    **selected,
                    "seconds": round(time.monotonic() - started, 1),
                    "run_dir": str(self.directory.path),
                }
            )

    def _rounds_done(self, answers: JsonLinesFile) -> int:
        """How many rounds are written whole; drops the lines of one that is not.

        Raises RunDirectoryError if the answers are not those to these prompts.
        """
        questions = (question for round_ in self.rounds for question in round_)
        starts = []
        for number, (start, record) in enumerate(json_line_records(answers.path), start=1):
            question = next(questions, None)
            if (
                question is None
                or (record.get("row"), record.get("source", "")) != (question.prompt.row, question.source)
                or record.get("prompt") != json.loads(to_json(question.prompt.given))
            ):
                raise RunDirectoryError(
                    f"{answers.path}, line {number}: this is no answer to the prompt that data.source has in this "
                    "place: the data has changed since the run was started; restore it, or start a new run"
                )
            starts.append(start)
        done, written = 0, 0
        while done < len(self.rounds) and written + len(self.rounds[done]) <= len(starts):
            written += len(self.rounds[done])
            done += 1
        if written < len(starts):
            answers.truncate(starts[written])
        return done

    def _answer(self, stack: ExitStack, records: RunRecords, answers: JsonLinesFile, done: int) -> None:
        """Start the engines and write the answers of every round after the first `done`."""
        session = stack.enter_context(ClusterSession(self.config.cluster, log_folder=self.directory.path / "logs"))
        with records.console.phase("starting the engines"):
            generators = start_answering_engines(
                session,
                self.config,
                tokenizer=load_tokenizer(self.config.model.path),
                timeline=records.timeline,
                reward=self.reward,
            )
        records.restore(step=done, ledger_state={"offset": 0})
        if done:
            logger.info("resumed", rounds_done=done, rounds=len(self.rounds))
        has_scored = done > 0
        for step, questions in enumerate(self.rounds[done:], start=done + 1):
            began = time.monotonic()
            groups = self._groups(generators, questions)
            has_scored = self._check_rewards(groups, has_scored=has_scored)
            for question, group in zip(questions, groups, strict=True):
                answers.write(answer_record(group, question.source))
            shown = [group.trajectories[0] for group in groups]
            metrics = _round_metrics(groups, seconds=time.monotonic() - began)
            records.write_step(step, 0, metrics=metrics, trajectories=shown)

    def _groups(self, generators: Generators, questions: Sequence[_Question]) -> list[Group]:
        """The scored answers to a round of prompts, in their order."""
        rollout = self.config.rollout
        sampling = SamplingParameters(
            temperature=rollout.temperature,
            max_response_tokens=rollout.max_response_tokens,
            stop=tuple(rollout.stop),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        # A stream of its own for each round: which prompt goes to which engine begins anew.
        stream = GroupStream(generators, sampling, samples_per_prompt=rollout.samples_per_prompt, purpose="generation")
        stream.submit([PromptOccurrence(question.group_id, question.prompt) for question in questions])
        groups: dict[str, Group] = {}
        while not stream.is_empty:
            group = stream.next_group()
            if group is not None:
                groups[group.group_id] = group
        return [groups[question.group_id] for question in questions]

    def _check_rewards(self, groups: Sequence[Group], *, has_scored: bool) -> bool:
        """Whether any answer has been scored so far.

        Raises RewardError where a failure is to stop the run, and where the reward fails for everything: a whole round,
        or all there is.
        """
        failures = [failure for group in groups for failure in group.failures.items()]
        if not failures:
            return True
        trajectory_id, failure = failures[0]
        if self.config.reward.on_failure == "stop":
            raise RewardError(f"the reward of answer {trajectory_id}: {failure} (reward.on_failure is 'stop')")
        answers = sum(len(group.trajectories) for group in groups)
        if len(failures) < answers:
            logger.warning(f"the reward failed for {len(failures)} of {answers} answers, such as {failure}")
            return True
        is_last_of_many = has_scored and len(groups) < self.config.rollout.groups_per_step
        if not is_last_of_many:
            raise RewardError(
                f"the reward failed for all {answers} answers of a round; the first one: {trajectory_id}: {failure}. "
                "Mend the reward function (reward.function) or service (reward.urls), then go on with "
                "`slipstream resume`"
            )
        return has_scored

    def _records(self) -> Iterator[Record]:
        return (record for _, record in json_line_records(self.directory.answers_path))

    def _select(self) -> dict[str, int]:
        """Write the best answers and the pairs; how many there are of each."""
        minimum = self.config.minimum_reward
        selections: dict[str, Iterable[Record]] = {
            BEST_FILE: best_rows(self._records(), minimum),
            PAIRS_FILE: pair_rows(self._records(), minimum),
        }
        counts = {}
        for name, rows in selections.items():
            counts[Path(name).stem] = replace_json_lines(self.directory.path / name, rows)
        return counts


def _round_metrics(groups: Sequence[Group], *, seconds: float) -> dict[str, float]:
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    lengths = [answer.response_length for answer in answers]
    metrics = {
        "response_length/mean": float(np.mean(lengths)),
        "response_length/truncated_share": float(np.mean([answer.finish_reason == "length" for answer in answers])),
        "time/generate": seconds,
        "throughput/generated_tokens_per_s": sum(lengths) / seconds,
    }
    if rewards:
        metrics["reward/mean"] = float(np.mean(rewards))
    return metrics
