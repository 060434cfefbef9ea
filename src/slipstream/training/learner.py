"""One rank of a learner: a DeepSpeed engine around a policy or a critic, with a reference or a teacher where needed.

A plain class with synchronous methods; the cluster wraps it in an actor, one per rank. The ranks run in step: each
method is called on all of them, since almost all take part in collective operations. What is minimized is an
objective passed to `update`; batches come as micro-batches that were cut before (data/packing.py), the same number on
every rank.

The loss of an optimizer step is a sum over all its tokens on all ranks, each with a weight that already carries the
denominator of the whole step. Gradients therefore do not depend on how the step is cut or spread.

What differs between a policy and a critic is in `roles.py`. Left out: partitioning while loading (each rank holds the
whole model for a moment), and a reference or a teacher that is partitioned too.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.algorithms.objective import Objective, ObjectiveOutput
from slipstream.config.lora import LoraConfig
from slipstream.config.schema import TrainingConfig
from slipstream.data.trajectory import FloatArray, IntArray, TrainingExample
from slipstream.errors import TrainingError, WeightSyncError
from slipstream.models.attention import packed_sequences, shared_row
from slipstream.models.fingerprint import model_fingerprint
from slipstream.models.hardware import detect_hardware, resolve_dtype
from slipstream.models.lora import add_adapter, leave_out_frozen, named_weights, without_adapter
from slipstream.models.router import router_loss_coefficient
from slipstream.models.verification import require_divisible_rows
from slipstream.training.average import WeightAverage
from slipstream.training.batch import MicroBatch, ModelInput, RowShare, make_micro_batch
from slipstream.training.checkpoint import layout_change, load_checkpoint, save_checkpoint
from slipstream.training.deepspeed_config import deepspeed_config, tensor_parallel_config
from slipstream.training.export import export_weights
from slipstream.training.mesh import Mesh
from slipstream.training.optimizer import make_optimizer, set_learning_rate, take_step
from slipstream.training.process_group import import_deepspeed, join_process_group, open_listener
from slipstream.training.reference import ReferenceModel, TeacherSpec, frozen
from slipstream.training.roles import ROLES, RoleName, sum_of_all
from slipstream.training.tensor_shards import TensorShards
from slipstream.training.totals import StepTotals, nonfinite_examples
from slipstream.training.whole_weights import WeightSource, WholeWeights
from slipstream.weights.plan import ChannelAddress, WeightPlan

MicroBatches = Sequence[Sequence[TrainingExample]]


@dataclass(frozen=True)
class LearnerSpec:
    """Everything a rank needs to start; made by the controller from the configuration.

    `temperature` is that of sampling: 1 for supervised training. `total_optimizer_steps` is where the learning-rate
    schedule ends. `router_loss_coefficient` None is what the model's configuration says. `model_key` is the
    configuration key that `model_path` comes from, for messages. `timeout_s` bounds the meeting of the ranks and each
    collective operation.
    """

    model_path: str
    dtype: str
    training: TrainingConfig
    temperature: float
    total_optimizer_steps: int
    load_reference: bool
    seed: int
    rank: int
    role: RoleName = "policy"
    model_key: str = "model.path"
    activation_checkpointing: bool = False
    router_loss_coefficient: float | None = None
    lora: LoraConfig | None = None
    teacher: TeacherSpec | None = None
    timeout_s: float = 1800.0

    @property
    def mesh(self) -> Mesh:
        """How all ranks are arranged."""
        return Mesh(self.training.data_parallel, self.training.sequence_parallel, self.training.tensor_parallel)


class LearnerRank:
    """One learner process. `meeting_point` of rank 0, then `start` on all ranks, then everything else on all ranks."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._role = ROLES[spec.role]
        self._engine: Any = None
        self._optimizer_step = 0
        # Of the optimizer step that gradients are accumulated for.
        self._totals = StepTotals()
        self._source: WeightSource | None = None
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
            world_size=spec.mesh.ranks,
            meeting_point=meeting_point,
            listener=self._listeners.pop(meeting_point[1], None),
            device=self._device,
            backend=hardware.collective_backend,
            timeout_s=spec.timeout_s,
        )
        self._fingerprint = model_fingerprint(spec.model_path)
        self._sequence_group = spec.mesh.join_sequence_group(spec.rank, timeout_s=spec.timeout_s)
        self._tensor_group = spec.mesh.join_tensor_group(spec.rank, timeout_s=spec.timeout_s)
        module: Any = self._load_module(
            spec.model_path, spec.model_key, activation_checkpointing=spec.activation_checkpointing
        )
        model = module.model
        module.router_loss_coefficient = router_loss_coefficient(model, spec.router_loss_coefficient)
        if spec.lora is not None:
            add_adapter(model, spec.lora)
            leave_out_frozen(module)
        self._make_engine(module, config)
        self._reference: ReferenceModel | None = None
        # With an adapter, the reference is the same model without it.
        if spec.load_reference and spec.lora is None:
            self._reference = ReferenceModel(lambda: self._load_module(spec.model_path, spec.model_key))
        self._teacher: torch.nn.Module | None = None
        if spec.teacher is not None:
            self._teacher = frozen(self._load_module(spec.teacher.path, spec.teacher.key))
        return {
            "parameters": sum(math.prod(shape) for shape in self._weights.shapes.values()),
            "memory_bytes": _resident_bytes(),
            "device": self._device,
            "dtype": self._dtype,
            "seconds": time.monotonic() - started,
        }

    def _make_engine(self, module: Any, config: dict[str, Any]) -> None:
        """Put DeepSpeed's engine around the module, which it divides among the ranks."""
        spec, model, group = self._spec, module.model, self._tensor_group
        shapes = {name: tuple(parameter.shape) for name, parameter in named_weights(model).items()}
        # With those of an adapter. Later, under ZeRO stage 3, parameters are empty.
        self._all_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if group is not None:
            config |= tensor_parallel_config(model.config, spec.training, path=spec.model_path, key=spec.model_key)
            # Where DeepSpeed looks for the number of heads.
            module.config = model.config
        self._engine, *_ = import_deepspeed(self._device).initialize(
            model=module, optimizer=make_optimizer(module, spec.training), config=config
        )
        shards = None
        if group is not None:
            # Of the inputs of the first call, which it does not know all kinds of; the controller gives all ranks of a
            # group the same.
            self._engine.first_dataloader_check.remove()
            pieces = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named_weights(model).items()}
            shards = TensorShards(group, shapes, pieces)
        self._weights = WholeWeights(model, shapes, is_partitioned=spec.training.zero_stage == 3, shards=shards)
        self._average: WeightAverage | None = None
        if spec.training.ema_decay is not None:
            self._average = WeightAverage(model, spec.training.ema_decay, self._weights)

    def shutdown(self) -> None:
        """Release the weight channel and the engine; safe at any time. The process group goes with the process."""
        self._close_channel()
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None

    def _close_channel(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _load_module(self, path: str, key: str, *, activation_checkpointing: bool = False) -> torch.nn.Module:
        module = self._role.load(
            path,
            key=key,
            dtype=self._dtype,
            training=self._spec.training,
            activation_checkpointing=activation_checkpointing,
        )
        if self._sequence_group is not None:
            require_divisible_rows(module.get_submodule("model"), path, key)
        return module.to(self._device)

    @contextmanager
    def _row(self, examples: Sequence[TrainingExample]) -> Iterator[MicroBatch]:
        """Examples as a micro-batch, within whose context its forward and backward pass are to lie."""
        group = self._sequence_group
        batch = make_micro_batch(examples, self._device, least_tokens=self._spec.mesh.sequence)
        with packed_sequences(batch.lengths, batch.prompts, group):
            yield batch

    # ------------------------------------------------------------------ the optimizer step

    def update(self, micro_batches: MicroBatches, objective: Objective) -> dict[str, Any]:
        """One optimizer step, with what was accumulated for it before; returns its metrics, the same on all ranks.

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
        self._backward(micro_batches, objective, ends_step=True)
        totals = self._totals.over_all_ranks(ranks_per_share=self._spec.mesh.ranks_per_share)
        self._totals = StepTotals()
        gradient_norm = take_step(self._engine, self._spec.training.zero_stage, self._tensor_group)
        self._optimizer_step += 1
        skipped = not math.isfinite(gradient_norm)
        if self._average is not None and not skipped:
            self._average.update()
        metrics: dict[str, Any] = totals.metrics() | {
            "gradient_norm": math.nan if skipped else gradient_norm,
            "learning_rate": learning_rate,
            "skipped": float(skipped),
            "seconds": time.monotonic() - started,
        }
        if skipped:
            metrics["nonfinite_examples"] = sorted(totals.nonfinite_examples)
        return metrics

    def accumulate(self, micro_batches: MicroBatches, objective: Objective) -> None:
        """Add to the gradient of the optimizer step that the next `update` takes."""
        self._backward(micro_batches, objective, ends_step=False)

    def _backward(self, micro_batches: MicroBatches, objective: Objective, *, ends_step: bool) -> None:
        """Accumulate gradients; with the last micro-batch of the step DeepSpeed makes them ready for the optimizer."""
        self._engine.train()
        for index, examples in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(ends_step and index == len(micro_batches) - 1)
            with self._row(examples) as batch:
                loss = self._accumulate_loss(batch, objective, self._totals)
                # DeepSpeed averages gradients over ranks; the loss is a sum over them. Ranks that share a row compute
                # the same loss, and each the gradient by its own tokens, which are a sum as well. Tensor-parallel ranks
                # compute the same loss too, and each the whole gradient of its pieces of the weights.
                self._engine.backward(loss * self._spec.mesh.averaged_ranks, scale_wrt_gas=False)

    def loss(self, micro_batches: MicroBatches, objective: Objective) -> dict[str, Any]:
        """The loss and the objective's metrics over a batch, without an update: for held-out data."""
        totals = StepTotals()
        with self._evaluating():
            for examples in micro_batches:
                with self._row(examples) as batch:
                    self._accumulate_loss(batch, objective, totals)
        totals = totals.over_all_ranks(ranks_per_share=self._spec.mesh.ranks_per_share)
        return totals.metrics() | {"nonfinite_examples": sorted(totals.nonfinite_examples)}

    def _accumulate_loss(self, batch: MicroBatch, objective: Objective, totals: StepTotals) -> torch.Tensor:
        """The weighted loss of a micro-batch, a scalar; its metrics are added to `totals`."""
        share = RowShare(batch, self._role.reads, shared_row())
        found = self._role.run(
            self._engine,
            self._with_teacher(share.inputs),
            temperature=self._spec.temperature,
            entropy_gradient=objective.needs_entropy_gradient,
        )
        outputs = share.whole(found)
        learned = outputs[self._role.output]
        if batch.loss_tokens == 0:
            return sum_of_all(outputs)
        if "weight" not in batch.fields:
            raise TrainingError(
                f"example {batch.example_ids[0]!r} has no token field 'weight', the share of each token"
            )
        output: ObjectiveOutput = objective(outputs, batch.fields, batch.sequence_index)
        loss = (output.loss * batch.fields["weight"]).sum()
        if self._engine.module.router_loss_coefficient > 0:
            balance = (outputs["router_loss"] * batch.fields["weight"]).sum()
            loss = loss + self._engine.module.router_loss_coefficient * balance
        model_metrics = {name: values.detach() for name, values in outputs.items() if name != self._role.output}
        totals.add(batch, loss.detach(), model_metrics, output)
        offenders = nonfinite_examples(batch, learned.detach(), output.loss.detach())
        if not offenders:
            return loss
        totals.nonfinite_examples += offenders
        # Every gradient of the step becomes NaN on every rank, whatever the bad value alone would have done: that is
        # how all ranks agree to skip it, in `take_step`, without a message of their own.
        return sum_of_all(outputs) * math.nan

    def _with_teacher(self, inputs: ModelInput) -> ModelInput:
        """The input with what the teacher thinks at its loss tokens, where the student is compared with one."""
        teacher = self._spec.teacher
        if teacher is None or teacher.divergence is None:
            return inputs
        states = self._frozen_module("teacher").as_teacher(
            inputs.tokens,
            inputs.positions,
            inputs.places,
            divergence=teacher.divergence,
            temperature=teacher.temperature,
        )
        return replace(inputs, teacher=states)

    # ------------------------------------------------------------------ forward passes

    def log_probs(self, micro_batches: MicroBatches, role: str) -> dict[str, FloatArray]:
        """Log-probs at the sampling temperature of the loss tokens of this rank's examples, by example id.

        `role` is "policy", "reference" or "teacher". Raises TrainingError for one that was not loaded, and in a critic.
        """
        if role == "reference" and self._spec.lora is not None and self._spec.load_reference:
            with without_adapter(self._engine.module.model):
                return self._by_example("log_probs", micro_batches, self._engine)
        module = self._engine if role == "policy" else self._frozen_module(role)
        return self._by_example("log_probs", micro_batches, module)

    def values(self, micro_batches: MicroBatches) -> dict[str, FloatArray]:
        """What the critic expects before each loss token of this rank's examples, by example id.

        Raises TrainingError in a policy.
        """
        return self._by_example("values", micro_batches, self._engine)

    def scores(self, micro_batches: MicroBatches) -> dict[str, FloatArray]:
        """What a reward model thinks at each loss token of this rank's examples, by example id.

        Raises TrainingError in a policy and in a critic.
        """
        return self._by_example("scores", micro_batches, self._engine)

    def probe(self, tokens: IntArray) -> FloatArray:
        """Log-probs of the policy at temperature 1 of tokens[1:], each given what precedes it: [L] -> [L - 1]."""
        example = TrainingExample("probe", np.asarray(tokens, dtype=np.int64), np.arange(len(tokens)) > 0)
        with self._evaluating(), self._row([example]) as batch:
            return self._forward("log_probs", batch, self._engine, temperature=1.0)

    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference. Raises TrainingError if none was loaded."""
        self._require_reference().refresh(self._weights.each_parameter())

    def _require_reference(self) -> ReferenceModel:
        if self._reference is None:
            raise TrainingError("this learner has no reference model: algorithm.kl_coefficient is 0")
        return self._reference

    def _frozen_module(self, role: str) -> Any:
        if role == "reference":
            return self._require_reference().module
        if self._teacher is None:
            raise TrainingError("this learner has no teacher: none was configured")
        return self._teacher

    def _by_example(self, output: str, micro_batches: MicroBatches, module: torch.nn.Module) -> dict[str, FloatArray]:
        results: dict[str, FloatArray] = {}
        with self._evaluating():
            for examples in micro_batches:
                with self._row(examples) as batch:
                    values = self._forward(output, batch, module, temperature=self._spec.temperature)
                sequence_index = batch.sequence_index.cpu().numpy()
                for index, example_id in enumerate(batch.example_ids):
                    results[example_id] = values[sequence_index == index]
        return results

    def _forward(self, output: str, batch: MicroBatch, module: torch.nn.Module, *, temperature: float) -> FloatArray:
        """One output of the model at the loss tokens of a micro-batch: [N]."""
        if output != self._role.output:
            raise TrainingError(f"a {self._spec.role} has no {output}; this learner computes {self._role.output}")
        share = RowShare(batch, self._role.reads, shared_row())
        outputs = self._role.run(module, share.inputs, temperature=temperature, entropy_gradient=False)
        values: FloatArray = share.whole({output: outputs[output]})[output].cpu().numpy()
        return values

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._engine.eval()
        with torch.no_grad():
            yield

    # ------------------------------------------------------------------ weights for the rollout engines

    def weight_plan(self, bucket_bytes: int, channel: ChannelAddress) -> WeightPlan:
        """Decide how the weights travel; `fill_bucket` follows it. A tied weight travels once.

        Called again, it takes up the new channel and leaves the one before.
        Names and pieces are those of a model folder. Raises WeightSyncError for a family that cannot be published.
        """
        self._close_channel()
        self._source = WeightSource(self._weights, bucket_bytes, channel, listeners=self._listeners)
        return self._source.plan

    def fill_bucket(self, index: int) -> dict[str, int]:
        """Send bucket `index` of the plan from rank 0; returns the checksum of each tensor there, {} elsewhere."""
        if self._source is None:
            raise WeightSyncError("fill_bucket was called before weight_plan")
        return self._source.fill_bucket(index, sends=self._spec.rank == 0)

    # ------------------------------------------------------------------ disk

    def save(self, folder: str) -> None:
        """Write everything that training needs to go on bit for bit. Raises TrainingError if the disk is full."""
        has_adapter = self._spec.lora is not None
        save_checkpoint(self._engine, Path(folder), description=self._describe(), has_adapter=has_adapter)
        if self._average is not None:
            self._average.save(Path(folder))
        if self._reference is not None:
            self._reference.save(Path(folder))

    def load(self, folder: str) -> str | None:
        """Read what `save` wrote; returns what is different in the layout of the ranks since then, in words.

        Raises RunDirectoryError for another model or type, and for a layout that it cannot be converted to.
        """
        current, has_adapter = self._describe(), self._spec.lora is not None
        saved = load_checkpoint(
            self._engine, Path(folder), description=current, seed=self._spec.seed, has_adapter=has_adapter
        )
        self._optimizer_step = saved["optimizer_step"]
        if self._average is not None:
            self._average.load(Path(folder))
        if self._reference is not None:
            self._reference.load(Path(folder))
        return layout_change(saved, current)

    def export(self, folder: str, live: bool = False) -> None:
        """Write a Hugging Face folder, from rank 0: of a policy a causal language model, of a critic a classifier.

        An adapter is merged into it, and lies beside it in `adapter/` as peft writes it. Where an average of the
        weights is kept, the folder has that, or with `live` the weights themselves.

        Raises TrainingError if the disk is full.
        """
        averaged = nullcontext() if self._average is None or live else self._average.in_place()
        with averaged:
            export_weights(
                self._weights,
                Path(folder),
                model_path=self._spec.model_path,
                lora=self._spec.lora,
                writes=self._spec.rank == 0,
            )

    def _describe(self) -> dict[str, Any]:
        return {
            "optimizer_step": self._optimizer_step,
            "model_path": self._spec.model_path,
            "model": self._fingerprint,
            "ranks": self._spec.mesh.ranks,
            "tensor_parallel": self._spec.mesh.tensor,
            "zero_stage": self._spec.training.zero_stage,
            "dtype": self._dtype,
            "has_adapter": self._spec.lora is not None,
            "lora": None if self._spec.lora is None else self._spec.lora.model_dump(),
            "shapes": {name: list(shape) for name, shape in self._all_shapes.items()},
        }


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
