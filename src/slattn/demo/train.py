"""The training run of `slattn demo`: loop, checkpoints, figures. `run` is the whole story, from top to bottom.

Weights, batches and the sample come from the seed alone, and a checkpoint holds everything else, so an interrupted
run that is resumed goes on to the losses it would have had: on a CPU bit for bit, for it goes on with the number of
threads that it began with.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import platform
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from tqdm import tqdm

import slattn
from slattn.commands.edge import UsageError, quiet_tilelang, usable_device
from slattn.demo import data, parallel, plot
from slattn.demo.files import part_of, say, written
from slattn.demo.model import Config, Decoder, Trace

# Texts of `Config.sequence` characters a step. In the same CPU time, small batches learn more: on one thread, 63 s of
# 4 texts a step came to a held-out loss of 1.96, and 57 s of 2 texts a step to 1.85.
# A GPU waits for its host at such sizes, and takes more: 1000 steps of 8 texts came to 1.28, of 2 to 1.51.
BATCH, GPU_BATCH = 2, 8
RATE, WARM_UP, LAST_RATE = 3e-3, 20, 0.02  # the top learning rate, steps until it, the share of it at the end
SAVE_EVERY = 200
EVALUATIONS = 10  # of the held-out loss, evenly spread; one more before the first step
HELD_OUT_WINDOWS, HELD_OUT_BATCH = 64, 8  # a GPU takes all windows at once
FILES = ("demo.png", "demo.json", "checkpoint.pt")
SAMPLE = 240  # characters


def run(args: argparse.Namespace) -> int:
    """Train, measure, draw and tell. Returns the exit status: 0, or 130 when interrupted.

    Raises:
        UsageError: a bad argument, an unusable folder, device, backend or checkpoint, or too few or many processes.
    """
    started = time.perf_counter()
    device = check(args)
    corpus = data.load()
    config = Config(vocabulary=len(corpus.characters))
    with parallel.joined(args.context_parallel, config, device) as part:
        trainer = Trainer(config, corpus, args, device, part)
        backend = trainer.backend()
        if args.resume:
            trainer.restore()
        elif device.type == "cpu" and part is None:
            torch.set_num_threads(trainer.faster_threads(torch.get_num_threads()))
        if trainer.leads:
            print(trainer.description(backend), flush=True)
        if not trainer.train():
            if trainer.leads:
                done = f"Interrupted after step {trainer.step} of {args.steps}."
                print(f"{done} To go on, add --resume to the same command.")
            return 130
        if not trainer.leads:
            return 0
        sample, prompt = trainer.sample()
        figures = trainer.figures(backend) | {"seconds": round(time.perf_counter() - started, 1), "sample": sample}
        with written(args.out / "demo.png") as path:
            plot.draw(path, trainer.config, figures, *trainer.trace())
        with written(args.out / "demo.json") as path:
            path.write_text(json.dumps(figures, indent=1) + "\n")
        say(summary(figures, prompt, args.out))
    return 0


def check(args: argparse.Namespace) -> torch.device:
    """The device to run on, once the arguments are found usable and the folder is there."""
    if args.steps < 1:
        raise UsageError(f"--steps must be at least 1; got {args.steps}")
    if not 0 <= args.seed < 2**31:
        raise UsageError(f"--seed must be at least 0 and below 2**31; got {args.seed}")
    parallel.check(args.context_parallel, args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        raise UsageError(f"--out {args.out} cannot be written to: {error.strerror or error}") from None
    for path in (args.out / name for name in FILES):
        for taken in (path, part_of(path)):
            if taken.is_dir():
                raise UsageError(f"--out {args.out} cannot be used: {taken} is a folder, and has to be a file")
    device = usable_device(args.device)
    if device.type == "cuda":
        quiet_tilelang()
    return device


class Trainer:
    """A model, its optimizer, and how far they are."""

    def __init__(
        self,
        config: Config,
        corpus: data.Corpus,
        args: argparse.Namespace,
        device: torch.device,
        part: parallel.Part | None = None,
    ) -> None:
        self.config, self.corpus, self.device, self.part = config, corpus, device, part
        self.leads = part is None or part.rank == 0  # it alone prints and writes
        self.steps, self.seed = args.steps, args.seed
        self.batch = GPU_BATCH if device.type == "cuda" else BATCH
        self.checkpoint = args.out / "checkpoint.pt"
        torch.manual_seed(args.seed)
        self.model = Decoder(config, args.backend).to(device)
        self.mine = self.model if part is None else parallel.split(self.model, part)  # the same weights
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.step = 0
        # Of each step: nats a character, the indexers' loss, seconds. Of the held-out part: [step, nats a character].
        self.history: dict[str, list[Any]] = {"train": [], "indexer": [], "seconds": [], "held_out": []}

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that it continues: all that the losses depend on."""
        settings = {"steps": self.steps, "seed": self.seed, "text": self.corpus.fingerprint, "batch": self.batch}
        return settings | asdict(self.config) | {"context_parallel": self.ranks}

    @property
    def ranks(self) -> int:
        """The processes at work."""
        return 1 if self.part is None else self.part.ranks

    def backend(self) -> str:
        """The name of the backend that the model's attention will run on."""
        config = self.config
        keys = config.sequence + config.sequence // config.block
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        q = like.new_empty(self.batch, config.sequence, config.heads, config.head_dim)
        kv = like.new_empty(self.batch, keys, config.head_dim)
        indices = like.new_zeros(self.batch, config.sequence, config.window + config.topk, dtype=torch.int32)
        sink = like.new_zeros(config.heads, dtype=torch.float32)
        try:
            return slattn.select_backend(q, kv, indices, attn_sink=sink, backend=self.model.backend)
        except (slattn.BackendRefusal, ValueError) as error:
            raise UsageError(str(error)) from None

    def description(self, backend: str) -> str:
        """Two lines that say what is about to run, and on what."""
        config = self.config
        parameters = sum(p.numel() for p in self.model.parameters())
        return (
            f"{parameters:,} parameters in {config.layers} layers; {config.heads} heads of {config.head_dim} see the "
            f"last {config.window} characters and {config.topk} of {config.sequence // config.block} pooled keys.\n"
            f"Backend: {backend}, {str(self.model.dtype).removeprefix('torch.')} on {device_name(self.device)}"
            + (f" in each of {self.ranks} processes." if self.ranks > 1 else ".")
        )

    def train(self) -> bool:
        """Take the steps that are left. Returns whether all were taken: an interrupt ends it early, after a step."""
        every = max(1, self.steps // EVALUATIONS)
        with (
            interrupts() as interrupted,
            tqdm(total=self.steps, initial=self.step, unit="step", disable=not self.leads) as bar,
        ):
            if not self.history["held_out"]:
                self.history["held_out"].append([0, self.held_out_loss()])
            while self.step < self.steps and not self.total(interrupted.is_set()):
                self.one_step()
                if self.step % every == 0 or self.step == self.steps:
                    self.history["held_out"].append([self.step, self.held_out_loss()])
                if self.step % SAVE_EVERY == 0:
                    self.save()
                train, held_out = self.history["train"][-1], self.history["held_out"][-1][1]
                bar.set_postfix_str(f"train {train:.2f}, held-out {held_out:.2f}", refresh=False)
                bar.update()  # writes ten times a second at most
        self.save()
        return self.step == self.steps

    def one_step(self) -> None:
        """One batch, one update."""
        begun = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * rate_share(self.step, self.steps)
        losses = self.gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss, index_loss = losses.tolist()  # waits for the device, once it has all of the step's work
        self.step += 1
        self.history["train"].append(loss)
        self.history["indexer"].append(index_loss)
        self.history["seconds"].append(time.perf_counter() - begun)

    def gradients(self) -> Tensor:
        """Set the gradients of this step's batch. Returns its loss, nats a character, and the indexers', `[2]`."""
        batch = self.corpus.batch(self.batch, self.config.sequence, seed=self.seed, step=self.step)
        tokens, targets = (self.positions(x.to(self.device)) for x in batch)
        self.mine.train()
        self.optimizer.zero_grad()
        logits, index_loss = self.mine(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        # The two share no weights: the indexers' loss trains the indexers alone, the other everything else.
        (loss + index_loss).backward()
        losses = torch.stack((loss, index_loss)).detach()
        return losses if self.part is None else self.part.average(losses, self.model.parameters())

    def positions(self, texts: Tensor) -> Tensor:
        """What this process has of texts `[B, S]`."""
        return texts if self.part is None else texts[:, self.part.positions]

    def total(self, value: float) -> float:
        """The sum over the processes; each hears the same of an interrupt, too."""
        return value if self.part is None else self.part.sum(value)

    def faster_threads(self, most: int) -> int:
        """`most` or 1, whichever number of CPU threads is faster now; trains nothing.

        Threads wait for one another at each of a step's thousand small products. Two idle cores are faster than one;
        but on two cores that others used too, two threads took 0.7 to 3.5 s a step, and one took 0.13.
        """
        limit = math.inf
        for threads in (1, most):
            torch.set_num_threads(threads)
            self.gradients()  # the first starts the threads
            begun = time.perf_counter()
            for _ in range(4):
                self.gradients()
                if time.perf_counter() - begun > limit:
                    return 1
            limit = time.perf_counter() - begun
        return most

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats a character over fixed windows of the held-out part."""
        self.mine.eval()
        total, count = 0.0, 0
        windows = self.corpus.held_out_windows(self.config.sequence, HELD_OUT_WINDOWS)
        size = HELD_OUT_WINDOWS if self.device.type == "cuda" else HELD_OUT_BATCH
        for tokens, targets in zip(*(x.to(self.device).split(size) for x in windows), strict=True):
            logits, targets = self.mine(self.positions(tokens))[0], self.positions(targets)
            total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
        return self.total(total) / (count * self.ranks)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all; one process does it for all."""
        if not self.leads:
            return
        state = {
            "settings": self.settings(),
            "step": self.step,
            "history": self.history,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "threads": torch.get_num_threads(),
        }
        whole = io.BytesIO()  # torch.save into a file calls a full disk an unexpected position
        torch.save(state, whole)
        with written(self.checkpoint) as part:
            part.write_bytes(whole.getbuffer())

    def restore(self) -> None:
        """Go to where the checkpoint is.

        Raises:
            UsageError: there is none, it cannot be read, or it is another run's.
        """
        if not self.checkpoint.is_file():
            raise UsageError(f"--resume: there is no checkpoint {self.checkpoint}; start without --resume")
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            settings = dict(state["settings"])
        except Exception:  # what torch.load raises on a file that is none of its own depends on the file
            raise UsageError(f"--resume: {self.checkpoint} is not a checkpoint of this demo") from None
        wanted = self.settings()
        differ = [f"{k} {settings.get(k)}, not {wanted[k]}" for k in wanted if settings.get(k) != wanted[k]]
        if differ:
            raise UsageError(f"--resume: {self.checkpoint} is of another run: it has {'; '.join(differ)}")
        try:
            self.step, self.history = state["step"], {name: list(state["history"][name]) for name in self.history}
            self.check_history()
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"].cpu())
            if self.device.type == "cpu":
                torch.set_num_threads(state["threads"])  # another number rounds sums otherwise
        except Exception:  # what is missing or misshapen decides what is raised
            raise UsageError(f"--resume: {self.checkpoint} is damaged; start without --resume") from None

    def check_history(self) -> None:
        """Raise where the history is not that of as many steps."""
        losses, seconds, held_out = (self.history[name] for name in ("train", "seconds", "held_out"))
        if not (isinstance(self.step, int) and 0 <= self.step <= self.steps):
            raise ValueError("no such step")
        if [len(losses), len(seconds)] != [self.step] * 2 or not all(isinstance(x, float) for x in losses + seconds):
            raise ValueError("not one number a step")
        if not all(isinstance(step, int) and isinstance(loss, float) for step, loss in held_out):
            raise ValueError("no losses of the held-out part")

    def sample(self) -> tuple[str, str]:
        """What the model writes after a sentence of the held-out part, and the text that it continues."""
        self.model.eval()
        length = self.config.sequence
        # Amid code and tables a sample can be nothing but spaces; behind a full stop comes prose.
        end = self.corpus.decode(self.corpus.held_out).find(". ", length) + 2
        prompt = self.corpus.held_out[max(0, end - length) : end]
        return self.corpus.decode(self.model.generate(prompt, SAMPLE, seed=self.seed)), self.corpus.decode(prompt)

    @torch.no_grad()
    def trace(self) -> tuple[str, Trace]:
        """The first held-out window and what the queries of each layer chose in it, batch of one, on the CPU."""
        self.model.eval()
        tokens = self.corpus.held_out[: self.config.sequence]
        trace: Trace = []
        self.model(tokens[None].to(self.device), trace)
        return self.corpus.decode(tokens), [(indices.cpu(), shares.cpu()) for indices, shares in trace]

    def figures(self, backend: str) -> dict[str, Any]:
        """What demo.json holds, but for the sample and the seconds of the whole run."""
        seconds = statistics.median(self.history["seconds"])  # a kernel's first call compiles it
        return {
            "held_out_loss": self.history["held_out"][-1][1],
            "train_loss": statistics.fmean(self.history["train"][-20:]),
            "unigram_entropy": self.corpus.unigram_entropy(),
            "tokens_per_second": round(self.batch * self.config.sequence / seconds),
            "steps": self.steps,
            "seed": self.seed,
            "batch": self.batch,
            "context_parallel": self.ranks,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "backend": backend,
            "device": str(self.device),
            "device_name": device_name(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "versions": {"slattn": slattn.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "model": asdict(self.config),
            "history": self.history,
        }


def rate_share(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the top one: linear warm-up, then half a cosine."""
    rise = min(1.0, (step + 1) / WARM_UP)
    return rise * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * step / steps)))


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that the step under way is finished; a second one acts as ever."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield event
        return
    usual = signal.getsignal(signal.SIGINT)

    def first(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, first)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, usual)


def device_name(device: torch.device) -> str:
    """The device in words: a GPU's name, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads > 1)}"


def summary(figures: dict[str, Any], prompt: str, out: Path) -> str:
    """The last words: the figures, the sample, and where everything is."""
    loss, unigram = figures["held_out_loss"], figures["unigram_entropy"]
    return (
        f"Held-out loss {loss:.3f} nats a character ({loss / math.log(2):.2f} bits; unigram entropy {unigram:.2f}).\n"
        f"{figures['tokens_per_second']:,} characters a second in training; {figures['seconds']} s in all.\n"
        f"\nHeld-out text, and after the bar what the model writes:\n\n{prompt[-120:]}\u2503{figures['sample']}\n\n"
        f"Wrote {', '.join(str(out / name) for name in FILES)}."
    )
