"""A program that starts a vLLM engine, answers one call, says what it did as a JSON line, and waits for its end.

Run with a model folder and the number of workers. For each line on standard input it generates again.
"""

import asyncio
import json
import os
import sys

import numpy as np

from slipstream.errors import EngineError
from slipstream.rollout.messages import GroupRequest, RolloutEngineSpec, SamplingParameters


def main() -> None:
    spec = RolloutEngineSpec(
        model_path=sys.argv[1],
        dtype="float32",
        device="cpu",
        max_sequence_tokens=160,
        max_concurrent_sequences=64,
        kv_cache_bytes=1 << 26,
        gpu_memory_share=0.5,
        threads=1,
        seed=0,
        engine_index=1,
        tensor_parallel=int(sys.argv[2]),
    )
    from slipstream.rollout.vllm_engine import VLLMEngine, vllm_environment

    os.environ.update(vllm_environment(spec))
    asyncio.run(serve(VLLMEngine(spec)))


async def serve(engine: object) -> None:
    facts = await engine.start()  # type: ignore[attr-defined]
    requests = [GroupRequest(f"0-{index}", np.arange(10, 30) + index, 4, 100 * index) for index in range(24)]
    while True:
        try:
            found = {
                f"{result.group_id}/{result.sample_index}": (
                    result.sample.tokens.tolist(),
                    result.sample.log_probs.tolist(),
                )
                async for results in engine.generate(requests, SamplingParameters(1.0, 12))  # type: ignore[attr-defined]
                for result in results
            }
            print(json.dumps({"facts": facts, "samples": found}), flush=True)
        except EngineError as error:
            print(json.dumps({"error": str(error)}), flush=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            break
    await engine.shutdown()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
