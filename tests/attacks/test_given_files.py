"""Files that people copy from strangers: what they make grow without end is refused, within seconds and in words."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.cli.settings import settings_of
from flywheel.config.file import load
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import load_chain
from flywheel.judge.labels import read_labels
from flywheel.judge.rubric.file import read_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.system import files
from flywheel.system.files import read_given
from flywheel.system.yaml_file import YamlDocument, read_yaml
from tests.cases import for_each

NINE = 9
LETTERS = "abcdefghij"


def bomb(link: Callable[[str], str], first: str) -> str:
    """Each key has what the one before it has, nine times."""
    pairs = itertools.pairwise(LETTERS)
    return f"a: &a {first}\n" + "".join(
        f"{name}: &{name} {link(','.join([f'*{of}'] * NINE))}\n" for of, name in pairs
    )


GROWING = {
    "aliases": (bomb(lambda all_: f"[{all_}]", "[x, x]"), "more than 100,000 values, those of aliases"),
    "merges": (bomb(lambda all_: f"{{<<: [{all_}]}}", "{x: 1}"), "more than 100,000 values, those of aliases"),
    "values": ("- a\n" * 100_001, "more than 100,000 values"),
    "lists": ("[" * 5000 + "]" * 5000, "nested deeper than 64 levels"),
    "levels by aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 80)),
        "nested deeper than 64 levels",
    ),
    "an alias of itself": ("a: &a [*a]", "nested deeper than 64 levels"),
    "a merge of itself": ("a: &a {<<: *a}", "nested deeper than 64 levels"),
    "a number in base 60": (f"judge: {{max_thread: {':'.join(['1'] * 20_000)}}}", "a number has more than 100"),
    "a fraction in base 60": (f"judge: {{temperature: {':'.join(['1'] * 2000)}.5}}", "a number has more than 100"),
    "a number in base 16": (f"judge: {{max_thread: 0x{'f' * 10_000}}}", "a number has more than 100"),
    "an empty number": ('judge: {max_thread: !!int ""}', "line 1, column 21: it cannot be read as int"),
    "a word as a truth value": ("judge: {allow_self: !!bool x}", "it cannot be read as bool"),
    "a word as a time": ("retention: {keep_days: !!timestamp x}", "it cannot be read as timestamp"),
    "sources": ("sources:\n" + "- {path: /x.sqlite}\n" * 10_000, "`sources`: it must have 256 or fewer items"),
    "targets": (
        "targets:\n" + "".join(f"  t{number}: {{}}\n" for number in range(1000)),
        "`targets`: it must have 64 or fewer items",
    ),
    "size": ("#" * (4 << 20) + "\n", "it is larger than 4 MB"),
}


@pytest.mark.slow
@for_each("name", list(GROWING))
def test_a_configuration_that_grows_is_refused(name: str, tmp_path: Path) -> None:
    text, why = GROWING[name]
    (tmp_path / "flywheel.yaml").write_text(text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "flywheel.yaml")
    assert why in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KB


def test_what_people_write_is_within_the_limits() -> None:
    text = "base: &base {a: 1, b: 0x1F}\nmine: {<<: *base, a: 2}\nat: 12:30:00\nlist: " + "[" * 60 + "1" + "]" * 60
    value = YamlDocument(text).value
    assert value["mine"] == {"a": 2, "b": 31}
    assert value["at"] == 45_000


def test_many_problems_are_named_up_to_a_number(tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text(
        "sources: [" + "1, " * 200 + "]\n" + "".join(f"k{n}: 1\n" for n in range(90))
    )
    with pytest.raises(ConfigError, match=r"sources\.49.*; and 240 more\."):
        load(tmp_path / "flywheel.yaml")


def agentjets(path: str, more: str) -> str:
    tracing = "task_reader: {type: tracing, feedback_tracing: {base_url: x.db}}"
    return f"ajet: {{model: {{path: '{path}'}}, {tracing}}}\n{more}"


def chained(length: int) -> str:
    """Interpolations each of which names the one after it."""
    return "".join(f"b{number}: '${{b{number + 1}}}'\n" for number in range(length)) + f"b{length}: a-model\n"


doubled = (
    "".join(f"b{number}: '${{b{number + 1}}}${{b{number + 1}}}'\n" for number in range(29, -1, -1)) + "b30: xxxx\n"
)
INTERPOLATED = {
    "nested": ("${oc.env:A," * 300 + "x" + "}" * 300, "", "nested deeper than 8 levels"),
    "lists inside": ("${oc.create:" + "[" * 1500 + "]" * 1500 + "}", "", "it cannot be resolved: maximum recursion"),
    "doubled": ("${b0}", doubled, "it becomes longer than 10000 characters"),
    "sections": (
        "x",
        "s: {" + ", ".join(f"k{n}: {n}" for n in range(5000)) + "}\nt: '${s}'\n",
        "`t`: it becomes longer than 10000 characters",
    ),
    "many": ("x", "all: [" + "'${ajet.model.path}', " * 501 + "]\n", "more than 500 interpolations"),
    "each other": ("x", "b: '${c}'\nc: '${b}'\n", "`b`: it leads back to itself"),
    "itself": ("x", "b: {c: '${b}'}\n", "`b.c`: it cannot be resolved"),
    "a long chain": ("${b0}", chained(8), "it leads back to itself, or to more than 8 others"),
}


@pytest.mark.slow
@for_each("name", list(INTERPOLATED))
def test_interpolations_that_grow_are_refused(name: str, tmp_path: Path) -> None:
    path, more, why = INTERPOLATED[name]
    (tmp_path / "ajet.yaml").write_text(agentjets(path, more))
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "ajet.yaml")
    assert why in str(refused.value)


def test_interpolations_that_follow_from_each_other_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "ajet.yaml").write_text(agentjets(r"${b0}/\${b1}", chained(6) + "long: " + "x" * 20_000))
    assert load(tmp_path / "ajet.yaml").model.base == "a-model/${b1}"


COSTLY = "((a{1000}){1000}){1000}"


@pytest.mark.slow
def test_a_pattern_that_fills_the_memory_is_a_problem_of_its_rubric(tmp_path: Path) -> None:
    rubric, chain = tmp_path / "rubric.yaml", tmp_path / "chain.yaml"
    rubric.write_text(
        f"id: r\ncriteria:\n- {{id: a, type: regex, value: '{COSTLY}'}}\n- {{id: b, value: x, wait: 1}}\n"
    )
    first, second = read_rubric(rubric).problems
    assert (first.line, second.line) == (3, 4)
    assert "compiling it takes more than 1 s of processor time or 32 MB of memory" in first.message

    chain.write_text(f"id: c\nfilters: [{{type: rules, params: {{exclude: ['{COSTLY}']}}}}]\n")
    with pytest.raises(ConfigError, match="compiling it takes more than 1 s"):
        load_chain(chain)


def test_a_pattern_that_repeats_a_number_of_times_is_taken_and_a_wrong_one_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rubric.yaml"
    path.write_text("id: r\ncriteria:\n- {id: a, type: regex, value: '(\\d{4}-){2,3}'}\n")
    assert read_rubric(path).rubric is not None
    path.write_text("id: r\ncriteria:\n- {id: a, type: regex, value: 'a{3}(b'}\n")
    [problem] = read_rubric(path).problems
    assert (problem.line, problem.column) == (3, 36)


@pytest.mark.slow
@for_each("key", ["criteria", "examples"])
def test_a_rubric_has_a_greatest_length(key: str, tmp_path: Path) -> None:
    path = tmp_path / "rubric.yaml"
    entry = (
        f"{{id: a, type: regex, value: '{COSTLY}', unknown: 1}}" if key == "criteria" else "{query: q, unknown: 1}"
    )
    path.write_text(f"id: r\n{key}:\n" + f"- {entry}\n" * 1001)
    problems = [problem.message for problem in read_rubric(path).problems]
    limit = Rubric.model_json_schema()["properties"][key]["maxItems"]
    assert f"`{key}`: it must have {limit} or fewer items" in problems


def read_configuration(path: Path) -> Any:
    return [*settings_of(load(path))]


def read_rubric_or_raise(path: Path) -> Any:
    found = read_rubric(path)
    if found.rubric is None:
        raise ConfigError("read it", str(found.problems), "")
    return found


READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "configuration": (read_configuration, "state: {dir: /nowhere}\n"),
    "rubric": (read_rubric_or_raise, "id: r\ncriteria: [{id: a, value: x}]\n"),
    "chain": (load_chain, "id: c\nfilters: []\n"),
    "yaml": (lambda path: read_yaml(path, "read it", "Name one."), "a: 1\n"),
    "labels": (read_labels, '{"query": "q", "answer": "a", "verdict": "accept"}\n'),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_without_an_end_is_refused_and_so_is_a_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, _ = READERS[name]
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.05)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="it is a pipe, and nobody wrote it to its end"):
        read(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="it is neither a file nor a pipe"):
        read(tmp_path / "device")
    writer = os.open(tmp_path / "fifo", os.O_RDWR)
    os.write(writer, b"id: ")
    with pytest.raises(ConfigError, match="nobody wrote it to its end"):
        read(tmp_path / "fifo")
    os.close(writer)


@pytest.mark.parametrize("name", READERS)
def test_a_file_behind_links_and_a_pipe_that_ends_are_read(name: str, tmp_path: Path) -> None:
    read, text = READERS[name]
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "file.yaml").write_text(text)
    (tmp_path / "file.yaml").symlink_to("..data/file.yaml")  # as Kubernetes mounts a ConfigMap
    read(tmp_path / "file.yaml")

    readable, writable = os.pipe()
    thread = threading.Thread(target=lambda: (os.write(writable, text.encode()), os.close(writable)))
    thread.start()
    read(Path(f"/dev/fd/{readable}"))  # `-c <(…)`, which a command reads several times
    thread.join()
    os.close(readable)


def test_a_pipe_is_read_up_to_the_greatest_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    thread = threading.Thread(target=_write_without_end, args=(tmp_path / "fifo",))
    thread.start()
    with pytest.raises(OSError, match="larger than 1 MB"):
        read_given(tmp_path / "fifo", 1 << 20)
    thread.join()


def _write_without_end(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(BrokenPipeError):
        while True:
            file.write(b"x" * 65_536)


def test_files_that_a_rubric_names_are_read_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    path = tmp_path / "rubric.yaml"
    criteria = [{"id": name, "type": "json-schema", "value": f"{name}.json"} for name in ("endless", "deep")]
    path.write_text(yaml.safe_dump({"id": "r", "criteria": criteria}))
    endless, deep = (problem.message for problem in read_rubric(path).problems)
    assert "neither a file nor a pipe" in endless
    assert "cannot be used: maximum recursion depth" in deep
