"""Makes a plan with what the compilers say; run by the compilers' interpreter.

python tests/plan_steps.py "llama-3-8b, 4 layers" h200:1 [name=value ...]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from jaxinfer.models.cards import CARDS
from jaxinfer.plan import make_plan
from jaxinfer.plan_report import to_json
from jaxinfer.plan_sizes import PlanRequest

# What is compiled of a layer is the same in all 32, and takes a compiler as long each time.
CARDS["llama-3-8b, 4 layers"] = replace(CARDS["llama-3-8b"], layers=CARDS["llama-3-8b"].layers[:4])

if __name__ == "__main__":
    model, chips, *options = sys.argv[1:]
    request = PlanRequest(model=model, chips=chips, **dict(option.split("=", 1) for option in options))
    print(json.dumps(to_json(make_plan(request))))
