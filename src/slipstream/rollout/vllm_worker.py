"""What runs inside vLLM's worker processes: taking new weights, and dying with the process that started them.

vLLM mixes this class into its worker (`worker_extension_cls`); `VLLMEngine` calls the methods by name through
`collective_rpc`, on all workers of the engine at once. Each of them takes whole tensors, and vLLM's loading keeps the
part that is its own. Weights go through vLLM's layer-wise reload, which gives each layer its original parameters back,
collects what is loaded into them, and repeats the processing (packing for the CPU's matrix kernels, quantization)
that was done when the model was first loaded.
"""

import functools
import os
import pickle
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from slipstream.errors import SlipstreamError, WeightSyncError
from slipstream.rollout.engine import missing_buckets
from slipstream.rollout.parent import die_with_parent
from slipstream.weights.channel import WeightReceiver, open_receiver
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import WeightPlan

if TYPE_CHECKING:
    import torch

Arguments = ParamSpec("Arguments")


def answering(
    method: Callable[Concatenate["WeightUpdateExtension", Arguments], Any],
) -> Callable[Concatenate["WeightUpdateExtension", Arguments], dict[str, Any]]:
    """Answer with {"value": what the method returns} or {"failure": what it raised}, for `VLLMEngine` to raise.

    vLLM reads the answers of its workers one after the other and stops at the first that raised. Those of the others
    would then be taken for their answers to the next call.
    """

    @functools.wraps(method)
    def answer(
        self: "WeightUpdateExtension", *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> dict[str, Any]:
        try:
            return {"value": method(self, *arguments, **keywords)}
        except Exception as error:
            if not isinstance(error, SlipstreamError):
                traceback.print_exc()
            lines = str(error).strip().splitlines()
            return {"failure": lines[0] if lines else type(error).__name__}

    return answer


class WeightUpdateExtension:
    """Methods added to a vLLM worker. All names start with `slipstream_`, so as not to shadow vLLM's own."""

    if TYPE_CHECKING:
        # What vLLM's worker has.
        vllm_config: Any
        model_config: Any
        model_runner: Any
        rank: int

    _plan: WeightPlan | None = None
    _receiver: WeightReceiver | None = None
    _is_updating = False
    _loaded: set[int]

    @answering
    def slipstream_die_with_parent(self) -> tuple[int, int]:
        """End with the parent, however it ends: the EngineCore, or the engine where worker and EngineCore are one.

        Returns the ids of this process and of its parent.
        """
        die_with_parent()
        return os.getpid(), os.getppid()

    @answering
    def slipstream_begin_update(self) -> dict[str, int]:
        """Give every layer its original parameters back, ready to be loaded.

        Returns the number of tokens sampled so far of each request that has been begun, by its id.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.platforms import current_platform

        if self._is_updating:
            # What the reload has collected for an update that was broken off must not count for this one.
            self._finish()
        self._is_updating = True
        self._loaded = set()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)
            if current_platform.is_cpu():
                # Experts are packed for the CPU's matrix kernels only while their kernel is made, and it is made only
                # where there is none: new weights would be read as if they were packed.
                for module in self.model_runner.model.modules():
                    if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                        module.quant_method.moe_kernel = None
        return {identifier: len(state.output_token_ids) for identifier, state in self.model_runner.requests.items()}

    @answering
    def slipstream_open_channel(self, pickled_plan: bytes, first_receiver: int) -> None:
        """Make ready to receive the buckets of a plan, as the receiver `first_receiver` + this worker's rank.

        Bytes, since vLLM's messages carry no objects of ours.
        """
        if self._receiver is not None:
            self._receiver.close()
        self._plan = pickle.loads(pickled_plan)
        self._receiver = open_receiver(self._plan, first_receiver + self.rank)

    @answering
    def slipstream_load_bucket(self, index: int) -> dict[str, int]:
        """Receive one bucket and load it; returns the checksum of each tensor as it arrived."""
        from vllm.config import set_current_vllm_config

        if self._plan is None or self._receiver is None:
            raise WeightSyncError("no weight plan: slipstream_open_channel comes before slipstream_load_bucket")
        tensors: list[tuple[str, torch.Tensor]] = []
        checksums = {}
        for name, tensor in self._receiver.receive(self._plan.buckets[index]):
            # The layer-wise reload holds on to a tensor until its layer is complete, which may be buckets later, when
            # the channel's buffer has been filled again: hence a copy. The checksum is of the copy.
            tensors.append((name, tensor.clone()))
            checksums[name] = tensor_checksum(tensors[-1][1])
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.model.load_weights(iter(tensors))
        self._loaded.add(index)
        return checksums

    @answering
    def slipstream_finish_update(self) -> list[int]:
        """Process what was loaded and put it in force; returns the buckets of the plan that never came.

        A layer that got nothing has its old weights again. The caller does not go on if a bucket is missing.
        """
        self._finish()
        return missing_buckets(self._plan, self._loaded)

    def _finish(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.platforms import current_platform

        model = self.model_runner.model
        self._is_updating = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
            if current_platform.is_cpu():
                # A head tied to the embedding is no layer with weights of its own to the reload, so the copy of them
                # that is packed for the CPU's matrix kernels would stay the old one.
                for module in model.modules():
                    if isinstance(module, ParallelLMHead):
                        module.quant_method.process_weights_after_loading(module)
