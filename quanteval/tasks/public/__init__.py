"""Public benchmarks: a function a data set, reading a local copy or the hub and yielding rows of one shape.

Nothing of the data sets is shipped. Every loader takes `path`, a file or folder in any of the layouts in which
the set is passed around, or else the hub's `hub`, `name`, `split` and `revision`. Rows have an `id`, the fields
that the suites' templates use, and `origin`: the set and its licence.
"""

from quanteval.tasks.public.choices import arc, hellaswag, openbookqa, piqa, winogrande
from quanteval.tasks.public.mmlu import mmlu
from quanteval.tasks.public.text import lambada, wikitext2
from quanteval.tasks.public.written import gsm8k, ifeval, mbpp

__all__ = [
    "arc",
    "gsm8k",
    "hellaswag",
    "ifeval",
    "lambada",
    "mbpp",
    "mmlu",
    "openbookqa",
    "piqa",
    "wikitext2",
    "winogrande",
]
