"""[tool.kernelproof] of a pyproject.toml: defaults of options, behind the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from kernelproof.ci.cli import cli, main
from kernelproof.impl.targets.unpacked import FROM

if TYPE_CHECKING:
    from kernelproof.ci.check.checking import Request

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Work in a folder below the one of a pyproject.toml, and return what writes that."""
    (tmp_path / "kernels").mkdir()
    monkeypatch.chdir(tmp_path / "kernels")

    def file(text: str) -> None:
        (tmp_path / "pyproject.toml").write_text(text)

    return file


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Request]:
    """Return the request that a command makes."""
    made: list[Request] = []

    def examine(request: Request) -> int:
        made.append(request)
        return 0

    monkeypatch.setattr("kernelproof.ci.check.checking.examine", examine)

    def check(*words: str) -> Request:
        assert main(["check", "mine.py:mine", *words]) == 0
        return made[-1]

    return check


def test_a_file_gives_defaults(write: Write, checked: Callable[..., Request]) -> None:
    write("""
        [tool.kernelproof]
        profile = "quick"
        law = ["parity", "soak"]
        jobs = 2
        sm = "90"  # of other commands
        minutes = 3
        [tool.kernelproof.check]
        jobs = 3
        allow-incomplete = true
        exitfirst = true
        [tool.kernelproof.gate]
        seed = 7
    """)
    made = checked()
    assert (made.profile, made.laws, made.jobs, made.seed) == ("quick", ("parity", "soak"), 3, 0)
    assert (made.minutes, made.allow_incomplete, made.exit_first) == (3.0, True, True)
    words = "--profile quick --law parity --law soak --jobs 3 --minutes 3 --allow-incomplete"
    assert made.command == f"kernelproof check mine.py:mine {words} --exitfirst"


def test_the_command_line_beats_the_environment_and_that_the_file(
    write: Write, checked: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("""
        [tool.kernelproof]
        law = ["soak"]
        annotations = false
        examples = "shared"
        from = ["engine"]
    """)
    monkeypatch.setenv(FROM, "another")
    monkeypatch.setenv("KERNELPROOF_EXAMPLES", "elsewhere")
    made = checked("--law", "parity")
    assert (made.laws, made.annotations, made.examples) == (("parity",), False, None)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert checked().annotations
    assert not checked("--no-annotations").annotations


def test_paths_are_relative_to_the_file(write: Write, checked: Callable[..., Request]) -> None:
    write("""
        [tool.kernelproof]
        json = "out/report.json"
        cases = "/tmp/cases"
        expectations = "known.toml"
    """)
    made = checked()
    assert made.outputs.paths == {"--json": Path("../out/report.json")}
    assert (made.cases, made.expectations) == (Path("/tmp/cases"), "../known.toml")  # noqa: S108
    write('tool.kernelproof.expectations = "none"')
    assert checked().expectations == "none"


def test_the_nearest_file_counts(write: Write, checked: Callable[..., Request]) -> None:
    write("[tool.kernelproof]\nseed = 7")
    assert checked().seed == 7
    Path("pyproject.toml").write_text("[project]\n")
    assert checked().seed == 0


def test_an_option_is_that_of_each_command_which_takes_such_a_value(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write('[tool.kernelproof]\njson = "report.json"')  # a flag of this command
    assert main(["list"]) == 0
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(capsys.readouterr().out)
    write("[tool.kernelproof.list]\njson = true")
    assert main(["list"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "kernelproof/list/1"


WRONG = {
    'profil = "quick"': "profil: there is no such option or command; did you mean profile?",
    "[tool.kernelproof.chek]": "chek: there is no such option or command; did you mean check?",
    "[tool.kernelproof.check]\npart = ['surface']": "check] part: there is no such option",
    "[tool.kernelproof.corpus.ad]": "corpus] ad: there is no such option or command",
    "check = 3": "check: must be a table",
    "watch = true": "watch: --watch is for the command line only",
    'seed = "3"': "seed: must be a whole number",
    "seed = true": "seed: must be a whole number",
    'minutes = "3"': "minutes: must be a number",
    'law = "parity"': "law: must be a list",
    "law = [3]": "law: must be text, in quotes",
    "profile = 3": "profile: must be text, in quotes",
    "verbose = 1": "verbose: must be true or false",
    'cases = ""': "cases: --cases is empty",
    "seed = -1": "seed: Invalid value for '--seed': -1 is not in the range",
    "profile = 'qick'": "profile: Invalid value for '--profile': 'qick' is not one of 'quick', ",
    'law = ["parit"]': "law: --law: there is no law 'parit'; did you mean ",
    'from = ["none"]': "from: --from ../none: it must be a folder that holds a package",
    'costs = "none"': "costs: --costs ../none: ",
}
"""The error about a line of a file, from the last word of the table's name on."""


@pytest.mark.parametrize(("text", "told"), WRONG.items())
def test_what_is_wrong_is_told_by_file_table_and_key(
    text: str, told: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"[tool.kernelproof]\n{text}")
    assert main(["check", "triton-merge-state"]) == 2
    table = "[tool.kernelproof." if "] " in told else "[tool.kernelproof] "
    assert f"../pyproject.toml: {table}{told}" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["[tool.other]\nx = inf\ny = 1" + "0" * 30, "tool = 3", "x = 1"])
def test_what_other_tools_have_there_is_nobodys_concern(
    other: str, write: Write, checked: Callable[..., Request]
) -> None:
    write(other)
    assert checked().seed == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tool.kernelproof", "../pyproject.toml: not TOML ("),
        ("[tool]\nkernelproof = 3", "../pyproject.toml: [tool] kernelproof: must be a table"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    text: str, told: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(text)
    assert main(["list"]) == 2
    assert told in capsys.readouterr().err
    assert main(["--version"]) == 0


def test_what_the_command_line_says_is_not_called_the_files(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write('[tool.kernelproof]\nprofile = "quick"')
    assert main(["check", "triton-merge-state", "--profile=qick"]) == 2
    assert "pyproject.toml" not in capsys.readouterr().err


def test_rules_are_tried_by_a_file_as_by_the_command_line(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("[tool.kernelproof.check]\ngating = true")
    assert main(["check", "triton-merge-state", "--law", "parity"]) == 2
    assert "--law does not go with --gating" in capsys.readouterr().err


def test_options_of_other_commands_are_no_names_of_commands() -> None:
    """Whether a name is a table or an option follows from what the file has there."""
    flags = {flag for each in cli.commands.values() for one in each.params for flag in one.opts}
    both = {name for name in cli.commands if f"--{name}" in flags}
    assert both == {"corpus", "expectations", "published"}


def leaves(group: click.Group = cli, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *words, name)
        elif not command.hidden:
            yield (*words, name)


def value_for(option: click.Option, here: Path) -> Any:  # noqa: ANN401  any option's
    """Return a value that a file may give an option: another than its default."""
    kind: Any = option.type
    if option.is_flag:
        return option.default is not True
    if isinstance(kind, click.Choice):
        found: Any = kind.choices[0 if option.default == kind.choices[-1] else -1]
    elif isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        found = max(int(getattr(kind, "min", None) or 0), 1) + 1
    elif isinstance(kind, click.Path):
        found = str(here if kind.dir_okay and not kind.file_okay else here / "a_file")
    else:
        found = OF_A_KIND.get(max(option.opts, key=len), "3")
    return [found] if option.multiple else found


OF_A_KIND = {"--expectations": "none", "--cpu": "aarch64"}
"""Values of options that take only some texts."""
APART = ("--watch", "--gating")
"""Options that no file gives, and that others do not go with."""


def context_of(words: Sequence[str], more: Sequence[str], here: Path) -> click.Context:
    """Return the context of a command that is called so, which does not run."""
    context = cli.make_context("kernelproof", [*words, *more])
    name, command, rest = cli.resolve_command(context, [*words, *more])
    for word in words[1:]:
        assert isinstance(command, click.Group)
        context = command.make_context(name, rest, parent=context)
        name, command, rest = command.resolve_command(context, rest)
        assert name == word
    assert command is not None
    needed = [each for each in command.params if isinstance(each, click.Argument)]
    rest += [str(here / "a_file") for each in needed for _ in range(abs(each.nargs))]
    return command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("words", [*leaves()], ids=" ".join)
def test_every_option_may_stand_in_a_file(words: tuple[str, ...], write: Write) -> None:
    here = Path.cwd().parent
    (here / "a_file").write_text("{}")
    command: Any = cli
    for word in words:
        command = command.commands[word]
    options = [each for each in command.params if isinstance(each, click.Option)]
    flags = {max(each.opts, key=len): each for each in options if not each.hidden}
    for flag in APART:
        flags.pop(flag, None)
    values = {flag: value_for(option, here) for flag, option in flags.items()}
    lines = (f"{flag[2:]} = {json.dumps(value)}" for flag, value in values.items())
    write("\n".join([f"[tool.kernelproof.{'.'.join(words)}]", *lines]))
    by_file = context_of(words, (), here)
    write("")
    said: list[str] = []
    for flag, value in values.items():
        if flags[flag].is_flag:
            said += [flag] if value else flags[flag].secondary_opts[:1]
        else:
            said += [part for one in (value if flags[flag].multiple else [value])
                     for part in (flag, str(one))]  # fmt: skip
    assert by_file.params == context_of(words, said, here).params
    needed = [part for flag, each in flags.items() if each.required for part in (flag, "moe")]
    usual = context_of(words, needed, here).params
    for flag, each in flags.items():
        if each.name in usual and not each.required and values[flag] != each.default:
            assert by_file.params[each.name] != usual[each.name]
