"""Read answers while they grow: several streams in one event loop, one of them cut short.

    python -m runtime.examples.streaming [--model MODEL]

MODEL is a directory, a hub id or a .gguf file; the small default model is fetched once.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from runtime import AsyncLLM, RequestOutputKind, SamplingParams

PARAMS = SamplingParams(max_tokens=24, seed=1, output_kind=RequestOutputKind.DELTA)


async def tell(engine: AsyncLLM, prompt: str, most: int | None = None) -> None:
    """Print a stream's pieces; leaving it after `most` of them aborts the request."""
    pieces: list[str] = []
    async for output in engine.generate(prompt, PARAMS):
        pieces.append(output.outputs[0].text)
        if len(pieces) == most:
            break
    print(f"{prompt!r} in {len(pieces)} pieces: {''.join(pieces)!r}")


async def talk(model: str) -> None:
    """Run three streams side by side."""
    async with AsyncLLM(model, max_model_len=256, kv_cache_bytes=1 << 26) as engine:
        await asyncio.gather(
            tell(engine, "The sea is"),
            tell(engine, "Rain falls on"),
            tell(engine, "Once upon a time", most=3),
        )
        print("requests by reason:", dict(engine.metrics().num_finished))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    asyncio.run(talk(parser.parse_args(argv).model))


if __name__ == "__main__":
    main()
