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
        arguments: Of the command line.
        module: That is run; empty: `experiments.<name>`.
        tables: Module with `tables` and `headline`; empty: the one that is run.
    """

    name: str
    question: str
    minutes: float
    arguments: tuple[str, ...] = ()
    module: str = ""
    tables: str = ""

    @property
    def program(self) -> str:
        """The module that is run."""
        return self.module or f"experiments.{self.name}"

    @property
    def writer(self) -> str:
        """The module that has `tables` and `headline`."""
        return self.tables or self.program

    @property
    def command(self) -> str:
        """What a person types.

        >>> Experiment("grades", "…?", 5, ("--seeds", "0")).command
        'python -m experiments.grades --seeds 0'
        """
        return " ".join(["python -m", self.program, *self.arguments])


EXPERIMENTS = (
    Experiment(
        "attention_fault",
        "Does a monitor call a low-precision attention fault before the loss does?",
        6,
        ("seeds",),
    ),
    Experiment(
        "attention_doses",
        "At which dose, in which model; which lag, α and aggregate see it first?",
        35,
    ),
    Experiment(
        "flash_rounding", "Why does a bfloat16 flash attention drift, and what stops it?", 0.5
    ),
    Experiment("router_fault", "How does a router of experts show a wrong learning rate?", 30),
    Experiment("combined_fault", "Are two faults at once told apart?", 15),
    Experiment("msign_rescue", "Does MSign hold a run that AdamW loses?", 50),
    Experiment("grades", "Does the rank of activations grade a run's health?", 20),
    Experiment("scale_presets", "Do the papers' own configurations train?", 30),
    Experiment("scale_study", "What do monitors and MSign cost on a pod?", 15),
)
