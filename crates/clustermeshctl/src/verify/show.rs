//! The report as a person reads it, and as JSON or YAML. Its shape is an interface: fields are added, never renamed.

use serde::Serialize;

use super::{
    Report,
    judge::{Item, Path, Row},
};
use crate::{args::Output, page, problem::Problem};

/// Lines of one kind in the table; JSON and YAML have all.
const LINES: usize = 40;

/// The report in the form that is asked for.
pub(super) fn render(report: &Report, output: Output) -> Result<String, Vec<Problem>> {
    let failed = |error: &dyn std::fmt::Display| vec![Problem::usage(format!("the report cannot be written: {error}"))];
    let written = Written::from(report);
    match output {
        Output::Table => Ok(table(report)),
        Output::Yaml => serde_saphyr::to_string(&written).map_err(|error| failed(&error)),
        Output::Json => serde_json::to_string_pretty(&written)
            .map(|json| json + "\n")
            .map_err(|error| failed(&error)),
    }
}

fn verdict(report: &Report) -> String {
    let violations = report.count(|row| row.violations.len());
    let unanswered = report.count(|row| row.unanswered.len());
    let tried = report.count(|row| row.tried);
    let head = match (violations, report.missing.len(), unanswered) {
        (0, 0, _) if report.rows.is_empty() => "NOTHING WAS TRIED".to_owned(),
        (0, 0, 0) => "As planned".to_owned(),
        (0, 0, silent) => format!("Closed as planned, but granted sockets do not answer: {silent}"),
        (0, missing, _) => {
            format!(
                "CANNOT TELL: not all was tried ({missing}, see below); of what was, nothing is open that should not be"
            )
        }
        (violations, ..) => format!("VIOLATION: sockets that answer although nothing grants them: {violations}"),
    };
    format!(
        "{head} ({tried} connections tried, {} granted and open)",
        report.count(|row| row.open.len())
    )
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    page::line(&mut text, 0, 2, &verdict(report));
    for missing in &report.missing {
        page::line(&mut text, 2, 4, &format!("NOT TRIED: {missing}"));
    }
    for note in &report.notes {
        page::line(&mut text, 2, 4, &format!("note: {note}"));
    }
    for row in &report.rows {
        let Row {
            from,
            to,
            tried,
            open,
            unanswered,
            violations,
            beside,
            refused,
            unknown,
        } = row;
        text.push('\n');
        let head = format!(
            "{from} -> {to}: {tried} tried, {} granted and open, {} granted and silent, {} VIOLATIONS",
            open.len(),
            unanswered.len(),
            violations.len()
        );
        page::line(&mut text, 2, 4, &head);
        items(&mut text, "VIOLATION", violations, true);
        items(&mut text, "granted, no answer:", unanswered, true);
        items(&mut text, "open, granted:", open, false);
        items(&mut text, "open, cannot tell:", unknown, true);
        items(&mut text, "open beside the mesh, no business of its:", beside, false);
        items(
            &mut text,
            "refused although nothing grants it (a firewall, or a host that was reached):",
            refused,
            false,
        );
    }
    text
}

fn items(text: &mut String, word: &str, items: &[Item], why: bool) {
    for item in items.iter().take(LINES) {
        let Item {
            socket,
            what,
            path,
            interface,
            rule,
            message,
        } = item;
        let by = interface
            .as_deref()
            .map(|name| format!(" by {name}"))
            .unwrap_or_default();
        let path = match path {
            Path::Tunnel => format!("in the tunnel{by}"),
            Path::Underlay => format!("on the underlay{by}"),
            Path::Unknown => "on a way that is not known".to_owned(),
        };
        page::line(text, 4, 6, &format!("{word} {socket} {what}, {path}, {rule}"));
        if why {
            page::line(text, 6, 6, message);
        }
    }
    if items.len() > LINES {
        let more = items.len() - LINES;
        page::line(text, 4, 6, &format!("{word} {more} more; --output json has all"));
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    verdict: String,
    exit_code: u8,
    tried: usize,
    violations: usize,
    unanswered: usize,
    not_tried: &'a [String],
    notes: &'a [String],
    probes: Vec<WrittenRow<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct WrittenRow<'a> {
    from: Origin<'a>,
    to: &'a str,
    tried: usize,
    violations: Vec<WrittenItem<'a>>,
    unanswered: Vec<WrittenItem<'a>>,
    open: Vec<WrittenItem<'a>>,
    unknown: Vec<WrittenItem<'a>>,
    beside_the_mesh: Vec<WrittenItem<'a>>,
    refused: Vec<WrittenItem<'a>>,
}

#[derive(Debug, Serialize)]
struct Origin<'a> {
    cluster: &'a str,
    node: &'a str,
    /// `node` or `pod`.
    kind: &'static str,
}

#[derive(Debug, Serialize)]
struct WrittenItem<'a> {
    socket: String,
    what: &'a str,
    /// `tunnel`, `underlay` or `unknown`.
    path: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    interface: Option<&'a str>,
    rule: &'a str,
    message: &'a str,
}

impl<'a> From<&'a Report> for Written<'a> {
    fn from(report: &'a Report) -> Self {
        let Report { rows, missing, notes } = report;
        Self {
            verdict: verdict(report),
            exit_code: report.code(),
            tried: report.count(|row| row.tried),
            violations: report.count(|row| row.violations.len()),
            unanswered: report.count(|row| row.unanswered.len()),
            not_tried: missing,
            notes,
            probes: rows.iter().map(WrittenRow::from).collect(),
        }
    }
}

impl<'a> From<&'a Row> for WrittenRow<'a> {
    fn from(row: &'a Row) -> Self {
        let Row {
            from,
            to,
            tried,
            open,
            unanswered,
            violations,
            beside,
            refused,
            unknown,
        } = row;
        let all = |items: &'a [Item]| items.iter().map(WrittenItem::from).collect();
        Self {
            from: Origin {
                cluster: &from.cluster,
                node: &from.node,
                kind: if from.host { "node" } else { "pod" },
            },
            to,
            tried: *tried,
            violations: all(violations),
            unanswered: all(unanswered),
            open: all(open),
            unknown: all(unknown),
            beside_the_mesh: all(beside),
            refused: all(refused),
        }
    }
}

impl<'a> From<&'a Item> for WrittenItem<'a> {
    fn from(item: &'a Item) -> Self {
        let Item {
            socket,
            what,
            path,
            interface,
            rule,
            message,
        } = item;
        Self {
            socket: socket.to_string(),
            what,
            path: path.as_str(),
            interface: interface.as_deref(),
            rule,
            message,
        }
    }
}
