"""The commands ``nostall store``: list, show, verify, remove, repair, export, import and sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.options.help_panels import command_group
from nostall.cli.options.inputs import MeasuredLatenciesOption
from nostall.cli.terminal.console import Format, FormatOption, err, out, show_json, show_table
from nostall.core.text.plurals import pluralize
from nostall.store import BadStore, Row, Store, bundle
from nostall.store.artefacts import CUBIN, JSON, RECIPE
from nostall.store.repair import repair as repair_store

ID_LENGTH = 12
"""Characters of ids and hashes in tables."""
MAX_NAMED_MATCHES = 5

app = command_group()

RecordArgument = Annotated[
    str, typer.Argument(help="Start of a record's id, or of the sha256 of its original cubin.")
]
RecordsArgument = Annotated[list[str], typer.Argument(help="Starts of records' ids.")]
OptionalRecordsArgument = Annotated[
    list[str] | None, typer.Argument(help="Starts of records' ids; default: all records.")
]
ModelledOption = Annotated[
    bool, typer.Option("--modelled", help="Include records with a gain that is only modelled.")
]
RemoveOption = Annotated[bool, typer.Option("--remove", help="Remove unsafe records.")]


@app.command("ls")
def list_records(format: FormatOption = Format.TABLE) -> None:
    """List all records, oldest first."""
    _show_rows(Store().rows(), format, "in the store")


@app.command("show")
def show(record: RecordArgument, format: FormatOption = Format.TABLE) -> None:
    """Show all fields of a record and the paths of its files."""
    store = Store()
    row = _find_row(store, record)
    provenance = store.provenance(row)
    fields = {
        "record": row.id,
        "source": row.source,
        **provenance.model_dump(mode="json"),
        "original_path": str(store.artefacts.path(row.original, CUBIN)),
        "optimised_path": str(store.artefacts.path(row.optimised, CUBIN)),
    }
    if (recipe := provenance.recipe) is not None:
        fields["recipe_path"] = str(store.artefacts.path(recipe, RECIPE))
    if format is Format.JSON:
        show_json(fields)
        return
    rows = [(key, _text(value)) for key, value in fields.items() if value not in (None, {}, [])]
    show_table(f"{row.kernel}: {_gain(row)}", ("field", "value"), rows)


@app.command("rm")
def remove(records: RecordsArgument, format: FormatOption = Format.TABLE) -> None:
    """Remove records, and the files that no other record needs."""
    store = Store()
    rows = [_find_row(store, record) for record in records]
    for row in rows:
        store.remove(row)
    _show_rows(rows, format, "removed")


@app.command("export")
def export(
    path: Annotated[Path, typer.Argument(help="Bundle to write.")],
    records: OptionalRecordsArgument = None,
    modelled: ModelledOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Export records to a bundle for other machines with the same GPU."""
    store = Store()
    if records:
        rows = [row for record in records for row in store.find(record)]
    else:
        rows = [row for row in store.rows() if modelled or row.kind == "measured"]
        if not rows and store.rows():
            raise BadStore(
                f"the store at {store.root} has no measured record; --modelled exports the others"
            )
    rows = list(dict.fromkeys(rows))
    bundle.write(store, rows, path)
    _show_rows(rows, format, f"exported to {path}")


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="Bundle of `nostall store export`.")],
    measured_latencies: MeasuredLatenciesOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Import a bundle after checking each hash and verifying each kernel.

    If one check fails, nothing is imported. The gains are those of another machine: a record that
    was measured on this one is used before them.
    """
    from nostall.tuning.records.store_records import import_bundle

    rows = import_bundle(Store(), path, measured_latencies=measured_latencies)
    _show_rows(rows, format, "imported and verified")


@app.command("sync")
def sync(
    folder: Annotated[Path, typer.Argument(help="Folder that the machines of a team share.")],
    key: Annotated[Path, typer.Option(help="File with the team's key, which signs the records.")],
    gpu: Annotated[
        str | None, typer.Option(help="Exchange records of this GPU only, as `ls` names it.")
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Exchange measured records with other machines through a shared folder.

    This machine's own measured records are written, signed; those of others are imported after
    checking the signature, each hash and each kernel. The gains are those of another machine: a
    record that was measured on this one is used before them.

    Exit code 0: done; 1: a file was refused.
    """
    from nostall.tuning.records.store_sync import read_key
    from nostall.tuning.records.store_sync import sync as exchange_records

    exchange = exchange_records(Store(), folder, read_key(key), gpu)
    for path, reason in exchange.refused:
        err.print(f"nostall: refused: {path}: {reason}")
    if format is Format.JSON:
        show_json(
            {
                "sent": [row.id for row in exchange.sent],
                "received": [row.id for row in exchange.received],
                "refused": [{"file": str(path), "reason": why} for path, why in exchange.refused],
            }
        )
    else:
        out.print(f"{pluralize(len(exchange.sent), 'record')} sent to {folder}")
        out.print(f"{pluralize(len(exchange.received), 'record')} received and verified")
    if exchange.refused:
        raise typer.Exit(1)


@app.command("verify")
def verify(
    records: OptionalRecordsArgument = None,
    remove: RemoveOption = False,
    measured_latencies: MeasuredLatenciesOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Verify records again with the verifier of this version.

    After an upgrade of nostall, its rules may be stricter. Exit code 0: all records are safe;
    1: some are unsafe.
    """
    from nostall.tuning.records.store_records import rejection_reason

    store = Store()
    rows = [_find_row(store, record) for record in records] if records else store.rows()
    reasons = [
        (row, rejection_reason(store, row, measured_latencies=measured_latencies)) for row in rows
    ]
    if not records:
        _warn_of_unlisted(store)
    unsafe = [row for row, reason in reasons if reason is not None]
    for row in unsafe if remove else ():
        store.remove(row)
    removed = " and removed" if remove else ""
    if format is Format.JSON:
        show_json([{"record": row.id, "safe": why is None, "reason": why} for row, why in reasons])
    else:
        show_table(
            f"{pluralize(len(rows), 'record')}, {len(unsafe)} unsafe{removed}",
            ("record", "kernel", "verifier"),
            [(row.id[:ID_LENGTH], row.kernel, why or "safe") for row, why in reasons],
        )
    if unsafe:
        raise typer.Exit(1)


@app.command("repair")
def repair(format: FormatOption = Format.TABLE) -> None:
    """Build a damaged or deleted index anew from the records' files.

    A damaged index is renamed, not deleted. A right index is left as it is.
    """
    result = repair_store(Store())
    for reason in result.unusable:
        err.print(f"nostall: left out: {reason}")
    if format is Format.JSON:
        show_json(
            {
                "records": [row.id for row in result.rows],
                "unusable": list(result.unusable),
                "damaged_index": str(result.damaged) if result.damaged else None,
            }
        )
        return
    if result.damaged is not None:
        out.print(f"the damaged index is now {result.damaged}")
    _show_rows(result.rows, format, "in the index")


def _warn_of_unlisted(store: Store) -> None:
    """Check the whole index, and print a line if there are files of records that it lacks."""
    store.index.check()
    listed = {row.id for row in store.rows()}
    unlisted = sum(name not in listed for name in store.artefacts.names(JSON))
    if unlisted:
        have = "has files but is" if unlisted == 1 else "have files but are"
        err.print(
            f"nostall: {pluralize(unlisted, 'record')} {have} not in the index: a writer was "
            "killed before it was done, or the index is damaged; `nostall store repair` lists "
            "them again"
        )


def _find_row(store: Store, record: str) -> Row:
    """The only record whose id or original starts with ``record``.

    Raises :class:`BadStore` if there is none, or if there are several.
    """
    rows = store.find(record)
    if len(rows) > 1:
        ids = ", ".join(row.id[:ID_LENGTH] for row in rows[:MAX_NAMED_MATCHES])
        raise BadStore(f"{record!r} matches {len(rows)} records; give one of: {ids}")
    return rows[0]


def _show_rows(rows: Sequence[Row], format: Format, title: str) -> None:
    if format is Format.JSON:
        show_json([{"record": row.id, **_fields(row)} for row in rows])
        return
    if not rows:
        out.print("no records; `nostall tune --objective gpu` records measured gains")
        return
    show_table(
        f"{pluralize(len(rows), 'record')} {title}",
        ("record", "kernel", "gain", "GPU", "arch", "source", "created"),
        [
            (
                row.id[:ID_LENGTH],
                row.kernel,
                _gain(row),
                row.gpu or "-",
                row.architecture,
                row.source,
                row.created.replace("T", " ")[:16],
            )
            for row in rows
        ],
    )


def _fields(row: Row) -> dict[str, object]:
    return {key: value for key, value in asdict(row).items() if key != "id"}


def _gain(row: Row) -> str:
    where = " elsewhere" if (row.kind, row.source) == ("measured", "imported") else ""
    return f"{row.kind}{where} {row.ratio:.4f}x"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return str(value)
