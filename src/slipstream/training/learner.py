"""One rank of a learner: a DeepSpeed engine around a policy or a critic, with a reference model where one is needed.

A plain class with synchronous methods; the cluster wraps it in an actor, one per rank. The ranks run in step: each
method is called on all of them, since almost all take part in collective operations. What is minimized is an
objective passed to `update`; batches come as micro-batches that were cut before (data/packing.py), the same number on
every rank.

The loss of an optimizer step is a sum over all its tokens on all ranks, each with a weight that already carries the
denominator of the whole step. Gradients therefore do not depend on how the step is cut or spread.

What differs between a policy and a critic is in `roles.py`. Left out: partitioning while loading (each rank holds the
whole model for a moment), and a reference model that is partitioned too.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from slipstream.algorithms.objective import Objective, ObjectiveOutput
from slipstream.config.schema import TrainingConfig
from slipstream.data.trajectory import FloatArray, IntArray, TrainingExample
from slipstream.errors import TrainingError, WeightSyncError
from slipstream.models.attention import packed_sequences
from slipstream.models.hardware import detect_hardware, resolve_dtype
from slipstream.training.batch import MicroBatch, make_micro_batch
from slipstream.training.checkpoint import export_model, load_checkpoint, save_checkpoint
from slipstream.training.deepspeed_config import deepspeed_config
from slipstream.training.optimizer import make_optimizer, set_learning_rate, take_step
from slipstream.training.process_group import import_deepspeed, join_process_group, open_listener
from slipstream.training.reference import ReferenceModel
from slipstream.training.roles import ROLES, RoleName
from slipstream.training.totals import StepTotals, nonfinite_examples
from slipstream.weights.channel import WeightSender, open_sender
from slipstream.weights.plan import ChannelAddress, WeightPlan, make_plan

MicroBatches = Sequence[Sequence[TrainingExample]]


@dataclass(frozen=True)
class LearnerSpec:
    """Everything a rank needs to start; made by the controller from the configuration.

    `temperature` is that of sampling: 1 for supervised training. `total_optimizer_steps` is where the learning-rate
    schedule ends. `model_key` is the configuration key that `model_path` comes from, for messages. `timeout_s` bounds
    the meeting of the ranks and each collective operation.
    """

    model_path: str
    dtype: str
    training: TrainingConfig
    temperature: float
    total_optimizer_steps: int
    load_reference: bool
    seed: int
    rank: int
    world_size: int
    role: RoleName = "policy"
    model_key: str = "model.path"
    activation_checkpointing: bool = False
    timeout_s: float = 1800.0


class LearnerRank:
    """One learner process. `meeting_point` of rank 0, then `start` on all ranks, then everything else on all ranks."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._role = ROLES[spec.role]
        self._engine: Any = None
        self._optimizer_step = 0
        self._plan: WeightPlan | None = None
        self._sender: WeightSender | None = None
        self._listeners: dict[int, socket.socket] = {}

    # ------------------------------------------------------------------ start and stop

    def meeting_point(self, address: str) -> tuple[str, int]:
        """This host's `address` and a port on it that is ours: where ranks, or the ends of a weight channel, can meet.

        `start` or the weight plan that is given the meeting point takes the port over.
        """
        listener = open_listener(address)
        port = int(listener.getsockname()[1])
        self._listeners[port] = listener
        return address, port

    def start(self, meeting_point: tuple[str, int]) -> dict[str, Any]:
        """Meet the other ranks where rank 0 said, and load the models; returns what was loaded.

        Raises ConfigError for a combination DeepSpeed cannot train, ModelError, and TrainingError if the others do
        not come.
        """
        spec = self._spec
        started = time.monotonic()
        if spec.training.threads is not None:
            torch.set_num_threads(spec.training.threads)
        torch.manual_seed(spec.seed)
        hardware = detect_hardware()
        self._device = hardware.device
        self._dtype = resolve_dtype(spec.dtype, hardware)
        config = deepspeed_config(spec.training, dtype=self._dtype, device=self._device)
        join_process_group(
            rank=spec.rank,
            world_size=spec.world_size,
            meeting_point=meeting_point,
            listener=self._listeners.pop(meeting_point[1], None),
            device=self._device,
            backend=hardware.collective_backend,
            timeout_s=spec.timeout_s,
        )
        module = self._load_module(activation_checkpointing=spec.activation_checkpointing)
        model = module.get_submodule("model")
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._deepspeed = import_deepspeed(self._device)
        self._engine, *_ = self._deepspeed.initialize(
            model=module, optimizer=make_optimizer(module, spec.training), config=config
        )
        self._reference: ReferenceModel | None = None
        if spec.load_reference:
            self._reference = ReferenceModel(lambda: self._load_module(activation_checkpointing=False))
        return {
            "parameters": sum(math.prod(shape) for shape in self._shapes.values()),
            "memory_bytes": _resident_bytes(),
            "device": self._device,
            "dtype": self._dtype,
            "seconds": time.monotonic() - started,
        }

    def shutdown(self) -> None:
        """Release the weight channel and the engine; safe at any time. The process group goes with the process."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None

    def _load_module(self, *, activation_checkpointing: bool) -> torch.nn.Module:
        spec = self._spec
        module = self._role.load(
            spec.model_path,
            key=spec.model_key,
            dtype=self._dtype,
            training=spec.training,
            activation_checkpointing=activation_checkpointing,
        )
        return module.to(self._device)

    # ------------------------------------------------------------------ the optimizer step

    def update(self, micro_batches: MicroBatches, objective: Objective) -> dict[str, Any]:
        """One optimizer step; returns its metrics, the same on all ranks.

        `loss`, the metrics of the model (`entropy`) and of the objective, `tokens` (loss tokens on all ranks),
        `gradient_norm` (before clipping), `learning_rate`, `skipped`, `seconds`. A step with a non-finite value at a
        loss token or in a gradient is skipped: weights and optimizer state stay as they are, `skipped` is 1,
        `gradient_norm` is NaN and `nonfinite_examples` lists the ids of the examples the values came from. It counts
        for the schedule.
        """
        if not micro_batches:
            raise TrainingError("an optimizer step needs at least one micro-batch on every rank, found none")
        started = time.monotonic()
        learning_rate = set_learning_rate(
            self._engine,
            self._spec.training,
            step=self._optimizer_step,
            total_steps=self._spec.total_optimizer_steps,
        )
        self._engine.train()
        totals = StepTotals()
        for index, examples in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            batch = make_micro_batch(examples, self._device)
            # The backward pass recomputes attention under activation checkpointing, so it lies within the context.
            with packed_sequences(batch.lengths):
                loss = self._accumulate_loss(batch, objective, totals)
                # DeepSpeed averages gradients over ranks; the loss is a sum over them.
                self._engine.backward(loss * self._spec.world_size, scale_wrt_gas=False)
        totals = totals.over_all_ranks()
        gradient_norm = take_step(self._engine, self._spec.training.zero_stage)
        self._optimizer_step += 1
        skipped = not math.isfinite(gradient_norm)
        metrics: dict[str, Any] = totals.metrics() | {
            "gradient_norm": math.nan if skipped else gradient_norm,
            "learning_rate": learning_rate,
            "skipped": float(skipped),
            "seconds": time.monotonic() - started,
        }
        if skipped:
            metrics["nonfinite_examples"] = sorted(totals.nonfinite_examples)
        return metrics

    def loss(self, micro_batches: MicroBatches, objective: Objective) -> dict[str, Any]:
        """The loss and the objective's metrics over a batch, without an update: for held-out data."""
        totals = StepTotals()
        with self._evaluating():
            for examples in micro_batches:
                batch = make_micro_batch(examples, self._device)
                with packed_sequences(batch.lengths):
                    self._accumulate_loss(batch, objective, totals)
        totals = totals.over_all_ranks()
        return totals.metrics() | {"nonfinite_examples": sorted(totals.nonfinite_examples)}

    def _accumulate_loss(self, batch: MicroBatch, objective: Objective, totals: StepTotals) -> torch.Tensor:
        """The weighted loss of a micro-batch, a scalar; its metrics are added to `totals`."""
        outputs = self._role.run(
            self._engine,
            batch,
            temperature=self._spec.temperature,
            entropy_gradient=objective.needs_entropy_gradient,
        )
        learned = outputs[self._role.output]
        if batch.loss_tokens == 0:
            return learned.sum()
        if "weight" not in batch.fields:
            raise TrainingError(
                f"example {batch.example_ids[0]!r} has no token field 'weight', the share of each token"
            )
        output: ObjectiveOutput = objective(outputs, batch.fields, batch.sequence_index)
        loss = (output.loss * batch.fields["weight"]).sum()
        model_metrics = {name: values.detach() for name, values in outputs.items() if name != self._role.output}
        totals.add(batch, loss.detach(), model_metrics, output)
        offenders = nonfinite_examples(batch, learned.detach(), output.loss.detach())
        if not offenders:
            return loss
        totals.nonfinite_examples += offenders
        # Every gradient of the step becomes NaN on every rank, whatever the bad value alone would have done: that is
        # how all ranks agree to skip it, in `take_step`, without a message of their own.
        return learned.sum() * math.nan

    # ------------------------------------------------------------------ forward passes

    def log_probs(self, micro_batches: MicroBatches, role: str) -> dict[str, FloatArray]:
        """Log-probs at the sampling temperature of the loss tokens of this rank's examples, by example id.

        `role` is "policy" or "reference". Raises TrainingError for "reference" if none was loaded, and in a critic.
        """
        module = self._require_reference().module if role == "reference" else self._engine
        return self._by_example("log_probs", micro_batches, module)

    def values(self, micro_batches: MicroBatches) -> dict[str, FloatArray]:
        """What the critic expects before each loss token of this rank's examples, by example id.

        Raises TrainingError in a policy.
        """
        return self._by_example("values", micro_batches, self._engine)

    def probe(self, tokens: IntArray) -> FloatArray:
        """Log-probs of the policy at temperature 1 of tokens[1:], each given what precedes it: [L] -> [L - 1]."""
        example = TrainingExample("probe", np.asarray(tokens, dtype=np.int64), np.arange(len(tokens)) > 0)
        batch = make_micro_batch([example], self._device)
        with self._evaluating():
            return self._forward("log_probs", batch, self._engine, temperature=1.0)

    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference. Raises TrainingError if none was loaded."""
        self._require_reference().refresh(self._each_parameter())

    def _require_reference(self) -> ReferenceModel:
        if self._reference is None:
            raise TrainingError("this learner has no reference model: algorithm.kl_coefficient is 0")
        return self._reference

    def _by_example(self, output: str, micro_batches: MicroBatches, module: torch.nn.Module) -> dict[str, FloatArray]:
        results: dict[str, FloatArray] = {}
        with self._evaluating():
            for examples in micro_batches:
                batch = make_micro_batch(examples, self._device)
                values = self._forward(output, batch, module, temperature=self._spec.temperature)
                sequence_index = batch.sequence_index.cpu().numpy()
                for index, example_id in enumerate(batch.example_ids):
                    results[example_id] = values[sequence_index == index]
        return results

    def _forward(self, output: str, batch: MicroBatch, module: torch.nn.Module, *, temperature: float) -> FloatArray:
        """One output of the model at the loss tokens of a micro-batch: [N]."""
        if output != self._role.output:
            raise TrainingError(f"a {self._spec.role} has no {output}; this learner computes {self._role.output}")
        with packed_sequences(batch.lengths):
            outputs = self._role.run(module, batch, temperature=temperature, entropy_gradient=False)
        values: FloatArray = outputs[output].cpu().numpy()
        return values

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._engine.eval()
        with torch.no_grad():
            yield

    # ------------------------------------------------------------------ weights for the rollout engines

    def weight_plan(self, bucket_bytes: int, channel: ChannelAddress) -> WeightPlan:
        """Decide how the weights travel. Made once; `fill_bucket` follows it. A tied weight travels once."""
        self._plan = make_plan(
            ((name, self._dtype, shape) for name, shape in self._shapes.items()), bucket_bytes, channel=channel
        )
        return self._plan

    def fill_bucket(self, index: int) -> dict[str, int]:
        """Send bucket `index` of the plan from rank 0; returns the checksum of each tensor there, {} elsewhere."""
        if self._plan is None:
            raise WeightSyncError("fill_bucket was called before weight_plan")
        bucket = self._plan.buckets[index]
        with self._whole_parameters([spec.name for spec in bucket.tensors]) as tensors:
            if self._spec.rank != 0:
                return {}
            if self._sender is None:
                self._sender = open_sender(self._plan, self._listeners.pop(self._plan.channel.port, None))
            return self._sender.send(bucket, tensors)

    @contextmanager
    def _whole_parameters(self, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters by Hugging Face name; under ZeRO stage 3 gathered from all ranks for the time being."""
        parameters = dict(self._engine.module.model.named_parameters())
        chosen = {name: parameters[name] for name in names}
        is_partitioned = self._spec.training.zero_stage == 3
        gathered = self._deepspeed.zero.GatheredParameters(list(chosen.values())) if is_partitioned else nullcontext()
        with gathered:
            yield {name: parameter.detach() for name, parameter in chosen.items()}

    def _each_parameter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters one after the other, each whole until the next one comes. All ranks must go through them."""
        for name in self._shapes:
            with self._whole_parameters([name]) as tensors:
                yield name, tensors[name]

    # ------------------------------------------------------------------ disk

    def save(self, folder: str) -> None:
        """Write everything that training needs to go on bit for bit. Raises TrainingError if the disk is full."""
        save_checkpoint(self._engine, Path(folder), description=self._describe())
        if self._reference is not None:
            self._reference.save(Path(folder))

    def load(self, folder: str) -> None:
        """Read what `save` wrote. Raises RunDirectoryError for another model, rank count, stage or type."""
        saved = load_checkpoint(self._engine, Path(folder), description=self._describe())
        self._optimizer_step = saved["optimizer_step"]
        if self._reference is not None:
            self._reference.load(Path(folder))

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder, from rank 0: of a policy a causal language model, of a critic a classifier.

        Raises TrainingError if the disk is full.
        """
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self._each_parameter():
            if self._spec.rank == 0:
                state[name] = tensor.cpu().clone()
        if self._spec.rank == 0:
            export_model(self._engine.module.model, Path(folder), state=state, model_path=self._spec.model_path)
        distributed.barrier()

    def _describe(self) -> dict[str, Any]:
        return {
            "optimizer_step": self._optimizer_step,
            "model_path": self._spec.model_path,
            "ranks": self._spec.world_size,
            "zero_stage": self._spec.training.zero_stage,
            "dtype": self._dtype,
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
        }


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
