"""`python -m pc` and `pc`: the command line, which needs typer and rich (the extra `demo` or `bench`)."""

from __future__ import annotations


def main() -> None:
    """Runs the command line, or says what to install for it."""
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"python -m pc needs {error.name}: pip install typer rich matplotlib") from error
    app()


if __name__ == "__main__":
    main()
