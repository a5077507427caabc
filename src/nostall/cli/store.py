"""``nostall store ls | show | rm | verify | export | import``: what was found, kept and carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.console import Format, FormatOption, out, show_json, show_table
from nostall.store import BadStore, Row, Store, bundle
from nostall.tuning.store_records import import_bundle, refusal

app = typer.Typer(
    help="Optimised cubins that were kept: list, look at, remove, take elsewhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

RecordArgument = Annotated[
    str, typer.Argument(help="The start of a record's name, or of its original's sha256.")
]


@app.command("ls")
def ls(format: FormatOption = Format.TABLE) -> None:
    """List all records, oldest first."""
    _show(Store().rows(), format, "records")


@app.command("show")
def show(record: RecordArgument, format: FormatOption = Format.TABLE) -> None:
    """Everything known about one record, and where its files are."""
    store = Store()
    row = _one(store, record)
    facts = {
        "record": row.id,
        "source": row.source,
        **store.provenance(row).model_dump(mode="json"),
        "original_path": str(store.artefacts.path(row.original, "cubin")),
        "optimised_path": str(store.artefacts.path(row.optimised, "cubin")),
    }
    if format is Format.JSON:
        show_json(facts)
        return
    rows = [(key, _text(value)) for key, value in facts.items() if value not in (None, {}, [])]
    show_table(f"{row.kernel}: {_gain(row)}", ("fact", "value"), rows)


@app.command("rm")
def rm(
    records: Annotated[list[str], typer.Argument(help="Starts of records' names.")],
    format: FormatOption = Format.TABLE,
) -> None:
    """Remove records, and the files that no other record needs."""
    store = Store()
    rows = [_one(store, record) for record in records]
    for row in rows:
        store.remove(row)
    _show(rows, format, "removed")


@app.command("export")
def export(
    path: Annotated[Path, typer.Argument(help="The bundle to write.")],
    records: Annotated[
        list[str] | None, typer.Argument(help="Starts of records' names; all when not given.")
    ] = None,
    modelled: Annotated[
        bool, typer.Option("--modelled", help="Also records whose gain is only modelled.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Write a deployment bundle: one file that another machine with the same GPU imports."""
    store = Store()
    if records:
        rows = [row for record in records for row in store.find(record)]
    else:
        rows = [row for row in store.rows() if modelled or row.kind == "measured"]
    rows = list(dict.fromkeys(rows))
    bundle.write(store, rows, path)
    _show(rows, format, f"exported to {path}")


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="A bundle made by `nostall store export`.")],
    format: FormatOption = Format.TABLE,
) -> None:
    """Take over a bundle: every hash is checked and every kernel verified again, or nothing is."""
    _show(import_bundle(Store(), path), format, "imported and verified")


@app.command("verify")
def verify(
    records: Annotated[
        list[str] | None, typer.Argument(help="Starts of records' names; all when not given.")
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take those away that are refused.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Judge records by this version's verifier; after an upgrade it may know better.

    Exit code 0: all are safe; 1: some are refused.
    """
    store = Store()
    rows = [_one(store, record) for record in records] if records else store.rows()
    judged = [(row, refusal(store, row)) for row in rows]
    refused = [row for row, reason in judged if reason is not None]
    for row in refused if remove else ():
        store.remove(row)
    if format is Format.JSON:
        show_json([{"record": row.id, "safe": why is None, "reason": why} for row, why in judged])
    else:
        show_table(
            f"{len(rows)} records, {len(refused)} refused{' and removed' if remove else ''}",
            ("record", "kernel", "verifier"),
            [(row.id[:12], row.kernel, why or "safe") for row, why in judged],
        )
    if refused:
        raise typer.Exit(1)


def _one(store: Store, record: str) -> Row:
    rows = store.find(record)
    if len(rows) > 1:
        names = ", ".join(row.id[:12] for row in rows[:5])
        raise BadStore(f"{record!r} fits {len(rows)} records; give one of: {names}")
    return rows[0]


def _show(rows: Sequence[Row], format: Format, what: str) -> None:
    if format is Format.JSON:
        show_json([{"record": row.id, **_plain(row)} for row in rows])
        return
    if not rows:
        out.print("no records; `nostall tune --objective gpu` makes one when it finds a gain")
        return
    show_table(
        f"{len(rows)} {what}",
        ("record", "kernel", "gain", "GPU", "arch", "original", "source", "created"),
        [
            (
                row.id[:12],
                row.kernel,
                _gain(row),
                row.gpu or "-",
                row.architecture,
                row.original[:12],
                row.source,
                row.created,
            )
            for row in rows
        ],
    )


def _plain(row: Row) -> dict[str, object]:
    return {key: value for key, value in asdict(row).items() if key != "id"}


def _gain(row: Row) -> str:
    return f"{row.kind} {row.ratio:.4f}x"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return str(value)
