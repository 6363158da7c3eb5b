"""What certify measures of engines: of two that are right, and of them and two trainers with faults that a seed plants.

MEANDER_FAULTS is the seed; python tests/planted.py SEED tells what is planted and what is said of it.
"""

import json
import os
import pathlib
import random
import re

import planted
import pytest

from meander import certify
from meander.certify.__main__ import main

SEED = os.environ.get("MEANDER_FAULTS", "1")
DRAWN = random.Random(SEED)
ALONE = [(s, planted.plant(s, [n], DRAWN)) for s, of in planted.FAULTS.items() for n in DRAWN.sample(range(len(of)), 3)]
TOGETHER = [(s, planted.draws(s, 3, DRAWN)) for s in planted.FAULTS for _ in range(2)]


@pytest.mark.parametrize("subject", planted.SUBJECTS)
def test_what_is_right_differs_in_nothing(subject):
    found = planted.judged(subject)
    assert [f for f in found if f.state not in ("agrees", "measured")] == []
    assert len(found) > 1


@pytest.mark.parametrize("subject, made", ALONE + TOGETHER)
def test_what_a_seed_plants_is_named(subject, made):
    missed, found = planted.named(subject, *made)
    assert not missed, found


def test_no_fault_has_its_name_in_certify():
    sources = "".join(p.read_text() for p in pathlib.Path(certify.__file__).parent.glob("*.py"))
    names = {name for faults in planted.FAULTS.values() for name, *_ in faults}
    assert len(names) > 60 and not [n for n in names if re.search(rf"\b{re.escape(n)}\b", sources)]


def test_command(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import numpy as np\n" + planted.PAINTS.replace(" expected", " elsewhere"))
    assert main(["engine", f"{tmp_path}/mine.py:Paints", "--format", "json"]) == 0
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert {x["about"] for x in lines} == {"images"}
    assert {"log-probs", "guidance", "noise is of", "after restart"} <= {x["aspect"] for x in lines}
    (tmp_path / "mine.py").write_text("class Nothing: pass")
    assert main(["engine", f"{tmp_path}/mine.py:Nothing"]) == 2
    assert "has neither images(prompts, seeds) nor texts" in capsys.readouterr().err
