"""Public training scripts, as their own repositories have them: how each is fetched, given data, and started.

They are cloned at the commit that stands here into the folder ``FTSUPERVISE_PUBLIC_SCRIPTS``, else one in the temporary
directory. The interpreter that ``FTSUPERVISE_PUBLIC_PYTHON`` names, else this one, runs them; it must have what they import.
No file of theirs is changed. Data that they would download is made here, in the form that they read.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = os.environ.get("FTSUPERVISE_PUBLIC_PYTHON", sys.executable)
_PLACE = "FTSUPERVISE_PUBLIC_SCRIPTS"
_WORDS = ("the king of a night and day shall not come to me", "thou art my lord", "what is this rose")


class NotHere(Exception):
    """It cannot be had in this environment; says why."""


@dataclass(frozen=True)
class PublicScript:
    """``folder``: of it in its repository, where it is started. ``needs``: modules that its interpreter must have, and
    ``tools``: programs.

    ``resumes``: whether it goes on from what it saved, with ``resume`` if that is given. ``makes``: gives it its data.
    """

    name: str
    repository: str  # "": what a program printed is played, and nothing is fetched
    commit: str
    folder: str
    command: str  # ``{python}`` is the interpreter
    needs: tuple[str, ...]
    resumes: bool
    resume: str = ""
    steps: bool = True  # it shows a step
    shown: str = ""  # regular expression of the steps that it prints; "": the step is a sum over epochs
    percent: bool = False  # it shows a percentage
    lines: bool = True  # it prints line after line
    warned: str = "time limit"  # how an attempt ends that was warned: it trains on to the limit, or leaves
    saves: str = ""  # what it has saved after a minute; "": nothing by then
    says: str = ""  # what it prints when it goes on from there
    data: str = ""  # the file that it reads when it starts
    loads: str = ""  # a file that it opens for each batch, or ``torch``: it has a data loader of torch
    makes: Callable[[Path], object] = lambda _: None
    env: dict[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # folders of its repository that it needs too
    tools: tuple[str, ...] = ()
    more: str = ""  # lines of its ``launch``

    def fetch(self, to: Path) -> Path:
        """Return a folder of its own with the repository's files, where it can be started. Raises NotHere."""
        code = "; ".join(f"import {module}" for module in self.needs)
        env = {**os.environ, **self.env}
        if subprocess.run([PYTHON, "-c", code], env=env, capture_output=True, check=False).returncode:
            raise NotHere(
                f"{PYTHON} lacks one of {', '.join(self.needs)} (FTSUPERVISE_PUBLIC_PYTHON names another one)"
            )
        if absent := [name for name in self.tools if shutil.which(name) is None]:
            raise NotHere(f"this machine lacks {', '.join(absent)}")
        if not self.repository:
            to.mkdir(parents=True)
            self.makes(to)
            return to
        place = Path(os.environ.get(_PLACE, tempfile.gettempdir() + "/ftsupervise-public-scripts"))
        clone = place / f"{self.repository.replace('/', '+')}.git"
        if not clone.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            words = ["clone", "--bare", "--quiet", f"https://github.com/{self.repository}", str(clone)]
            if _git(*words).returncode:
                raise NotHere(f"{self.repository} cannot be cloned, and is not in {place} (${_PLACE})")
        to.mkdir(parents=True)
        whole = _git(
            "--git-dir", str(clone), "archive", "-o", str(to / "all.tar"), self.commit, self.folder or ".", *self.beside
        )
        if whole.returncode or subprocess.run(["tar", "xf", "all.tar"], cwd=to, check=False).returncode:
            raise NotHere(f"{clone} has no {self.commit}")
        (to / "all.tar").unlink()
        self.makes(to / self.folder)
        return to / self.folder


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        return subprocess.run(["git", *words], env=env, capture_output=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHere(f"git: {error}") from None


def text(lines: int) -> str:
    """Return lines of words, the same ones each time."""
    dice = random.Random(1)
    return "".join(" ".join(dice.choice(_WORDS) for _ in range(3)) + "\n" for _ in range(lines))


def _nanogpt(folder: Path) -> None:
    data = folder / "data" / "shakespeare_char"
    (data / "input.txt").write_text(text(20_000))
    subprocess.run([PYTHON, "prepare.py"], cwd=data, check=True, capture_output=True)


def _mingpt(folder: Path) -> None:
    (folder / "input.txt").write_text("O God, O God!\n" + text(20_000))


def _language_model(folder: Path) -> None:
    data = folder / "data" / "wikitext-2"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    for name, lines in (("train", 4000), ("valid", 300), ("test", 300)):
        (data / f"{name}.txt").write_text(text(lines))


def _lightning(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text(text(20_000))


def _llama2(folder: Path) -> None:
    data = folder / "data" / "tok64"
    data.mkdir(parents=True)
    dice = random.Random(1)
    for shard in range(2):
        (data / f"data{shard}.bin").write_bytes(b"".join(bytes((dice.randrange(1, 60), 0)) for _ in range(100_000)))


_TINY = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

one = Tokenizer(models.WordLevel(unk_token="<unk>"))
one.pre_tokenizer = pre_tokenizers.Whitespace()
one.train(["train.txt"], trainers.WordLevelTrainer(special_tokens=["<unk>", "<|endoftext|>"]))
PreTrainedTokenizerFast(tokenizer_object=one, unk_token="<unk>", eos_token="<|endoftext|>").save_pretrained("tiny")
words = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
GPT2Config(**words).save_pretrained("tiny")
"""


def _run_clm(folder: Path) -> None:
    (folder / "train.txt").write_text(text(4000))
    subprocess.run([PYTHON, "-c", _TINY], cwd=folder, check=True, capture_output=True)


def _word2vec(folder: Path) -> None:
    (folder / "text.txt").write_text(text(200_000))
    _compile(folder, "gcc", "-O2", "word2vec.c", "-o", "word2vec", "-lm", "-pthread")


def _compile(folder: Path, *words: str) -> None:
    try:
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotHere(f"{words[0]}: it cannot be compiled: {error}") from None


_TINY_BERT = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

one = Tokenizer(models.WordLevel(unk_token="[UNK]"))
one.pre_tokenizer = pre_tokenizers.Whitespace()
one.train(["words.txt"], trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=one, unk_token="[UNK]", pad_token="[PAD]", model_max_length=32)
tokenizer.save_pretrained("bert-base-cased")
words = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=64, **words)).save_pretrained("bert-base-cased")
"""
_METRIC = """
import datasets
import evaluate


class Same(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features({"predictions": whole, "references": whole})
        )

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
"""


def _accelerate(folder: Path) -> None:
    """The names that it would look up on the hub are folders here: a tiny model, a data set, a metric."""
    (folder / "words.txt").write_text(text(100))
    subprocess.run([PYTHON, "-c", _TINY_BERT], cwd=folder, check=True, capture_output=True)
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    splits = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("train", "validation"))
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}---\n")
    dice = random.Random(1)
    for name, size in (("train", 200_000), ("validation", 64)):
        with (data / f"{name}.jsonl").open("w") as file:
            for at in range(size):
                one, two = dice.choices(_WORDS, k=2)
                file.write(f'{{"sentence1": "{one}", "sentence2": "{two}", "label": {at % 2}, "idx": {at}}}\n')
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(_METRIC)


_IMAGES = """
set.seed(1)
n <- 2000
train_labels <- sample(0:9, n, TRUE)
train_images <- array(0, c(n, 28, 28))
for (i in seq_len(n)) {
  train_images[i, 2 * train_labels[i] + 1:2, 10:12] <- 255
  train_images[i, sample(28, 2), sample(28, 2)] <- 128
}
save(train_images, train_labels, file = "data/train.RData")
"""


def _r(folder: Path) -> None:
    (folder / "data").mkdir(exist_ok=True)
    subprocess.run(["Rscript", "-e", _IMAGES], cwd=folder, check=True, capture_output=True)


def _fasttext(folder: Path) -> None:
    (folder / "data").mkdir()
    dice = random.Random(1)
    block = "".join(f"__label__{dice.randrange(14)} {' '.join(dice.choices(_WORDS, k=8))}\n" for _ in range(50_000))
    for name, times in (("train", 100), ("test", 1)):
        with (folder / "data" / f"dbpedia.{name}").open("w") as file:
            for _ in range(times):
                file.write(block)
    _compile(folder, "make")


def _played(folder: Path) -> None:
    shutil.copy(Path(__file__).with_name("played_logs.py"), folder / "play.py")


_SMALL = "--device=cpu --compile=False --eval_iters=2 --log_interval=1 --batch_size=4 --max_iters=1000000"

PUBLIC = (
    PublicScript(
        "nanogpt",
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "",
        f"{{python}} train.py config/train_shakespeare_char.py {_SMALL} --block_size=32 --n_layer=2 --n_head=2 --n_embd=32 "
        "--eval_interval=50 --always_save_checkpoint=True",
        ("torch", "numpy"),
        resumes=True,
        resume="--init_from=resume",
        shown=r"^(?:iter|step) (\d+):",
        saves="out-shakespeare-char/ckpt.pt",
        says="Resuming training from",
        loads="data/shakespeare_char/train.bin",
        makes=_nanogpt,
    ),
    PublicScript(
        "llama2",
        "karpathy/llama2.c",
        "350e04fe35433e6d2941dce5a1f53308f87058eb",
        "",
        f"{{python}} train.py {_SMALL} --dtype=float32 --gradient_accumulation_steps=1 --max_seq_len=32 --dim=32 --n_layers=1 "
        "--n_heads=2 --n_kv_heads=2 --vocab_size=64 --vocab_source=custom --eval_interval=50 --always_save_checkpoint=True",
        ("torch", "numpy", "sentencepiece", "requests", "tqdm"),
        resumes=True,
        resume="--init_from=resume",
        shown=r"^(?:step )?(\d+)(?: \||:)",
        saves="out/ckpt.pt",
        says="Resuming training from",
        loads="data/tok64/data1.bin",
        makes=_llama2,
    ),
    PublicScript(
        "makemore",
        "karpathy/makemore",
        "988aa59e4d8fefa526d06f3b453ad116258398d4",
        "",
        "{python} makemore.py -i names.txt -o names --device cpu --num-workers 1 --n-layer 1 --n-embd 16 --n-embd2 16",
        ("torch", "tensorboard"),
        resumes=False,
        shown=r"^step (\d+) \|",
        loads="torch",  # with a worker
        data="names.txt",
    ),
    PublicScript(
        "mingpt",
        "karpathy/minGPT",
        "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        "projects/chargpt",
        "{python} chargpt.py --trainer.batch_size=4 --data.block_size=16 --model.model_type=gpt-nano",
        ("torch", "numpy"),
        resumes=False,
        shown=r"iter (\d+):",
        data="input.txt",
        loads="torch",  # with four workers
        makes=_mingpt,
        env={"PYTHONPATH": "../.."},
        beside=("mingpt",),
    ),
    PublicScript(
        "language-model",
        "pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
        "word_language_model",
        "{python} main.py --epochs 6000 --nhid 32 --emsize 32 --log-interval 5 --batch_size 40",
        ("torch",),
        resumes=False,
        data="data/wikitext-2/train.txt",
        makes=_language_model,
        beside=(":(exclude)word_language_model/data",),
    ),
    PublicScript(
        "lightning",
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "examples/pytorch/basics",
        "{python} transformer.py",
        ("torch", "lightning"),
        resumes=False,
        steps=False,  # with rich, which draws at a terminal only
        lines=False,
        data="data/wikitext-2.txt",
        makes=_lightning,
    ),
    PublicScript(
        "keras",
        "keras-team/keras",
        "3422977a5e38fb2f7709aaa9a08e47f0c43d0f60",
        "examples",
        "{python} demo_functional.py",
        ("torch", "keras"),
        resumes=False,
        env={"KERAS_BACKEND": "torch"},
    ),
    PublicScript(
        "run-clm",
        "codeislife99/transformers_examples",  # as huggingface/transformers had it then: that repository is very large
        "0c8c16868afe82a978dc4694645890df1ae61049",
        "examples/pytorch/language-modeling",
        "{python} run_clm.py --config_name tiny --tokenizer_name tiny --train_file train.txt --do_train --output_dir out "
        "--block_size 32 --per_device_train_batch_size 2 --save_steps 50 --logging_steps 20 --num_train_epochs 500 "
        "--report_to none --save_total_limit 3",
        ("transformers.onnx", "datasets", "accelerate"),  # transformers 4: version 5 has no such module
        resumes=True,
        shown=r"\| (\d+)/\d+ \[",
        saves="out/checkpoint-*",
        makes=_run_clm,
        env={"HF_HUB_OFFLINE": "1"},
    ),
    PublicScript(
        "word2vec",
        "tmikolov/word2vec",
        "20c129af10659f7c50e86e3be406df663beff438",
        "",
        "./word2vec -train text.txt -output vectors.bin -threads 1 -size 500 -negative 100 -window 10 -iter 50",
        (),
        resumes=False,
        steps=False,
        percent=True,
        lines=False,
        data="text.txt",
        makes=_word2vec,
        tools=("gcc",),
    ),
    PublicScript(
        "accelerate",
        "huggingface/accelerate",
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        "examples",
        "{python} complete_nlp_example.py --cpu --checkpointing_steps 50 --output_dir out",
        ("torch", "accelerate", "transformers", "datasets", "evaluate"),
        resumes=True,
        resume="--resume_from_checkpoint {checkpoint}",
        steps=False,  # it prints a line after each epoch
        lines=False,
        saves="out/step_*",
        says="Resumed from checkpoint",
        loads="torch",
        makes=_accelerate,
        env={"HF_HUB_OFFLINE": "1"},
    ),
    PublicScript(
        "r",
        "byrongibby/neural-net",
        "ba172f6716209ec73e975805292a8716698c9648",
        "",
        "Rscript train.R",
        (),
        resumes=False,
        steps=False,
        warned="warning signal, then rank 0 on node-0 exit 2",  # R itself catches SIGUSR1 and writes .RData
        data="data/train.RData",
        makes=_r,
        beside=(":(exclude)data",),
        tools=("Rscript",),
    ),
    PublicScript(
        "fasttext",  # a shell script, stage after stage
        "facebookresearch/fastText",
        "1142dc4c4ecbc19cc16eee5cdd28472e689267e6",
        "",
        "./classification-example.sh",
        (),
        resumes=False,
        steps=False,
        percent=True,
        lines=False,
        makes=_fasttext,
        tools=("g++", "make"),
    ),
    PublicScript(
        "bar",  # as tinygrad's examples print it, and nothing else
        "",
        "",
        "",
        "{python} play.py bar",
        (),
        resumes=False,
        shown=r"\| (\d+)/\d+ \[",
        makes=_played,
    ),
    PublicScript(
        "megatron",
        "",
        "",
        "",
        "{python} play.py megatron",
        (),
        resumes=True,
        shown=r"iteration\s+(\d+)/",
        saves="checkpoints/iter_*",
        says="successfully loaded checkpoint",
        makes=_played,
    ),
    PublicScript(
        "deepspeed",
        "",
        "",
        "",
        "{python} play.py deepspeed",
        (),
        resumes=False,
        shown=r"step=(\d+), skipped",
        makes=_played,
    ),
)
