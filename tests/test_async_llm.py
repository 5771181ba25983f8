"""Requests of event loops beside each other: equal to each alone, and gone when nobody reads."""

import asyncio
import contextlib
import threading

import pytest

from paged_jax import LLM, AsyncLLM, SamplingParams, async_llm
from paged_jax.async_llm import EngineDeadError, QueueFullError
from tests.llm_harness import GREEDY, OPTIONS, PROMPTS, run

LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, max_tokens=9),
    SamplingParams(n=2, temperature=1.0, seed=2, max_tokens=5),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.5, logprobs=2),
]


@pytest.fixture
def opened(toy):
    """Callable options -> context of an `AsyncLLM`, all of whose blocks come back."""

    @contextlib.asynccontextmanager
    async def open_(**options):
        async with AsyncLLM(toy, **{**OPTIONS, **options}) as llm:
            yield llm
            await settle(llm)

    return open_


async def settle(llm) -> None:
    """Waits until nothing runs, and looks for what was kept."""
    for _ in range(500):
        stats = await llm.call(lambda engine: engine.stats())
        if not (stats["num_used"] or stats["num_running"] or stats["num_waiting"]):
            break
        await asyncio.sleep(0.01)
    assert (stats["num_used"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
    assert not llm._streams
    assert not await llm.call(lambda engine: engine.has_unfinished())


@pytest.fixture(scope="module")
def alone(toy):
    """Completions of every prompt with each of PARAMS, by one `LLM` one after another."""
    with LLM(toy, **OPTIONS) as llm:
        return {
            (i, j): run(llm, [prompt], params)[0].outputs
            for i, prompt in enumerate(PROMPTS)
            for j, params in enumerate(PARAMS)
        }


async def last_of(iterator):
    return [output async for output in iterator][-1]


def test_many_at_once_equal_each_alone(opened, alone):
    async def main():
        async with opened() as llm:
            outputs = await asyncio.gather(
                *(last_of(llm.generate(PROMPTS[i], PARAMS[j])) for i, j in alone)
            )
        for key, output in zip(alone, outputs, strict=True):
            assert output.finished
            assert [x.token_ids for x in output.outputs] == [x.token_ids for x in alone[key]]

    asyncio.run(main())


def test_outputs_grow_and_a_slow_reader_skips_some_but_the_last(opened):
    async def main():
        async with opened(overlap=False, decode_steps=1) as llm:
            seen = [o.outputs[0].token_ids async for o in llm.generate(PROMPTS[0], LONG)]
            assert [len(x) for x in seen] == sorted({len(x) for x in seen})
            assert all(x == seen[-1][: len(x)] for x in seen)
            slow = await llm.add_request(PROMPTS[0], LONG)
            while llm._streams:
                await asyncio.sleep(0.01)
            rest = [output async for output in slow]
            assert [x.outputs[0].token_ids for x in rest] == [seen[-1]]
            assert len(seen[-1]) == 30

    asyncio.run(main())


@pytest.mark.parametrize("way", ["break", "cancel", "aclose", "abort"])
def test_who_goes_away_frees_the_blocks(opened, way):
    async def main():
        async with opened() as llm:
            first = llm.generate(PROMPTS[1], LONG, "a")
            if way == "abort":
                await anext(first)
                await llm.abort("a")
                output = await last_of(first)
                assert output.outputs[0].finish_reason == "abort"
            elif way == "cancel":
                task = asyncio.create_task(last_of(first))
                while not llm._streams:
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "break":
                async for _ in first:
                    break
                await first.aclose()
            else:
                stream = await llm.add_request(PROMPTS[1], LONG)
                await stream.aclose()
                assert [x async for x in stream] == []
            await settle(llm)
            again = await last_of(llm.generate(PROMPTS[1], GREEDY, "a"))
            assert again.finished

    asyncio.run(main())


def test_what_is_refused_is_refused_alone(opened, alone):
    async def main():
        async with opened() as llm:
            good = asyncio.create_task(last_of(llm.generate(PROMPTS[0], GREEDY)))
            for prompt, params in (
                ([999], GREEDY),
                ("text", GREEDY),
                ([1], "greedy"),
                ([], GREEDY),
            ):
                with pytest.raises(ValueError, match=r"vocabulary|tokenizer|params|empty"):
                    await llm.add_request(prompt, params)
            with pytest.raises(ValueError, match=r"^priority "):
                await llm.add_request([1], GREEDY, priority=1)
            stream = await llm.add_request([1], LONG, "twice")
            with pytest.raises(ValueError, match=r"'twice' is in use"):
                await llm.add_request([1], GREEDY, "twice")
            await stream.aclose()
            assert (await good).outputs[0].token_ids == alone[0, 0][0].token_ids

    asyncio.run(main())


def test_a_queue_may_be_full(opened):
    async def main():
        async with opened(max_waiting=2) as llm:
            streams = [await llm.add_request(PROMPTS[0], LONG) for _ in range(4 + 2)]
            with pytest.raises(QueueFullError, match="max_waiting is 2"):
                await llm.add_request(PROMPTS[0], LONG)
            await streams[0].aclose()
            streams.append(await llm.add_request(PROMPTS[0], LONG))
            outputs = await asyncio.gather(*map(last_of, streams[1:]))
            assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1

    asyncio.run(main())


def test_a_request_that_fails_raises_and_others_go_on(opened, alone, caplog):
    async def main():
        async with opened(max_step_retries=0) as llm:

            def fail(point):
                if point == "dispatch":
                    raise OSError("the device is gone")

            def plant(engine):
                engine.dispatcher.on_fault_point = fail

            def mend(engine):
                engine.dispatcher.on_fault_point = None

            await llm.call(plant)
            with pytest.raises(OSError, match="the device is gone"):
                await last_of(llm.generate(PROMPTS[0], GREEDY))
            await llm.call(mend)
            llm.check_health()
            output = await last_of(llm.generate(PROMPTS[0], GREEDY))
            assert output.outputs[0].token_ids == alone[0, 0][0].token_ids

    asyncio.run(main())


def test_an_engine_that_dies_tells_everybody(toy, monkeypatch, caplog):
    async def main():
        llm = AsyncLLM(toy, **OPTIONS)

        def die():
            raise SystemExit("out of luck")

        stream = await llm.add_request(PROMPTS[0], LONG)
        monkeypatch.setattr(llm._engine, "step", die)
        other = None
        with contextlib.suppress(EngineDeadError):
            other = await llm.add_request(PROMPTS[1], LONG)
        for one in filter(None, (stream, other)):
            with pytest.raises(EngineDeadError):
                await last_of(one)
        with pytest.raises(EngineDeadError, match="out of luck"):
            llm.check_health()
        with pytest.raises(EngineDeadError, match="out of luck"):
            await llm.add_request(PROMPTS[0], GREEDY)
        await llm.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 60.0, 0.0])
def test_shutdown_lets_them_end_or_aborts_them(toy, timeout):
    async def main():
        llm = AsyncLLM(toy, **OPTIONS)
        stream = await llm.add_request(PROMPTS[0], LONG)
        await llm.shutdown(timeout)
        output = await last_of(stream)
        assert output.outputs[0].finish_reason == ("abort" if timeout == 0.0 else "length")
        assert not llm._thread.is_alive()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await llm.add_request(PROMPTS[0], GREEDY)
        await llm.shutdown()

    asyncio.run(main())


def test_calls_run_between_dispatches_and_return_or_raise(opened):
    async def main():
        async with opened() as llm:
            stream = await llm.add_request(PROMPTS[0], LONG)
            await llm.call(lambda engine: engine.reset_prefix_cache())
            with pytest.raises(RuntimeError, match="no"):
                await llm.call(lambda engine: (_ for _ in ()).throw(RuntimeError("no")))
            assert (await last_of(stream)).finished
            assert llm.stats()["num_blocks"] == OPTIONS["num_blocks"]

    asyncio.run(main())


def test_loops_of_several_threads_share_an_engine(toy, alone):
    llm = AsyncLLM(toy, **OPTIONS)
    found = {}

    def work(number: int) -> None:
        async def main():
            for key in [key for key in alone if key[0] % 3 == number]:
                output = await last_of(llm.generate(PROMPTS[key[0]], PARAMS[key[1]]))
                found[key] = [x.token_ids for x in output.outputs]

        asyncio.run(main())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(llm.shutdown())
    assert found == {key: [x.token_ids for x in outputs] for key, outputs in alone.items()}


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
def test_max_waiting_is_a_count(toy, value):
    with pytest.raises(ValueError, match=r"^max_waiting "):
        AsyncLLM(toy, max_waiting=value, **OPTIONS)


def test_calls_that_the_engine_did_not_live_to_answer_are_told(toy):
    async def main():
        llm = AsyncLLM(toy, **OPTIONS)
        begun, goes_on = threading.Event(), threading.Event()

        def die(engine):
            begun.set()
            goes_on.wait(10)
            raise SystemExit

        first = asyncio.create_task(llm.call(die))
        await asyncio.to_thread(begun.wait, 10)
        second = asyncio.create_task(llm.call(lambda engine: 1))
        stream = asyncio.create_task(last_of(llm.generate([1], GREEDY)))
        while not (llm._inbox and llm._streams):
            await asyncio.sleep(0.001)
        goes_on.set()
        for task in (first, second, stream):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(task, 10)
        await llm.shutdown()

    asyncio.run(main())


def test_an_id_may_be_taken_again_as_soon_as_nobody_reads(opened, alone):
    async def main():
        async with opened(decode_steps=1) as llm:
            for way in ("aclose", "break") * 5:
                if way == "aclose":
                    left = await llm.add_request(PROMPTS[1], LONG, "same")
                    await anext(left)
                    await left.aclose()
                else:
                    async with contextlib.aclosing(llm.generate(PROMPTS[1], LONG, "same")) as left:
                        async for _ in left:
                            break
                outputs = [x async for x in llm.generate(PROMPTS[0], PARAMS[0], "same")]
                assert outputs[-1].outputs == alone[0, 0]
                assert all(x.prompt_token_ids == PROMPTS[0] for x in outputs)

    asyncio.run(main())


def drop(engine) -> None:
    engine.reset()


def abort(engine) -> None:
    assert engine.abort("a").finished


def run_out(engine) -> None:
    while engine.has_unfinished():
        engine.step()


@pytest.mark.parametrize("run", [drop, abort, run_out])
def test_what_a_call_takes_from_streams_they_are_told(opened, alone, run):
    async def main():
        async with opened() as llm:
            await llm.call(lambda engine: engine.sleep())  # so that nothing ends before
            task = asyncio.create_task(last_of(llm.generate(PROMPTS[0], PARAMS[0], "a")))
            while not await llm.call(lambda engine: engine.has_unfinished("a")):
                await asyncio.sleep(0.001)
            await llm.call(lambda engine: (engine.wake_up(), run(engine)))
            if run is drop:
                with pytest.raises(RuntimeError, match="dropped request 'a'"):
                    await asyncio.wait_for(task, 10)
            else:
                output = await asyncio.wait_for(task, 10)
                assert output.finished
                ends = {abort: ("abort", []), run_out: ("length", alone[0, 0][0].token_ids)}
                choice = output.outputs[0]
                assert (choice.finish_reason, choice.token_ids) == ends[run]
            assert (await last_of(llm.generate(PROMPTS[0], PARAMS[0], "a"))).outputs == alone[0, 0]

    asyncio.run(main())


def test_a_call_may_raise_anything(opened):
    async def main():
        async with opened() as llm:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await asyncio.wait_for(llm.call(lambda engine: next(iter(()))), 10)
            assert await llm.call(lambda engine: 3) == 3

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 30.0, 0.0])
def test_an_engine_that_is_asleep_is_shut_down_and_is_healthy(toy, timeout):
    async def main():
        llm = AsyncLLM(toy, **OPTIONS)
        await llm.call(lambda engine: engine.sleep())
        stream = await llm.add_request(PROMPTS[0], GREEDY)
        await asyncio.sleep(0.05)
        llm.check_health(stalled_after=0.01)
        await asyncio.wait_for(llm.shutdown(timeout), 10)
        assert (await last_of(stream)).outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_a_dispatch_that_hangs_does_not_hold_the_end(toy, monkeypatch, caplog):
    async def main():
        monkeypatch.setattr(async_llm, "LAST_DISPATCH_SECONDS", 0.2)
        llm = AsyncLLM(toy, **OPTIONS)
        goes_on, issue = threading.Event(), llm._engine.dispatcher.issue
        begun = threading.Event()

        def hang(*arguments, **options):
            begun.set()
            goes_on.wait(60)
            return issue(*arguments, **options)

        llm._engine.dispatcher.issue = hang
        stream = await llm.add_request(PROMPTS[0], GREEDY)
        await asyncio.to_thread(begun.wait, 10)
        await asyncio.wait_for(llm.shutdown(0.0), 10)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(last_of(stream), 10)
        assert "does not end" in caplog.text
        goes_on.set()
        await asyncio.to_thread(llm._thread.join, 60)
        assert not llm._thread.is_alive()

    asyncio.run(main())


def test_many_slow_grammars_hold_nobody_else(opened, alone, monkeypatch):
    async def main():
        goes_on = threading.Event()
        async with opened() as llm:
            check = llm._engine.check

            def slow(name, prompt, params, **options):
                if getattr(params, "structured_outputs", None):
                    goes_on.wait(60)
                return check(name, prompt, params, **options)

            monkeypatch.setattr(llm._engine, "check", slow)
            params = SamplingParams(structured_outputs={"regex": "a"})
            tasks = [asyncio.create_task(last_of(llm.generate([1], params))) for _ in range(80)]
            await asyncio.sleep(0.05)
            output = await asyncio.wait_for(last_of(llm.generate(PROMPTS[0], PARAMS[0])), 30)
            assert output.outputs == alone[0, 0]
            goes_on.set()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(found, ValueError)  # there is no tokenizer

    asyncio.run(main())
