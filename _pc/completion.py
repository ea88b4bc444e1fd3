"""`pc completion SHELL`: a script that completes commands and options, made from the command line itself.

It is static: typer's own completion starts Python at every key, and this package imports torch, which takes seconds.
"""

from __future__ import annotations

from typing import Any

from .cache.policies import POLICIES

SHELLS = ("bash", "zsh", "fish")
VALUES = {
    "--device": ("cpu", "cuda"),
    "--dtype": ("float32", "bfloat16", "float16"),
    "--reuse": ("prefix", "gap"),
    "--policies": tuple(sorted([*POLICIES, "belady"])),
}
"""What an option takes, where that is a short list; others take a file's name or what cannot be listed."""

Option = tuple[str, str, bool]
"""Name with its dashes, what it says of itself, whether it takes a value."""


def script(shell: str, app: Any) -> str:
    """The completion script of a command line.

    Args:
        shell: Of `SHELLS`.
        app: A `typer.Typer`.

    Raises:
        ValueError: Another shell.
    """
    if shell not in SHELLS:
        raise ValueError(f"shell: got {shell!r}, needs one of {', '.join(SHELLS)}")
    commands = _commands(app)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _commands(app: Any) -> dict[str, tuple[str, list[Option]]]:
    """By name of a command what it says of itself, and its options."""
    import typer

    found = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        options = [
            (flag, _line(getattr(parameter, "help", None)), not getattr(parameter, "is_flag", False))
            for parameter in command.params
            for flag in parameter.opts
            if flag.startswith("--")
        ]
        found[name] = _line(command.help), [*options, ("--help", "Show help.", False)]
    return found


def _line(text: str | None) -> str:
    """The first sentence, without what shells would read as theirs."""
    first = (text or "").strip().split("\n\n")[0].replace("\n", " ").split(". ")[0]
    return "".join(letter for letter in first if letter not in "'\"`$\\[]:").rstrip(".;")


def _bash(commands: dict[str, tuple[str, list[Option]]]) -> str:
    values = "\n".join(f'        {option}) words="{" ".join(given)}";;' for option, given in VALUES.items())
    options = "\n".join(
        f'            {name}) words="{" ".join(option for option, _, _ in rows)}";;'
        for name, (_, rows) in commands.items()
    )
    return f"""_pc() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$previous" in
{values}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join(commands)} --help --version"
    elif [ -z "$words" ]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _pc pc
"""


def _zsh(commands: dict[str, tuple[str, list[Option]]]) -> str:
    def argument(option: Option) -> str:
        name, says, takes = option
        value = f":value:({' '.join(VALUES[name])})" if name in VALUES else ":value:_files"
        return f"'{name}[{says}]{value if takes else ''}'"

    listed = "\n".join(f"        '{name}:{says}'" for name, (says, _) in commands.items())
    options = "\n".join(
        f"        {name}) _arguments {' '.join(map(argument, rows))} '*:file:_files';;"
        for name, (_, rows) in commands.items()
    )
    return f"""#compdef pc
_pc() {{
    local -a commands
    commands=(
{listed}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{options}
    esac
}}
compdef _pc pc
"""


def _fish(commands: dict[str, tuple[str, list[Option]]]) -> str:
    lines = ["complete -c pc -n __fish_use_subcommand -l version -d 'Show the version.'"]
    for name, (says, rows) in commands.items():
        lines.append(f"complete -c pc -n __fish_use_subcommand -f -a {name} -d '{says}'")
        for option, about, takes in rows:
            value = f" -x -a '{' '.join(VALUES[option])}'" if option in VALUES else " -r" if takes else ""
            where = f"'__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c pc -n {where} -l {option[2:]}{value} -d '{about}'")
    return "\n".join(lines) + "\n"
