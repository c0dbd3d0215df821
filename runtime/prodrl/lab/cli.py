"""``prodrl lab``: chess puzzles, a tiny model, simulated users, the demo. Mounted by ``prodrl.cli``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from pathlib import Path
from typing import Annotated

import typer

from prodrl.errors import UnavailableError, UsageError

app = typer.Typer(no_args_is_help=True, help="Chess puzzles, a tiny model, simulated users, the demo.")

PuzzlesOption = Annotated[Path | None, typer.Option(help="A CSV of Lichess puzzles; without it they are generated.")]
CountOption = Annotated[int, typer.Option(min=500, help="Puzzles to generate.")]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Steps of the warm start; more steps solve more.")]
SeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]
ShareOption = Annotated[float, typer.Option(min=0, max=1, help="Share of conversations.")]
KeyOption = Annotated[str | None, typer.Option(envvar="PRODRL_API_KEY", help="API key of the gateway.")]


def _request(puzzles: Path | None, count: int, steps: int | None, seed: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    from prodrl.lab.prepare import Request
    from prodrl.lab.warm_settings import WarmStart

    warm = WarmStart(seed=seed) if steps is None else WarmStart(seed=seed, steps=steps)
    return Request(count=count, seed=seed, puzzles=puzzles, warm=warm)


def _stop_like_ctrl_c() -> None:
    """SIGTERM unwinds like Ctrl-C: half-made folders go, children are stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@app.command()
def prepare(
    puzzles: PuzzlesOption = None, count: CountOption = 10_000, steps: StepsOption = None, seed: SeedOption = 0
) -> None:
    """Make puzzles and the warm-started model, or find them in the cache (PRODRL_CACHE, else ~/.cache/prodrl)."""
    from prodrl.lab.display import Display
    from prodrl.lab.prepare import prepare as make

    _stop_like_ctrl_c()
    display = Display()
    prepared = make(_request(puzzles, count, steps, seed), display)
    for name, value in prepared.figures.items():
        display.say(f"{name}: {value}")
    display.say(f"folder: {prepared.folder}")


@app.command()
def users(
    gateway: Annotated[str, typer.Option(help="Base URL of the gateway, without /v1.")],
    puzzles: Annotated[Path, typer.Option(help="CSV of the puzzles they play.")],
    model: Annotated[str, typer.Option(help="The served model name.")] = "chess",
    report: Annotated[Path | None, typer.Option(help="JSON file of counts, replaced every second.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="New puzzles a second.")] = 4.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Most conversations at once.")] = 12,
    unscored: ShareOption = 0.0,
    late: ShareOption = 0.0,
    late_seconds: Annotated[float, typer.Option(min=0, help="How late the late rewards are.")] = 15.0,
    duplicate: ShareOption = 0.0,
    abort: ShareOption = 0.0,
    seed: SeedOption = 0,
    api_key: KeyOption = None,
    until_exit: Annotated[int | None, typer.Option(help="Stop when this process is gone.")] = None,
) -> None:
    """Play puzzles through the gateway and post rewards, until SIGTERM.

    --unscored never posts the reward, --late posts it late, --duplicate posts it twice, --abort hangs up midway.
    """
    import httpx

    from prodrl.lab.puzzles import read_puzzles
    from prodrl.lab.tally import Tally, read_tally
    from prodrl.lab.users import Behaviour, Crowd, watch

    if unscored + late > 1:
        raise UsageError(f"--unscored and --late: must sum to at most 1, got {unscored} and {late}; lower one")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    behaviour = Behaviour(
        rate=rate, concurrency=concurrency, unscored=unscored, late=late, late_seconds=late_seconds,
        duplicate=duplicate, abort=abort, seed=seed,
    )  # fmt: skip
    tally = read_tally(report) if report else Tally()
    rows = read_puzzles(puzzles)
    parent = os.getppid()

    def is_over() -> bool:
        return os.getppid() != parent or (until_exit is not None and not Path(f"/proc/{until_exit}").exists())

    async def live() -> None:
        limits = httpx.Limits(max_connections=concurrency * 4, max_keepalive_connections=concurrency * 2)
        async with httpx.AsyncClient(base_url=gateway, headers=_headers(api_key), limits=limits) as http:
            crowd = Crowd(http, model, rows, behaviour, tally)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, crowd.stop)
            watcher = asyncio.create_task(watch(crowd, is_over))
            await crowd.run(report)
            watcher.cancel()

    asyncio.run(live())


@app.command()
def demo(
    data: Annotated[Path, typer.Option(help="Folder of everything: model, store, logs, report.")] = Path(
        ".prodrl/demo"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Training rounds.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="S, optimizer steps of a round.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="B, conversations of a step.")] = 32,
    learning_rate: Annotated[str, typer.Option(help="Adam's step size.")] = "1e-4",
    harm: Annotated[bool, typer.Option("--harm", help="Descend the reward, to see the gate block it.")] = False,
    on_blocked: Annotated[
        str, typer.Option(help="HaltForHuman, ContinueLineage or RestartFromStable.")
    ] = "HaltForHuman",
    quantization: Annotated[str, typer.Option(help="NVFP4 or None.")] = "NVFP4",
    keep: Annotated[bool, typer.Option("--keep", help="Go on with a finished run in the folder.")] = False,
    rate: Annotated[float, typer.Option(min=0.001, help="New puzzles a second.")] = 4.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Most users at once.")] = 12,
    unscored: ShareOption = 0.02,
    late: ShareOption = 0.05,
    duplicate: ShareOption = 0.05,
    abort: ShareOption = 0.02,
    puzzles: PuzzlesOption = None,
    count: CountOption = 10_000,
    warm_steps: StepsOption = None,
    seed: SeedOption = 0,
    port: Annotated[int, typer.Option(help="The gateway's port on 127.0.0.1; 0: any free one.")] = 0,
) -> None:
    """Run the whole loop on this machine; the exit code is the operator's. Started again, it resumes."""
    from prodrl.lab import runspec
    from prodrl.lab.demo import Demo, run
    from prodrl.lab.display import Display
    from prodrl.lab.users import Behaviour

    _stop_like_ctrl_c()
    spec = runspec.Options(
        data=data.resolve(), rounds=rounds, steps=steps, batch_size=batch_size, learning_rate=learning_rate,
        is_harmful=harm, on_blocked=on_blocked, quantization=quantization,
    )  # fmt: skip
    behaviour = Behaviour(
        rate=rate, concurrency=concurrency, unscored=unscored, late=late, duplicate=duplicate, abort=abort, seed=seed
    )
    request = _request(puzzles, count, warm_steps, seed)
    raise typer.Exit(run(Demo(spec, request, behaviour, keep=keep, port=port), Display()))


@app.command()
def play(
    puzzles: PuzzlesOption = None,
    puzzle_id: Annotated[str | None, typer.Option("--id", help="Which puzzle; without it a random one.")] = None,
    gateway: Annotated[str | None, typer.Option(help="Base URL of a gateway or server whose policy plays.")] = None,
    model: Annotated[str, typer.Option(help="The served model name.")] = "chess",
    me: Annotated[bool, typer.Option("--me", help="You play.")] = False,
    pause: Annotated[float, typer.Option(min=0, help="Seconds between moves.")] = 1.0,
    api_key: KeyOption = None,
) -> None:
    """Watch a policy play one puzzle (--gateway), play it yourself (--me), or see the solution."""
    import httpx
    from rich.console import Console

    from prodrl.lab import generate, session, watching
    from prodrl.lab.puzzles import read_puzzles

    rows = read_puzzles(puzzles) if puzzles else list(generate.generate(50, seed=uuid.uuid4().int % 2**31))
    puzzle = watching.choose(rows, puzzle_id)
    if puzzle is None:
        raise UsageError(
            f"--id: no such puzzle in {puzzles or 'the generated ones'}, got {puzzle_id!r}; look into the CSV"
        )
    console = Console()
    side = "white" if puzzle.start().turn else "black"
    console.print(f"puzzle [bold]{puzzle.id}[/]: {side} to move, {puzzle.num_turns} to find\n", highlight=False)

    async def open_asker() -> session.Ask:
        if me:
            return watching.human_asker(lambda: console.input("your move (for example c3h8): "))
        if gateway:
            http = httpx.AsyncClient(base_url=gateway, headers=_headers(api_key))
            return watching.gateway_asker(http, model, f"play-{uuid.uuid4().hex}")
        return watching.solver_asker(puzzle)

    try:
        played = watching.watch(console, puzzle, open_asker, pause)
    except httpx.HTTPError as exc:
        raise UnavailableError(
            f"Gateway {gateway}: {type(exc).__name__} {exc}; is it up, and is --model right?"
        ) from exc
    raise typer.Exit(0 if played.reward else 1)
