"""Which experiments there are: what each asks, how it is run and how long that takes.

Running them all and writing down what came of it is `evidence.py`'s. The order is the READMEs'.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experiment:
    """One question.

    Attributes:
        name: Of its rows, `runs/<name>.jsonl`, and of its marks in `experiments/README.md`.
        question: In a few words, for a table.
        minutes: Of one core, about.
        runs: Arguments of each of its command lines, one after the other.
        module: That is run; empty: `experiments.<name>`.
    """

    name: str
    question: str
    minutes: float
    runs: tuple[tuple[str, ...], ...] = ((),)
    module: str = ""

    @property
    def program(self) -> str:
        """The module that is run."""
        return self.module or f"experiments.{self.name}"

    @property
    def command(self) -> str:
        """What a person types, as Markdown.

        >>> Experiment("campaign", "…?", 5, (("table",), ("rescue",))).command
        '`python -m experiments.campaign table`, `… rescue`'
        """
        first, *more = (" ".join(arguments) for arguments in self.runs)
        lines = [f"`{f'python -m {self.program} {first}'.strip()}`", *(f"`… {x}`" for x in more)]
        return ", ".join(lines)


EXPERIMENTS = (
    Experiment(
        "attention_fault",
        "How does a low-precision attention fault look, beside its clean run?",
        4,
        (("seeds",),),
    ),
    Experiment(
        "attention_doses",
        "Is a low-precision attention fault called before the loss; at which dose, in which model?",
        22,
    ),
    Experiment(
        "flash_rounding", "Why does a bfloat16 flash attention drift, and what stops it?", 0.5
    ),
    Experiment(
        "router_fault",
        "How does a router of experts show a wrong learning rate, batch or balance loss?",
        12,
    ),
    Experiment("combined_fault", "Are two faults at once told apart?", 6),
    Experiment(
        "msign_rescue",
        "Does MSign hold a run that AdamW loses?",
        110,
    ),
    Experiment(
        "grades",
        "Does the rank of activations grade a run, and choose its checkpoint?",
        12,
    ),
    Experiment(
        "campaign",
        "Do the alarms name what is broken, keep quiet where nothing is, and save a run?",
        30,
        (("table",), ("rescue",)),
    ),
    Experiment(
        "scale_presets",
        "Do the papers' own configurations compile and train?",
        70,
    ),
    Experiment("scale_study", "What do monitors and MSign cost on a pod?", 5),
)
