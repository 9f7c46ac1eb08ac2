//! Renders the report as text for people, and as JSON or YAML for programs: fields may be added to these, but never renamed.

use serde::Serialize;

use super::{
    Report,
    classify::{Finding, Path, Row},
};
use crate::{args::Output, page, problem::Problem};

/// The limit of findings of one kind for each row of the table. JSON and YAML contain all findings.
const MAX_FINDINGS: usize = 40;

pub(super) fn render(report: &Report, output: Output) -> Result<String, Vec<Problem>> {
    let failed = |error: &dyn std::fmt::Display| vec![Problem::other(format!("the report cannot be written: {error}"))];
    let structured = ReportOutput::from(report);
    match output {
        Output::Table => Ok(render_table(report)),
        Output::Yaml => serde_saphyr::to_string(&structured).map_err(|error| failed(&error)),
        Output::Json => serde_json::to_string_pretty(&structured)
            .map(|json| json + "\n")
            .map_err(|error| failed(&error)),
    }
}

fn verdict_text(report: &Report) -> String {
    let violations = report.sum(|row| row.violations.len());
    let unanswered = report.sum(|row| row.unanswered.len());
    let probed = report.sum(|row| row.probed);
    let head = match (violations, report.not_probed.len(), unanswered) {
        (0, 0, _) if report.rows.is_empty() => "NOTHING WAS TRIED".to_owned(),
        (0, 0, 0) => "As planned".to_owned(),
        (0, 0, silent) => format!("Closed as planned, but granted sockets do not answer: {silent}"),
        (0, not_probed, _) => {
            format!("CANNOT TELL: {not_probed} probes could not run (see below); the others found no violation")
        }
        (violations, ..) => format!("VIOLATION: sockets that answer although nothing grants them: {violations}"),
    };
    format!(
        "{head} ({probed} connections tried, {} granted and open)",
        report.sum(|row| row.open.len())
    )
}

fn render_table(report: &Report) -> String {
    let mut text = String::new();
    page::write_line(&mut text, 0, 2, &verdict_text(report));
    for why in &report.not_probed {
        page::write_line(&mut text, 2, 4, &format!("NOT TRIED: {why}"));
    }
    for note in &report.notes {
        page::write_line(&mut text, 2, 4, &format!("note: {note}"));
    }
    for row in &report.rows {
        let Row {
            from,
            to,
            probed,
            open,
            unanswered,
            violations,
            on_underlay,
            refused,
            unknown,
        } = row;
        text.push('\n');
        let head = format!(
            "{from} -> {to}: {probed} tried, {} granted and open, {} granted and silent, {} VIOLATIONS",
            open.len(),
            unanswered.len(),
            violations.len()
        );
        page::write_line(&mut text, 2, 4, &head);
        write_findings(&mut text, "VIOLATION", violations, true);
        write_findings(&mut text, "granted, no answer:", unanswered, true);
        write_findings(&mut text, "open, granted:", open, false);
        write_findings(&mut text, "open, unknown whether granted:", unknown, true);
        write_findings(&mut text, "open on the underlay, outside the mesh:", on_underlay, false);
        write_findings(
            &mut text,
            "not granted, refused (by a firewall, or because no process listens):",
            refused,
            false,
        );
    }
    text
}

fn write_findings(text: &mut String, heading: &str, findings: &[Finding], with_message: bool) {
    for finding in findings.iter().take(MAX_FINDINGS) {
        let Finding {
            socket,
            description,
            path,
            interface,
            rule,
            message,
        } = finding;
        let by = interface
            .as_deref()
            .map(|name| format!(" by {name}"))
            .unwrap_or_default();
        let path = match path {
            Path::Tunnel => format!("in the tunnel{by}"),
            Path::Underlay => format!("on the underlay{by}"),
            Path::Unknown => "path unknown".to_owned(),
        };
        page::write_line(text, 4, 6, &format!("{heading} {socket} {description}, {path}, {rule}"));
        if with_message {
            page::write_line(text, 6, 6, message);
        }
    }
    if findings.len() > MAX_FINDINGS {
        let more = findings.len() - MAX_FINDINGS;
        page::write_line(text, 4, 6, &format!("{heading} {more} more; --output json has all"));
    }
}

/// The report for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ReportOutput<'a> {
    verdict: String,
    exit_code: u8,
    tried: usize,
    violations: usize,
    unanswered: usize,
    not_tried: &'a [String],
    notes: &'a [String],
    probes: Vec<RowOutput<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RowOutput<'a> {
    from: SourceOutput<'a>,
    to: &'a str,
    tried: usize,
    violations: Vec<FindingOutput<'a>>,
    unanswered: Vec<FindingOutput<'a>>,
    open: Vec<FindingOutput<'a>>,
    unknown: Vec<FindingOutput<'a>>,
    /// [`Row::on_underlay`].
    beside_the_mesh: Vec<FindingOutput<'a>>,
    refused: Vec<FindingOutput<'a>>,
}

#[derive(Debug, Serialize)]
struct SourceOutput<'a> {
    cluster: &'a str,
    node: &'a str,
    /// `node` or `pod`.
    kind: &'static str,
}

#[derive(Debug, Serialize)]
struct FindingOutput<'a> {
    socket: String,
    what: &'a str,
    /// `tunnel`, `underlay` or `unknown`.
    path: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    interface: Option<&'a str>,
    rule: &'a str,
    message: &'a str,
}

impl<'a> From<&'a Report> for ReportOutput<'a> {
    fn from(report: &'a Report) -> Self {
        let Report {
            rows,
            not_probed,
            notes,
        } = report;
        Self {
            verdict: verdict_text(report),
            exit_code: report.code(),
            tried: report.sum(|row| row.probed),
            violations: report.sum(|row| row.violations.len()),
            unanswered: report.sum(|row| row.unanswered.len()),
            not_tried: not_probed,
            notes,
            probes: rows.iter().map(RowOutput::from).collect(),
        }
    }
}

impl<'a> From<&'a Row> for RowOutput<'a> {
    fn from(row: &'a Row) -> Self {
        let Row {
            from,
            to,
            probed,
            open,
            unanswered,
            violations,
            on_underlay,
            refused,
            unknown,
        } = row;
        let outputs = |findings: &'a [Finding]| findings.iter().map(FindingOutput::from).collect();
        Self {
            from: SourceOutput {
                cluster: &from.cluster,
                node: &from.node,
                kind: if from.is_host { "node" } else { "pod" },
            },
            to,
            tried: *probed,
            violations: outputs(violations),
            unanswered: outputs(unanswered),
            open: outputs(open),
            unknown: outputs(unknown),
            beside_the_mesh: outputs(on_underlay),
            refused: outputs(refused),
        }
    }
}

impl<'a> From<&'a Finding> for FindingOutput<'a> {
    fn from(finding: &'a Finding) -> Self {
        let Finding {
            socket,
            description,
            path,
            interface,
            rule,
            message,
        } = finding;
        Self {
            socket: socket.to_string(),
            what: description,
            path: path.as_str(),
            interface: interface.as_deref(),
            rule,
            message,
        }
    }
}
