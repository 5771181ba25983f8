"""One of several processes with a divided toy model: `hosts_worker.py PROCESS NUM PORTS MODE`.

The first prints a JSON line per request that ended; all print how they ended.
"""

import asyncio
import json
import os
import sys
import time

import jax

from tests.conftest import make_toy  # which sets as many devices as other tests need

jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")


def main() -> None:
    process, num_processes = int(sys.argv[1]), int(sys.argv[2])
    coordinator, port, mode = sys.argv[3], int(sys.argv[4]), sys.argv[5]
    jax.distributed.initialize(
        coordinator, num_processes=num_processes, process_id=process, initialization_timeout=60
    )
    from paged_jax import AsyncLLM, SamplingParams
    from paged_jax.config import EngineConfig
    from paged_jax.engine import Engine
    from paged_jax.engine.hosts import connect, follow
    from paged_jax.models.shard import make_mesh, shard
    from tests.llm_harness import OPTIONS, PROMPTS

    mesh = make_mesh(jax.device_count())
    params = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=2),
        SamplingParams(temperature=1.0, max_tokens=8),
    ]
    if mode == "async" and not process:
        llm = AsyncLLM(shard(make_toy(), mesh), **OPTIONS)
        llm.join(connect(("127.0.0.1", port), process, num_processes, key="secret", timeout=60))
        asyncio.run(serve(llm, params[:2], PROMPTS))
        print("ENDED", flush=True)
        return
    options = {**OPTIONS, "decode_steps": 4 if mode == "options" and process else 8}
    engine = Engine(shard(make_toy(), mesh), EngineConfig(debug=mode == "debug", **options))
    group = connect(("127.0.0.1", port), process, num_processes, key="secret", timeout=60)
    engine.join(group)
    print("READY", flush=True)
    if process:
        if mode == "differ":
            # Another order of the same requests is another plan.
            engine.state.ledger.free_blocks[:2] = engine.state.ledger.free_blocks[1::-1]
            engine.state.free_rows[:2] = engine.state.free_rows[1::-1]
        follow(engine)
        print("ENDED", flush=True)
        return
    if mode == "long":
        params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)]
    for j, given in enumerate(params):
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{j}-{i}", prompt, given)
    count = 0
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                tokens = [choice.token_ids for choice in output.outputs]
                reason = output.outputs[0].finish_reason
                print(json.dumps([output.request_id, tokens, reason]), flush=True)
        count += 1
        if mode == "abort" and count == 2:
            engine.abort("0-1")
            engine.reset_prefix_cache()
        if mode == "long":
            time.sleep(0.05)
    assert engine.stats()["num_used"] == 0
    group.close()
    print("ENDED", flush=True)


async def serve(llm, params, prompts) -> None:
    """All at once; each takes the id of a request that nobody reads any more."""

    async def ask(name, prompt, given) -> None:
        left = await llm.add_request(prompts[0], params[0], name)
        await anext(left)
        await left.aclose()
        stream = await llm.add_request(prompt, given, name)
        *_, output = [output async for output in stream]
        tokens = [choice.token_ids for choice in output.outputs]
        print(json.dumps([name, tokens, output.outputs[0].finish_reason]), flush=True)

    pairs = [(j, i) for j in range(len(params)) for i in range(len(prompts))]
    await asyncio.gather(*(ask(f"{j}-{i}", prompts[i], params[j]) for j, i in pairs))
    await llm.shutdown(None)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        # What JAX does at the end of a process would wait for those that are lost.
        os._exit(3)
