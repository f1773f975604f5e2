"""``ftsupervise config``: check the settings, print them with their origins, print their JSON Schema."""

from __future__ import annotations

from pathlib import Path

import click

PATH = click.argument("path", type=click.Path(path_type=Path), default=Path("ftsupervise.yaml"), required=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def config() -> None:
    """Check the settings, print them with their origins, print their JSON Schema.

    \b
    A setting is taken from the first of these that has it:
      ftsupervise.yaml                            the run's own
      $XDG_CONFIG_HOME/ftsupervise/config.yaml    yours: alerts, watch, guard, launch.account, launch.partition
      /etc/ftsupervise/config.yaml                the site's: the same ($FTSUPERVISE_SITE_CONFIG names another file)
      the default                                 ftsupervise config schema
    """


@config.command(short_help="Is the file right?")
@PATH
def check(path: Path) -> None:
    """Is the file right? All that is wrong with it is said at once, a line each; exit code 78.

    \b
    ftsupervise config check
    ftsupervise config check runs/train-10b.yaml
    """
    from ftsupervise.config.load import load

    run = load(_existing(path))
    click.echo(f"{path}: fine. Run {run.name}, in {run.run_dir}")


@config.command(short_help="Every setting as it will be used.")
@PATH
@click.option("--origin", is_flag=True, help="Say where each setting comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show(path: Path, origin: bool, as_json: bool) -> None:
    """Print every setting as it will be used, defaults included. No secret is ever in it.

    \b
    ftsupervise config show
    ftsupervise config show --origin | grep launch.time
    """
    import json

    from ftsupervise.config.load import load, origins
    from ftsupervise.config.show import lines, shown, shown_yaml

    run = load(_existing(path))
    where = origins(path) if origin else {}
    if as_json:
        whole = {"schema_version": 1, "config": shown(run), **({"origins": where} if origin else {})}
        click.echo(json.dumps(whole, ensure_ascii=False, indent=2))
    elif origin:
        for line in lines(run, where):
            click.echo(line)
    else:
        click.echo(shown_yaml(run), nl=False)


@config.command(short_help="The JSON Schema, for editors.")
def schema() -> None:
    """Print the JSON Schema of ftsupervise.yaml, for editors.

    \b
    ftsupervise config schema > ftsupervise.schema.json
    # first line of ftsupervise.yaml: yaml-language-server: $schema=./ftsupervise.schema.json
    """
    import json

    from ftsupervise.config.json_schema import json_schema

    click.echo(json.dumps(json_schema(), ensure_ascii=False, indent=2))


def _existing(path: Path) -> Path:
    """``path``, or the settings in it if it is a directory that has some: a project's, or a run's as launched."""
    for inside in (path / "ftsupervise.yaml", path / "run.yaml"):
        if inside.is_file():
            return inside
    return path
