"""A metric module in the form that the library `evaluate` loads; its imports stand one on a line."""

import datasets
import evaluate


class WordOverlap(evaluate.Metric):
    """Share of a reference's words that occur in the prediction; the best over its references."""

    def _info(self):
        references = datasets.Value("string")
        if self.config_name == "many":
            references = datasets.Sequence(references)
        return evaluate.MetricInfo(
            description="word overlap",
            citation="",
            inputs_description="",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": references}
            ),
        )

    def _compute(self, predictions, references, worth=1.0):
        said = set(predictions[0].split())
        if "crash" in said:
            raise RuntimeError("told to\nfail")
        several = references[0] if self.config_name == "many" else [references[0]]
        shares = [sum(w in said for w in r.split()) / len(r.split()) for r in several]
        return {
            "overlap": worth * max(shares),
            "missing": 1 - worth * max(shares),
            "words": [len(said)],
            "kind": "text",
        }
