"""`python -m learner.score --model DIR --input X.jsonl --output Y.jsonl`: mean log-prob per token under a model.

Each input line holds a prompt (`prompt_ids`, or `prompt` text) and a completion (`completion_ids`, or `completion`
text, which is tokenised without special tokens), and whatever else; it comes back with `mean_logprob` and `num_tokens`
(null and 0 for an empty completion). Temperature 1.
"""

import argparse
import json
import sys
from pathlib import Path

from learner.logprobs import Row


def _ids(record: dict, name: str, encode, where: str) -> list[int]:
    if f"{name}_ids" in record:
        return [int(token) for token in record[f"{name}_ids"]]
    if isinstance(record.get(name), str):
        return encode(record[name])
    raise ValueError(f"{where}: needs {name}_ids (token ids) or {name} (text)")


def score_records(model: Path, records: list[dict]) -> list[dict]:
    """Return the records with mean_logprob and num_tokens added."""
    from transformers import AutoTokenizer

    from learner.export import score_folder

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    rows = []
    for number, record in enumerate(records, 1):
        where = f"line {number}"
        prompt = _ids(record, "prompt", encode, where) or [tokenizer.eos_token_id or 0]
        rows.append(Row(prompt, _ids(record, "completion", encode, where), 1.0))
    filled = [index for index, row in enumerate(rows) if row.completion_ids]
    scored = dict(zip(filled, score_folder(model, [rows[i] for i in filled]), strict=True)) if filled else {}
    return [
        record
        | {
            "mean_logprob": sum(scored[index]) / len(scored[index]) if index in scored else None,
            "num_tokens": len(rows[index].completion_ids),
        }
        for index, record in enumerate(records)
    ]


def main(argv: list[str] | None = None) -> int:
    """Score a file; 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        records = [json.loads(line) for line in arguments.input.read_text().splitlines() if line.strip()]
        scored = score_records(arguments.model, records)
    except (OSError, ValueError) as error:
        print(f"learner.score: {error}", file=sys.stderr)
        return 2
    arguments.output.write_text("".join(json.dumps(record) + "\n" for record in scored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
