"""Runs one rank of a job in a process of its own: `python rank_program.py JOB RESULT`.

A job is a pickled meeting point and a list of (spec, calls). Each pair becomes a learner that makes its calls, (label,
method, arguments), where "weights" is a method too. The result is a pickled list of {label: answer}; an error of
Slipstream's is the answer "error" and ends the job.
"""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import SlipstreamError
from slipstream.training.learner import LearnerRank


def run_job(meeting_point: tuple[str, int], job: list) -> list[dict[str, Any]]:
    results = []
    for spec, calls in job:
        answers: dict[str, Any] = {}
        results.append(answers)
        try:
            learner = LearnerRank(spec)
            learner.start(meeting_point)
            for label, method, arguments in calls:
                call = whole_weights if method == "weights" else getattr(LearnerRank, method)
                answers[label] = call(learner, *arguments)
            learner.shutdown()
        except SlipstreamError as error:
            answers["error"] = error
            break
    return results


def whole_weights(learner: LearnerRank) -> dict[str, torch.Tensor]:
    with learner._weights.parameters(list(learner._weights.shapes)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


if __name__ == "__main__":
    meeting_point, job = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps(run_job(meeting_point, job)))
    # A rank under Ray ends like this too. In an interpreter that is coming to its end, a thread of gloo's that lets go
    # of a tensor would abort the process, though everything had been done.
    os._exit(0)
