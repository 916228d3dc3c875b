"""The demo: the model is causal and learns, and a run writes, resumes and refuses as it says."""

import argparse
import functools
import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

import slattn
from slattn import cli
from slattn.demo import data, files, model

plot = pytest.importorskip("slattn.demo.plot", exc_type=ImportError)
train = pytest.importorskip("slattn.demo.train", exc_type=ImportError)

SMALL = {
    "sequence": 48,
    "layers": 2,
    "width": 32,
    "hidden": 48,
    "heads": 2,
    "rotary_dim": 16,
    "query_rank": 16,
    "window": 8,
    "block": 4,
    "topk": 3,
    "index_dim": 8,
}


def decoder(**sizes) -> model.Decoder:
    """A small model with every weight random: fresh, its output products are zero and would hide everything."""
    torch.manual_seed(0)
    small = model.Decoder(model.Config(**{"vocabulary": 11, **SMALL, **sizes}))
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.normal_(std=0.2 if parameter.dim() > 1 else 1.0)
    return small.eval()


def attention_inputs(attention: model.Attention) -> tuple[torch.Tensor, ...]:
    """Scores, q, pooled keys, lse and backend of one layer, as its forward hands them to `index_loss`."""
    taken = []
    attention.train()
    original = attention.index_loss

    def index_loss(*arguments: torch.Tensor) -> torch.Tensor:
        taken.extend(arguments)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "index_loss", index_loss)
        attention(torch.randn(2, 48, 32), "auto")
    return tuple(taken)


# The model


@pytest.mark.parametrize("first", [1, 7, 8, 21, 44, 47])  # inside a block, at its borders, in the incomplete last one
def test_future_tokens_change_no_earlier_logit(first):
    small, tokens = decoder(), torch.randint(11, (2, 47))
    changed = tokens.clone()
    changed[:, first:] = (tokens[:, first:] + 1 + torch.randint(10, changed[:, first:].shape)) % 11
    before, after = small(tokens)[0], small(changed)[0]
    torch.testing.assert_close(before[:, :first], after[:, :first], rtol=0, atol=1e-6)
    assert first == 47 or (before[:, first] != after[:, first]).any()


def test_a_pooled_key_carries_what_the_window_has_left_behind():
    reach = decoder(layers=1, topk=12)  # every block is chosen, so that only causality can hide one
    tokens = torch.randint(11, (1, 48))
    changed = tokens.clone()
    changed[0, 2] = (tokens[0, 2] + 1) % 11
    differs = (reach(tokens)[0] != reach(changed)[0])[0].any(-1)
    assert not differs[:2].any()
    assert differs[10:].all()  # the window of 8 ends at position 9


def test_choice_is_the_window_and_the_best_completed_blocks():
    attention = decoder().layers[0].attention
    scores = torch.arange(12.0).flip(0).expand(1, 48, 12).clone()  # earlier blocks score higher
    scores[0, 40, 9] = 20.0
    indices = attention.choose(scores)
    assert indices.shape == (1, 48, 8 + 3)
    assert indices.dtype == torch.int32
    assert indices[0, 0].tolist() == [0] + [-1] * 10
    assert indices[0, 2].tolist() == [2, 1, 0] + [-1] * 8
    assert indices[0, 3].tolist() == [3, 2, 1, 0, -1, -1, -1, -1, 48, -1, -1]
    assert indices[0, 40].tolist() == [*range(40, 32, -1), 48 + 9, 48, 49]


def test_choice_of_a_text_shorter_than_a_block_has_all_its_slots():
    attention = decoder().layers[0].attention
    assert attention.choose(torch.zeros(1, 3, 0))[0, 2].tolist() == [2, 1, 0] + [-1] * 8


def test_trace_holds_the_probabilities_of_the_op():
    small, trace, taken = decoder(), [], []
    attend = slattn.sparse_attention

    def keep(q, kv, indices, **options):
        out, lse = attend(q, kv, indices, **options)
        taken.append((kv, out))
        return out, lse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slattn, "sparse_attention", keep)
        small(torch.randint(11, (1, 48)), trace)
    for (kv, out), (indices, shares) in zip(taken, trace, strict=True):
        assert (shares[indices < 0] == 0).all()
        weighted = torch.einsum("bsk,bskd->bsd", shares, kv[0][indices.clamp_min(0).long()])
        torch.testing.assert_close(weighted, out.mean(2))


def test_index_loss_trains_the_indexers_and_nothing_else():
    small = decoder().train()
    logits, index_loss = small(torch.randint(11, (2, 48)))
    names = {name for name, _ in small.named_parameters() if ".indexer." in name}
    logits.square().mean().backward(retain_graph=True)
    assert {name for name, p in small.named_parameters() if p.grad is None} == names
    small.zero_grad()
    index_loss.backward()
    assert {name for name, p in small.named_parameters() if p.grad is not None} == names


def test_index_loss_is_zero_where_the_indexer_agrees_and_positive_elsewhere():
    attention = decoder().layers[0].attention
    scores, q, pooled, lse, _ = attention_inputs(attention)
    s = torch.einsum("bshd,bpd->bshp", q, pooled) * 64**-0.5
    agreed = (s - torch.logaddexp(lse, attention.sink)[..., None]).exp().sum(2).log()
    assert abs(attention.index_loss(agreed, q, pooled, lse, "auto")) < 1e-6
    assert attention.index_loss(scores, q, pooled, lse, "auto") > 1e-3
    with pytest.MonkeyPatch.context() as patch:  # in training it is the library's own loss that a step sees
        patch.setattr(slattn, "indexer_loss", lambda *_, **__: torch.tensor(96.0))
        assert attention.index_loss(scores, q, pooled, lse, "auto") == 1.0


def test_rotary_turns_back_and_leaves_the_plain_columns():
    rotary, x = model.Rotary(16, 40), torch.randn(2, 10, 3, 64)
    turned = rotary(x, every=4)
    assert torch.equal(turned[..., :48], x[..., :48])
    assert not torch.allclose(turned[:, 1:], x[:, 1:])
    torch.testing.assert_close(rotary(turned, every=4, inverse=True), x)


def test_model_computes_in_bfloat16_as_on_a_gpu(monkeypatch):
    small, tokens = decoder().train(), torch.randint(11, (2, 48))
    exact, _ = small(tokens)
    monkeypatch.setattr(model.Decoder, "dtype", torch.bfloat16)
    logits, index_loss = small(tokens)
    assert logits.dtype == index_loss.dtype == torch.float32
    assert F.cosine_similarity(logits.flatten(), exact.flatten(), 0) > 0.98  # a choice may fall otherwise
    (logits.square().mean() + index_loss).backward()
    assert all(p.grad.isfinite().all() for p in small.parameters())


def test_generated_text_is_the_seed_s():
    small, prompt = decoder(), torch.randint(11, (5,))
    texts = [small.generate(prompt, 12, seed=seed).tolist() for seed in (1, 1, 2)]
    assert len(texts[0]) == 12
    assert texts[0] == texts[1] != texts[2]


# The text


def test_text_holds_out_nothing_that_was_trained_on():
    corpus = data.load()
    assert len(corpus.train) > 250_000
    assert len(corpus.held_out) == pytest.approx(len(corpus.train) / 9, abs=10)
    train_text, held_out = corpus.decode(corpus.train), corpus.decode(corpus.held_out)
    paragraphs = [" ".join(p.split()) for p in held_out.split("\n\n")[1:]]
    known = {" ".join(p.split()) for p in train_text.split("\n\n")}
    assert not known.intersection(paragraphs)
    assert 3.1 < corpus.unigram_entropy() < 3.4


def test_batches_are_a_function_of_seed_and_step():
    corpus = data.split("".join(chr(97 + n * n % 23) for n in range(4000)))
    tokens, targets = corpus.batch(3, 20, seed=1, step=5)
    assert tokens.shape == targets.shape == (3, 20)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    torch.manual_seed(9)
    assert torch.equal(tokens, corpus.batch(3, 20, seed=1, step=5)[0])
    assert not torch.equal(tokens, corpus.batch(3, 20, seed=1, step=6)[0])
    assert not torch.equal(tokens, corpus.batch(3, 20, seed=2, step=5)[0])


# A run


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    """Runs the demo at test size with the given options; returns the exit status."""
    corpus = data.split("".join(data.load().decode(data.load().train[:20_000])))
    monkeypatch.setattr(data, "load", lambda: corpus)
    monkeypatch.setattr(train, "Config", functools.partial(model.Config, **SMALL))
    monkeypatch.setattr(train, "HELD_OUT_WINDOWS", 4)
    monkeypatch.setattr(train, "SAMPLE", 8)
    monkeypatch.setattr(train.Trainer, "faster_threads", lambda trainer, most: most)  # tests compare runs bit for bit

    def run(*options: str) -> int:
        return cli.main(["demo", "--out", str(tmp_path / "out"), "--device", "cpu", *options])

    return run


def figures(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "demo.json").read_text())


def test_run_learns_and_writes_its_outputs(small_run, tmp_path, capsys):
    assert small_run("--steps", "30") == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoint.pt", "demo.json", "demo.png"]
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    got = figures(tmp_path)
    history = got["history"]
    assert len(history["train"]) == len(history["indexer"]) == got["steps"] == 30
    assert history["held_out"][0][0] == 0
    assert history["held_out"][-1] == [30, got["held_out_loss"]]
    assert got["held_out_loss"] < history["held_out"][0][1] - 0.5
    assert (got["backend"], got["device"], got["dtype"], got["seed"]) == ("reference", "cpu", "float32", 0)
    assert got["tokens_per_second"] > 0
    assert len(got["sample"]) == 8
    printed = capsys.readouterr().out
    assert "Backend: reference" in printed
    assert f"{got['tokens_per_second']:,} characters a second" in printed
    assert got["sample"] in printed


def test_interrupted_run_resumes_to_the_same_losses(small_run, tmp_path, monkeypatch, capsys):
    assert small_run("--steps", "6") == 0
    straight = figures(tmp_path)
    one_step = train.Trainer.one_step

    def interrupted_step(trainer):
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        one_step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "one_step", interrupted_step)
        assert small_run("--steps", "6") == 130
    assert "Interrupted after step 3 of 6" in capsys.readouterr().out
    assert small_run("--steps", "6", "--resume") == 0
    resumed = figures(tmp_path)
    for name in ("train", "indexer", "held_out"):
        assert resumed["history"][name] == straight["history"][name]
    assert resumed["sample"] == straight["sample"]


def test_finished_run_resumes_to_its_report(small_run, tmp_path):
    assert small_run("--steps", "2") == 0
    first = figures(tmp_path)
    assert small_run("--steps", "2", "--resume") == 0
    assert figures(tmp_path)["history"] == first["history"]


def test_choosing_threads_changes_nothing(tmp_path, monkeypatch):
    corpus, threads = data.load(), torch.get_num_threads()
    args = argparse.Namespace(steps=5, seed=0, backend="auto", out=tmp_path)
    monkeypatch.setattr(train, "BATCH", 1)
    config = model.Config(vocabulary=len(corpus.characters), **SMALL)
    trainer, untouched = (train.Trainer(config, corpus, args, torch.device("cpu")) for _ in range(2))
    assert trainer.faster_threads(2) in (1, 2)
    torch.set_num_threads(threads)
    for one in (trainer, untouched):
        one.one_step()
    assert trainer.history["train"] == untouched.history["train"]
    for changed, same in zip(trainer.model.parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(changed, same)


def test_resumed_run_keeps_its_threads(small_run, tmp_path):
    threads = torch.get_num_threads()
    assert small_run("--steps", "1") == 0
    try:
        torch.set_num_threads(threads + 1)
        assert small_run("--steps", "1", "--resume") == 0
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--steps", "0"], "--steps must be at least 1; got 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--resume"], "there is no checkpoint"),
        (["--device", "nowhere"], "--device nowhere cannot be used"),
        (["--device", "meta"], "--device meta cannot be used"),
        (["--backend", "tilelang"], "backend 'tilelang' cannot run this call"),
    ],
)
def test_refusals_are_sentences(small_run, capsys, options, sentence):
    assert small_run(*options) == 2
    assert sentence in capsys.readouterr().err


def test_checkpoint_of_another_run_is_refused(small_run, tmp_path, capsys):
    assert small_run("--steps", "1") == 0
    assert small_run("--steps", "2", "--seed", "7", "--resume") == 2
    assert "is of another run: it has steps 1, not 2; seed 0, not 7" in capsys.readouterr().err
    (tmp_path / "out" / "checkpoint.pt").write_bytes(b"torn")
    assert small_run("--steps", "1", "--resume") == 2
    assert "is not a checkpoint of this demo" in capsys.readouterr().err
    torch.save({"settings": None}, tmp_path / "out" / "checkpoint.pt")
    assert small_run("--steps", "1", "--resume") == 2
    assert "is not a checkpoint of this demo" in capsys.readouterr().err


def test_a_stdout_without_the_letters_gets_question_marks(monkeypatch):
    told = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(told, encoding="ascii"))
    files.say("a text\u2503and on")
    sys.stdout.flush()
    assert told.getvalue() == b"a text?and on\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_an_os_error_and_leaves_no_part(tmp_path, monkeypatch):
    """Which the command line makes a sentence of."""
    args = argparse.Namespace(steps=1, seed=0, backend="auto", out=tmp_path)
    corpus = data.split("".join(chr(97 + n * n % 23) for n in range(4000)))
    trainer = train.Trainer(model.Config(vocabulary=len(corpus.characters), **SMALL), corpus, args, torch.device("cpu"))
    trainer.save()
    whole = trainer.checkpoint.read_bytes()
    monkeypatch.setattr(files, "part_of", lambda path: tmp_path / "full")
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        trainer.save()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert trainer.checkpoint.read_bytes() == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["model"].popitem(),
        lambda state: state["history"].pop("indexer"),
        lambda state: state.pop("optimizer"),
        lambda state: state.update(random=None),
        lambda state: state.update(step="1"),
        lambda state: state.update(step=5),
        lambda state: state["history"].update(train=[]),
        lambda state: state["history"].update(held_out=["x"]),
    ],
)
def test_damaged_checkpoint_is_refused(small_run, tmp_path, capsys, damage):
    assert small_run("--steps", "1") == 0
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    damage(state)
    torch.save(state, tmp_path / "out" / "checkpoint.pt")
    assert small_run("--steps", "1", "--resume") == 2
    assert "checkpoint.pt is damaged" in capsys.readouterr().err


def test_out_that_is_a_file_is_refused(small_run, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert small_run("--steps", "1") == 2
    assert "cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo.png", "demo.json.part", "checkpoint.pt"])
def test_folder_in_a_file_s_place_is_refused_before_the_training(small_run, tmp_path, capsys, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    assert small_run("--steps", "1") == 2
    assert f"{name} is a folder" in capsys.readouterr().err
    assert len(list((tmp_path / "out").iterdir())) == 1


@pytest.mark.parametrize("package", ["matplotlib", "tqdm"])
def test_missing_package_is_named(package):
    code = f"""
import sys
sys.modules[{package!r}] = None
from slattn import cli
sys.exit(cli.main(["demo"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"slattn demo: it needs {package}: pip install {package}\n"


def test_import_is_light():
    code = """
import sys, slattn
print([name for name in sys.modules if name.startswith("slattn.demo")])
import slattn.demo
print([name for name in ("matplotlib", "slattn.demo.train", "slattn.demo.model") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
