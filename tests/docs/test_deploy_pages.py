"""The pages of docs/deploy: their commands can be typed, what they name is there, and their example adds up."""

from __future__ import annotations

import math
import re
import shlex

import pytest
import yaml
from docs.deploying import FOLDER, KINDS, VALUES, dockerfile, entry_point, leaves, needs_helm, render
from docs.pages import ROOT, blocks
from installed import anycore

from anycore.cli.main import COMMANDS, parser_of
from anycore.server.series import samples

PAGES = sorted(FOLDER.glob("*.md"))
CAPACITY = (FOLDER / "capacity.md").read_text()


def typed(*languages: str) -> list[str]:
    """Commands of the pages' blocks, continued lines joined."""
    found = [block.code for page in PAGES for block in blocks(page, *languages)]
    return re.sub(r"\\\n\s*", "", "\n".join(found)).splitlines()


def test_commands_name_files_that_are_there() -> None:
    named = set(re.findall(r"(?:docs/deploy|ci)/[\w./-]+", "\n".join(typed("bash", "sh"))))
    assert len(named) > 8
    assert not [path for path in named if not (ROOT / path).exists()]


def test_commands_of_anycore_can_be_typed() -> None:
    """Also what `docker run` passes on and what `sudo` runs."""
    seen = 0
    for line in typed("bash", "console"):
        if image := re.match(r"docker run (?!.*--entrypoint).*? anycore:(?:cpu|cuda|ascend)( .*)?$", line):
            parser_of("serve").read([*entry_point("cpu")[2:], *shlex.split(image[1] or "")])
            seen += 1
        if command := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )?(?:sudo )?(?:/\S+/bin/)?anycore ([^>]+)", line):
            words = shlex.split(command[1])
            length = 2 if " ".join(words[:2]) in COMMANDS else 1
            parser_of(" ".join(words[:length])).read(words[length:])
            seen += 1
    assert seen >= 14


def test_arguments_of_builds_are_those_of_the_dockerfiles() -> None:
    page = (FOLDER / "docker.md").read_text()
    table = page.split("| argument |")[1].split("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1] if row else "")
    }
    given = [argument for kind in KINDS for name, argument in dockerfile(kind) if name == "ARG"]
    assert named == {argument.split("=")[0] for argument in given}
    assert "| 2.9.0 |" in table
    assert {"TORCH=2.9.0", "TORCH_NPU=2.9.0"} <= set(given)


def test_values_of_the_kubernetes_page_are_the_charts() -> None:
    page = (FOLDER / "kubernetes.md").read_text()
    names = {*leaves(VALUES), *VALUES}
    dotted = set(re.findall(r"`([a-zA-Z]+\.[a-zA-Z]+)`", page)) | set(re.findall(r"[ ,]([a-z]\w+\.\w+)=", page))
    dotted -= {"cuda.yaml", "ascend.yaml", "values.yaml", "prometheus.url"}
    assert "cache.persistent" in dotted
    assert not {name for name in dotted if name not in names and name.split(".")[0] not in ("podMonitor", "env[0]")}
    scaling = VALUES["autoscaling"]
    for name, value in {**scaling, **VALUES}.items():
        for shown in re.findall(rf"`{name}` \((\d+)\)", page):
            assert int(shown) == value, name
    assert scaling["scaleDownSeconds"] == 10 * 60  # "ten minutes"
    assert f"`startupMinutes`, {VALUES['startupMinutes']}" in page


@needs_helm
def test_probes_of_the_page_are_the_charts() -> None:
    (block,) = [block.code for block in blocks(FOLDER / "kubernetes.md", "yaml")]
    (container,) = render()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for name, probe in yaml.safe_load(block).items():
        asked = container[name].pop("httpGet")
        assert probe.pop("httpGet") == {"path": asked["path"], "port": container["ports"][0]["containerPort"]}
        assert probe == container[name]


def test_the_capacity_example_adds_up() -> None:
    runs = re.findall(
        r": ([\d.]+) requests/s, no limit.*\n(\d+) of \d+ requests in ([\d.]+) s"
        r".*\n(?:.*\n)*?  within limits/s +([\d.]+)",
        CAPACITY,
    )
    assert len(runs) == 3
    rows = re.findall(r"^\| ([\d.]+)/s \| (\d+) \| (\d+) \|", CAPACITY, re.MULTILINE)
    assert [
        (float(rate), answered, round(float(within) * float(seconds))) for rate, answered, seconds, within in runs
    ] == [(float(rate), answered, int(within)) for rate, answered, within in rows]
    kept = max(float(rate) for rate, answered, within in rows if int(within) >= 0.95 * int(answered))
    formula = re.search(r"= (\d+) / \(([\d.]+) × ([\d.]+)\) = ([\d.]+) → (\d+), and one: (\d+)", CAPACITY)
    assert formula is not None
    peak, rate, share = map(float, formula.groups()[:3])
    assert rate == kept
    assert f"peak | {peak:g} |" in CAPACITY
    needed = peak / (rate * share)
    assert (f"{needed:.1f}", math.ceil(needed), math.ceil(needed) + 1) == (formula[4], int(formula[5]), int(formula[6]))
    bucket = re.search(r'le="([\d.]+)"', CAPACITY)
    assert bucket is not None
    assert float(bucket[1]) in samples()["anycore:time_to_first_token_seconds_bucket"].buckets


def test_without_a_network_the_refusal_is_as_printed() -> None:
    (block,) = blocks(FOLDER / "offline.md", "console")
    command, said = block.code.strip().split("\n")
    name, _, words = command.removeprefix("$ ").partition(" anycore ")
    done = anycore(*words.split(), env=dict([name.split("=")]))
    assert done.returncode == 2
    assert done.stderr.strip() == said


@pytest.mark.models
def test_the_plan_of_the_example_is_what_comes() -> None:
    first, *printed = next(
        b.code for b in blocks(FOLDER / "capacity.md", "console") if "anycore plan" in b.code
    ).splitlines()
    done = anycore(*shlex.split(first.removeprefix("$ anycore ")))
    assert done.returncode == 0, done.stderr
    for line in printed:
        if line.startswith(("cache:", "at once:", "share of")):
            assert line in done.stdout
