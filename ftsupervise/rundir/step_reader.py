"""Finds the step of a training that nobody here wrote, in whatever it prints. Pure, with bounded memory.

A number is a step only when it behaves like one: lines of the same shape show it again and again, it grows, and the next is
near the last. So a total, a printed configuration, an epoch counter, an evaluation's bar and Slurm's own lines are none. A
format that looks right but cannot be told from something else gives no step: unknown is an answer, a wrong step is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ftsupervise.rundir.log_lines import LINE, LOSS, lines

_NUMBER = r"(?P<step>\d{1,3}(?:,\d{3})+|\d{1,15})"
_END = r"(?![\d]*[.\w]\d)(?!\w)"  # "10.0" is Slurm's step or a float, "45ms" a duration
_GROWN = 4  # values, each greater than the one before, after which it is a step
_FAR = 50  # largest increments: a number further away is another thing
_BEHIND = 10  # largest increments: how far one rank may be behind another that prints the same lines
_BESIDE = 2  # times that a bar grows after a loss was printed, after which it is that of the training
_JUMP = 5  # times the next increment: the first value was no step that was made
_MOST = 128  # shapes of lines that are remembered
_SHAPE = 160  # characters of one


class Format(NamedTuple):
    """How one kind of program writes its step. ``example``: a line of it, as its program wrote it."""

    name: str
    pattern: re.Pattern[str]
    example: str
    rank: int  # the lower, the sooner believed where several are seen
    of_epoch: int | None = None  # the step is one of its epoch: epochs count from this number
    bar: bool = False  # it may be the bar of anything: something else must say that it trains


def _form(
    name: str, pattern: str, example: str, rank: int, *, of_epoch: int | None = None, bar: bool = False
) -> Format:
    return Format(name, re.compile(pattern.replace("NUMBER", _NUMBER + _END), re.I), example, rank, of_epoch, bar)


# The more exact one first: the first that fits a line is taken.
FORMATS = (
    _form(
        "Megatron",
        r"(?<![a-z])iteration\s+NUMBER\s*/\s*(?P<total>\d+)\s*\|\s*consumed",
        " iteration     1000/  500000 | consumed samples:       256000 | elapsed time per iteration (ms): 512.3 | "
        "learning rate: 1.500E-04 | global batch size:   256 | lm loss: 2.345678E+00 |",
        0,
    ),
    _form(
        "DeepSpeed",
        r"\[Rank \d+\]\s+step=NUMBER,\s*skipped=",
        "[2024-05-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]",
        0,
    ),
    _form(
        "Keras",
        r"^NUMBER/(?P<total>\d+) (?:\[[=>.]*\]|[━ ]+)",
        "45/100 ━━━━━━━━━━━━━━━━━━━━ 2s 45ms/step - accuracy: 0.9012 - loss: 0.3123",
        2,
        of_epoch=1,
    ),
    _form(
        "Lightning",
        r"^Epoch (?P<epoch>\d+):\s+\d+%\|[^|]*\|\s*NUMBER/(?P<total>\d+) \[",
        "Epoch 3:  45%|████▌     | 45/100 [00:08<00:10,  5.21it/s, v_num=0, train_loss=0.312]",
        2,
        of_epoch=0,
    ),
    _form(
        "Lightning with rich, at a terminal",
        r"^Epoch (?P<epoch>\d+)/\d+ [━╸╺ ]+ NUMBER/(?P<total>\d+) ",
        "Epoch 0/19 ━━━━━━━━━╸       239/402 0:04:23 • 0:02:53 0.94it/s v_num: 0.000",
        2,
        of_epoch=0,
    ),
    _form(
        "torchvision",
        r"^Epoch: \[(?P<epoch>\d+)\]\s+\[\s*NUMBER/(?P<total>\d+)\]",
        "Epoch: [3]  [ 100/1251]  eta: 0:10:21  lr: 0.000100  loss: 2.1234 (2.4321)  time: 0.5012  data: 0.0012",
        2,
        of_epoch=0,
    ),
    _form(
        "PyTorch's ImageNet example",
        r"^Epoch: \[(?P<epoch>\d+)\]\[\s*NUMBER/(?P<total>\d+)\]",
        "Epoch: [0][   11/40037]\tTime  0.412 ( 0.533)\tData  0.001 ( 0.021)\tLoss 7.0141e+00 (6.9711e+00)\t"
        "Acc@1   0.00 (  0.00)\tAcc@5   0.00 (  0.00)",
        2,
        of_epoch=0,
    ),
    _form(
        "char-rnn",
        r"^NUMBER/(?P<total>\d+) \(epoch \d+(?:\.\d+)?\), train_loss",
        "1/21150 (epoch 0.002), train_loss = 4.19766416, grad/param norm = 4.5006e-01, time/batch = 0.4031s",
        1,
    ),
    _form(
        "llama2.c",
        r"^NUMBER \| loss ",
        "1100 | loss 2.4170 | lr 5.000000e-04 | 33.21ms | mfu 0.01%",
        1,
    ),
    _form(
        "timm",
        r"^Train: (?P<epoch>\d+) \[\s*NUMBER/(?P<total>\d+) ",
        "Train: 3 [ 100/1251 (  8%)]  Loss: 6.93 (6.95)  Time: 0.501s,  510.98/s  LR: 1.000e-05  Data: 0.012 (0.020)",
        2,
        of_epoch=0,
    ),
    _form(
        "MMDetection",
        r"\bEpoch \[(?P<epoch>\d+)\]\[NUMBER/(?P<total>\d+)\]",
        "2020-05-08 18:56:16,649 - mmdet - INFO - Epoch [1][2400/7517]\tlr: 0.00125, eta: 4:33:09, time: 0.595, loss: 0.4890",
        2,
        of_epoch=1,
    ),
    _form(
        "PyTorch's word_language_model",
        r"^\| epoch\s+(?P<epoch>\d+)\s+\|\s+NUMBER/\s*(?P<total>\d+) batches",
        "| epoch   4 |    50/  132 batches | lr 20.00 | ms/batch 12.34 | loss  5.12 | ppl   167.34",
        2,
        of_epoch=1,
    ),
    _form(
        "tqdm",
        r"^\d+%\|[^|]*\|\s*NUMBER/(?P<total>[\d,]+) \[",
        "  3%|▎         | 281/10000 [00:01<00:50, 195.31it/s]",
        3,
        bar=True,
    ),
    _form(
        "a bar of one epoch of so many",
        r"^(?P<label>[^|]{0,200}?(?<![a-z])epoch\W{0,4}(?P<epoch>\d{1,9})\s*(?:/|of)\s*\d+[^|]{0,200}?): +\d+%\|[^|]*\|\s*"
        r"NUMBER/(?P<total>[\d,]+) \[",
        "Epoch 1/15:   2%|▎         | 1/40 [00:10<00:10,  2.00it/s, loss=0.12]",
        2,
        of_epoch=1,
        bar=True,
    ),
    _form(
        "a bar of one epoch",
        r"^(?P<label>[^|]{0,200}?(?<![a-z])epoch\W{0,4}(?P<epoch>\d{1,9})(?![\d.])[^|]{0,200}?): +\d+%\|[^|]*\|\s*"
        r"NUMBER/(?P<total>[\d,]+) \[",
        "Train epoch 0:   5%|▌         | 1/20 [00:00<00:10,  2.00it/s, loss=1.000]",
        2,
        of_epoch=0,
        bar=True,
    ),
    _form(
        "a bar with a description, of tqdm and of tinygrad",
        r"^(?P<label>[^|]{1,300}?): +\d+%\|[^|]*\|\s*NUMBER/(?P<total>[\d,]+) \[",
        "loss:   2.31 test_accuracy: 11.25%:   3%|▎         | 281/10000 [00:01<00:50, 195.31it/s]",
        3,
        bar=True,
    ),
    _form(
        "whatever says global step, beside the step of an epoch too",
        r"(?<![a-z])global[ _-]?steps?['\"]?\s*[:=#\]]?\s*['\"]?NUMBER",
        "Training, Epoch: 0, Step: 2, Global_Step: 2, Loss: distogram=4.159 loss=160.364",
        1,
    ),
    _form(
        "nanoGPT, and whatever says step or iteration",
        r"(?<![a-z])(?:global[ _-]?step|train[ _-]?step|num_updates|step|iteration|iter)s?['\"]?\s*[:=#\]]?\s*['\"]?NUMBER",
        "iter 787: loss 2.3456, time 123.45ms, mfu 12.34%",
        1,
    ),
)

_EPOCH = re.compile(r"^Epoch (\d+)/(\d+)\s*$")  # Keras says it on a line of its own
_NAMED = re.compile(r"(?<![a-z])epoch\W{0,4}(\d{1,9})\b", re.I)
_ANNOUNCED = re.compile(r"(?:total (?:optimization|training|train) steps|max_steps)\W{1,4}([\d,]+)", re.I)
_SLURM = re.compile(r"(?:\d+: ?)?(?:srun|slurmstepd|slurmd|sbatch|salloc|scancel)(?:-\S+)?:|\*\*\* (?:STEP|JOB) ", re.I)
_LABEL = re.compile(r"(?:\[?(?:default|rank)?\s?(\d{1,6})\]?: ?|\[rank(\d{1,6})\]:? ?)")
_NUMBERS = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?|\bnan\b|\binf(?:inity)?\b)", re.I)
_BAR = re.compile(r"[█▏▎▍▌▋▊▉━#=>.]{2,}|\s+")
# what else has steps, or a bar
_OTHER = re.compile(
    r"(?<![a-z])(?:eval|valid|val[ _]|test|sampl|generat|warm|download|load|token|mapp|filter|prepro|predict|sanity|"
    r"resum|restor|checkpoint|sav(?:ed|ing)|total|max|num_train|num_steps|until|every)",
    re.I,
)
_TRAINS = re.compile(
    rf"{''.join(f'(?<!{word}{mark})' for word in ('eval', 'val', 'valid', 'validation', 'test') for mark in '_ /')}loss",
    re.I,
)
# what a training may measure meanwhile, and names in its bar
_METRIC = re.compile(
    r"(?<![a-z])(?:test|val|valid|validation|eval)[ _/-](?:acc\w*|loss|ppl|perplexity|f1|error|err)", re.I
)


@dataclass
class _Series:
    """The numbers that lines of one shape show."""

    form: Format
    total: int | None
    first: int
    last: int
    grown: int = 1  # values, each greater than the one before
    increment: int = 0  # the largest that was near
    fell: bool = False
    behind: bool = False  # it fell by so little that another rank may have printed the line
    trains: bool = False  # something beside the bar says that it trains
    loss_seen: bool = False  # a loss was printed since its last value
    beside: int = 0  # how often it has grown after one: a bar that stands while others print losses is another one
    within: int = 0  # how often a faster counter began anew while this one stood
    epoch: int | None = None  # that the output named last before the first value
    at: float = 0.0  # when the first value was shown
    later: bool = False  # its first line named an epoch after the first one

    @property
    def sure(self) -> bool:
        if self.grown < _GROWN or self.fell or self._is_outer or self._is_of_a_later_epoch:
            return False
        if self.behind and self._is_short:
            return False
        return self.trains or not self.form.bar

    @property
    def _is_of_a_later_epoch(self) -> bool:
        """A run that goes on in epoch 3, with a number that begins there: it is that epoch's, and not the step."""
        return self.later and self.form.of_epoch is None and self.first <= self.increment

    @property
    def _is_short(self) -> bool:
        """It has not come so far that one which begins anew falls further back than a rank which is behind."""
        return self.last - self.first <= 2 * _BEHIND * self.increment

    @property
    def _is_outer(self) -> bool:
        return self.within >= 2 and self.within + 2 >= self.grown

    def add(self, value: int) -> bool:
        """Take the next number. Returns whether the count began anew."""
        by = value - self.last
        if by > 0:
            if self.grown >= 2 and by > _FAR * self.increment:
                return False
            if (
                self.grown == 2 and self.increment > _JUMP * by
            ):  # Trainer's bar shows 0, then the step that it goes on from
                self.first = self.last
            self.increment = max(self.increment, by)
            self.grown += 1
            self.beside += self.loss_seen
            self.trains, self.loss_seen = self.trains or self.beside >= _BESIDE, False
            self.last = value
        elif -by > _BEHIND * self.increment:
            self.fell, self.last = True, value
            return True
        elif -by > self.increment:  # another rank is behind, or a short count begins anew
            self.behind = True
            return self._is_short
        return False


@dataclass
class StepReader:
    """Reads the output of one attempt, piece by piece."""

    seen: int = 0  # lines read
    _now: float = 0.0
    _series: dict[tuple[str, ...], _Series] = field(default_factory=dict)
    _epoch: int | None = None
    _named: int | None = None  # the last epoch that any line named
    _announced: set[int] = field(default_factory=set)
    _chosen: _Series | None = None

    @property
    def step(self) -> int | None:
        """The newest step; None while no number behaves like one."""
        return None if self._chosen is None else self._chosen.last

    @property
    def first(self) -> int | None:
        """The first step that was shown."""
        return None if self._chosen is None else self._chosen.first

    @property
    def first_at(self) -> float | None:
        """The time at which it was shown: long before it was known for a step, where the steps are long."""
        return None if self._chosen is None else self._chosen.at

    @property
    def epoch(self) -> int | None:
        """The epoch that the output had named when it showed that step."""
        return None if self._chosen is None else self._chosen.epoch

    @property
    def total(self) -> int | None:
        """The last step to be made, where its lines say so."""
        one = self._chosen
        if one is None or one.form.of_epoch is not None:
            return None
        of_its_epoch = one.form.bar and one.epoch is not None and one.total not in self._announced
        return None if of_its_epoch else one.total

    @property
    def format(self) -> str:
        return "" if self._chosen is None else self._chosen.form.name

    def feed(self, data: bytes, now: float = 0.0) -> None:
        """Read whole lines. ``now``: the time at which they were there."""
        self._now = now
        for line in lines(data):
            self.seen += 1
            self._read(line)
        if self._chosen is None or not self._chosen.sure:
            self._chosen = None
        better = min(
            (one for one in self._series.values() if one.sure),
            key=lambda one: (one.form.rank, -one.grown),
            default=None,
        )
        if better is not None and (self._chosen is None or better.form.rank < self._chosen.form.rank):
            self._chosen = better

    def _read(self, line: str) -> None:
        if _SLURM.match(line):
            return
        label = _LABEL.match(line)
        text = line[label.end() :] if label is not None else line
        if (found := _EPOCH.match(text)) is not None:
            self._epoch = int(found[1])
        if (found := _ANNOUNCED.search(text)) is not None and len(self._announced) < 16:
            self._announced.add(_whole(found[1]))
        if (found := _NAMED.search(text)) is not None:
            self._named = int(found[1])
        fits = next(_fits(text.strip()), None)
        if fits is None:
            if LOSS.search(text) is not None and _TRAINS.search(text) is not None:
                for one in self._series.values():
                    one.loss_seen = one.loss_seen or (one.form.bar and one.grown > 1)
            return
        form, match = fits
        value, total = _whole(match["step"]), _whole(match["total"]) if "total" in match.groupdict() else None
        if form.of_epoch is not None:
            epoch = int(match["epoch"]) if "epoch" in match.groupdict() else self._epoch  # (of N epochs the first is 1)
            if epoch is None or epoch < form.of_epoch or total is None or value > total:
                return
            value += (epoch - form.of_epoch) * total
        self._add(form, label[0] if label is not None else "", text, value, total)

    def _add(self, form: Format, label: str, text: str, value: int, total: int | None) -> None:
        key = (form.name, label, str(total or ""), "" if total is not None else _shape(text))
        one = self._series.pop(key, None)
        if one is None:
            own = _NAMED.search(text)
            later = own is not None and int(own[1]) > 1
            one = _Series(form, total, value, value, epoch=self._named, at=self._now, later=later)
        elif one.add(value):
            for other in self._series.values():
                other.within += 1
        one.trains = one.trains or total in self._announced or (form.bar and _TRAINS.search(text) is not None)
        self._series[key] = one  # the newest last
        while len(self._series) > _MOST:
            gone = next(other for other in self._series if self._series[other] is not self._chosen)
            del self._series[gone]


def _fits(text: str) -> Iterator[tuple[Format, re.Match[str]]]:
    for form in FORMATS:
        match = form.pattern.search(text)
        if match is None:
            continue
        before = text[: match.start("step")]
        if "label" in match.groupdict():  # only one that names its loss trains
            if _TRAINS.search(text) is None:
                continue
            before = _METRIC.sub("", match["label"])
        if _OTHER.search(before) is None:
            yield form, match


def _shape(text: str) -> str:
    """Return the line without what changes in it from step to step."""
    return _BAR.sub(" ", _NUMBERS.sub("0", text[:LINE]))[:_SHAPE]


def _whole(text: str) -> int:
    return int(text.replace(",", ""))
