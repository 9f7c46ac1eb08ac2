//! Renders the answer as text for people, and as JSON or YAML for programs: fields may be added to these, but never renamed.

use clustermesh_core::mesh::Protocol;
use serde::Serialize;

use super::{Answer, Row, is_table};
use crate::{
    args::Output,
    explanation::{Hop, Route, Verdict},
    page,
    problem::Problem,
};

pub(super) fn render(answer: &Answer, output: Output) -> Result<String, Vec<Problem>> {
    if is_table(output) {
        return Ok(render_table(answer));
    }
    let report = Report::from(answer);
    let failed = |error: &dyn std::fmt::Display| vec![Problem::other(format!("the answer cannot be written: {error}"))];
    match output {
        Output::Yaml => serde_saphyr::to_string(&report).map_err(|error| failed(&error)),
        // `Table` has returned above.
        Output::Json | Output::Table => serde_json::to_string_pretty(&report)
            .map(|json| json + "\n")
            .map_err(|error| failed(&error)),
    }
}

fn port_text((protocol, port): (Protocol, u16)) -> String {
    format!("{port}/{}", protocol.as_str())
}

fn render_table(answer: &Answer) -> String {
    let mut text = String::new();
    let verdict = answer.verdict();
    page::write_line(
        &mut text,
        0,
        2,
        &format!("{}: {} -> {}", capitalize(verdict.as_str()), answer.from, answer.to),
    );
    for note in &answer.notes {
        page::write_line(&mut text, 2, 4, note);
    }
    for row in &answer.rows {
        let Row {
            destination,
            from: _,
            explanation,
        } = row;
        let to = &destination.to;
        let mut description = format!("{} {}", destination.kind, to.address);
        // `UNKNOWN_ADDRESS` in locate.rs: the cluster was not read, so its addresses are unknown.
        if to.address.is_unspecified() {
            "its addresses".clone_into(&mut description);
        }
        if let Some(port) = to.port {
            description.push_str(&format!(" port {}", port_text(port)));
        }
        if let Some(node) = &to.node {
            description.push_str(&format!(" on Node {node}"));
        }
        if !destination.is_ready {
            description.push_str(" (not ready)");
        }
        text.push('\n');
        let verdict = explanation.verdict().as_str();
        page::write_line(
            &mut text,
            2,
            4,
            &format!("{description}: {verdict}, {}", explanation.rule),
        );
        page::write_line(&mut text, 4, 4, &explanation.message);
        explanation
            .route
            .iter()
            .for_each(|route| write_route(&mut text, row, route));
        for note in &explanation.notes {
            page::write_line(&mut text, 4, 6, &format!("note: {note}"));
        }
        if let Some(mesh) = &explanation.mesh {
            page::write_line(&mut text, 4, 6, &format!("by ClusterMesh {mesh}"));
        }
    }
    text
}

fn capitalize(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn written_text(is_written: bool) -> &'static str {
    if is_written { "written" } else { "not written yet" }
}

fn write_route(text: &mut String, row: &Row, route: &Route) {
    let Route {
        out,
        anchored,
        back,
        seen_as,
        masqueraded,
        policy,
    } = route;
    let hop = |hop: &Hop| {
        format!(
            "Peer {} (Node {}, {}; {})",
            hop.peer,
            hop.node,
            hop.prefix,
            written_text(hop.written)
        )
    };
    let anchor = if *anchored { ", as an anchor" } else { "" };
    page::write_line(text, 4, 6, &format!("leaves through {}{anchor}", hop(out)));
    let arrival = match (masqueraded, row.from.address) {
        (_, None) => format!("arrives as {seen_as}, the node's own address in the mesh"),
        (Some(true), Some(address)) => format!("arrives as {seen_as}, not as {address} (masqueraded)"),
        (Some(false), Some(_)) => format!("arrives as {seen_as} (not masqueraded)"),
        (None, Some(_)) => format!("arrives as {seen_as}, unless the CNI there masquerades it"),
    };
    page::write_line(text, 4, 6, &format!("{arrival}, accepted through {}", hop(back)));
    if let Some((policy, is_written)) = policy {
        page::write_line(
            text,
            4,
            6,
            &format!("checked against PeerPolicy {policy} ({})", written_text(*is_written)),
        );
    }
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    from: &'a str,
    to: &'a str,
    verdict: String,
    notes: &'a [String],
    answers: Vec<RowReport<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RowReport<'a> {
    kind: &'static str,
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<&'a str>,
    ready: bool,
    verdict: String,
    rule: String,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    mesh: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<RouteReport<'a>>,
    notes: &'a [String],
}

/// A [`Route`], which JSON and YAML name `path`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RouteReport<'a> {
    out: HopReport<'a>,
    anchored: bool,
    back: HopReport<'a>,
    seen_as: String,
    /// `null` = unknown, because the CNI of the source's cluster decides.
    masqueraded: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<PolicyReport<'a>>,
}

#[derive(Debug, Serialize)]
struct HopReport<'a> {
    peer: &'a str,
    node: &'a str,
    prefix: String,
    written: bool,
}

#[derive(Debug, Serialize)]
struct PolicyReport<'a> {
    name: &'a str,
    written: bool,
}

/// The verdict in JSON and YAML: the name of the variant.
fn verdict_name(verdict: Verdict) -> String {
    format!("{verdict:?}")
}

impl<'a> From<&'a Answer> for Report<'a> {
    fn from(answer: &'a Answer) -> Self {
        Self {
            from: &answer.from,
            to: &answer.to,
            verdict: verdict_name(answer.verdict()),
            notes: &answer.notes,
            answers: answer.rows.iter().map(RowReport::from).collect(),
        }
    }
}

impl<'a> From<&'a Row> for RowReport<'a> {
    fn from(row: &'a Row) -> Self {
        let Row {
            destination,
            from: _,
            explanation,
        } = row;
        Self {
            kind: destination.kind,
            address: destination.to.address.to_string(),
            port: destination.to.port.map(|(_, port)| port),
            protocol: destination.to.port.map(|(protocol, _)| protocol.as_str()),
            node: destination.to.node.as_deref(),
            ready: destination.is_ready,
            verdict: verdict_name(explanation.verdict()),
            rule: explanation.rule.to_string(),
            message: &explanation.message,
            mesh: explanation.mesh.as_ref().map(ToString::to_string),
            path: explanation.route.as_ref().map(RouteReport::from),
            notes: &explanation.notes,
        }
    }
}

impl<'a> From<&'a Route> for RouteReport<'a> {
    fn from(route: &'a Route) -> Self {
        let Route {
            out,
            anchored,
            back,
            seen_as,
            masqueraded,
            policy,
        } = route;
        let hop = |hop: &'a Hop| HopReport {
            peer: &hop.peer,
            node: &hop.node,
            prefix: hop.prefix.to_string(),
            written: hop.written,
        };
        Self {
            out: hop(out),
            anchored: *anchored,
            back: hop(back),
            seen_as: seen_as.to_string(),
            masqueraded: *masqueraded,
            policy: policy.as_ref().map(|(name, written)| PolicyReport {
                name,
                written: *written,
            }),
        }
    }
}
