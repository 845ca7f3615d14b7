"""How many schemas of the public JSON Schema test suite outputs can be held to, and whether one is held to wrongly.

    python ci/bench/schemas.py SUITE/tests/draft2020-12 MODEL

SUITE is a checkout of json-schema-org/JSON-Schema-Test-Suite (its `tests` are in jsonschema's source archive, too).
A schema is *kept to* if a grammar is made of it and none of its invalid examples passes, *ignored* if one does,
*refused* if no grammar is made. Valid examples that do not pass only narrow the output. Exits with 1 if one is ignored.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from anycore.errors import BadRequest
from anycore.models.source import locate
from anycore.models.spec import read_spec
from anycore.text import grammar


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("model")
    options = parser.parse_args()
    source = locate(options.model)
    tokens = grammar.vocabulary_of(source, read_spec(source))
    found: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    began = time.perf_counter()
    for path in sorted(options.suite.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            try:
                form = grammar.json_schema(group["schema"])
            except BadRequest as error:
                found["refused"] += 1
                refusals[error.message.partition(": ")[2][:60]] += 1
                continue
            verdicts = [(passes(tokens, form, test["data"]), test["valid"]) for test in group["tests"]]
            ignored = any(passed and not valid for passed, valid in verdicts)
            found["ignored" if ignored else "kept to"] += 1
            found["valid examples left out"] += sum(valid and not passed for passed, valid in verdicts)
            if ignored:
                print("ignored:", path.name, group["description"])
    print(dict(found), f"{time.perf_counter() - began:.1f} s")
    for reason, count in refusals.most_common(25):
        print(f"{count:4} {reason}")
    return int(found["ignored"] > 0)


def passes(tokens: LLTokenizer, form: str, value: Any) -> bool:
    matcher = LLMatcher(tokens, form, log_level=0)
    ids = tokens.tokenize_str(json.dumps(value, separators=(",", ":")))
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


if __name__ == "__main__":
    raise SystemExit(main())
