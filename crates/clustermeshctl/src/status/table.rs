//! Renders the report of `status` for people, in about ten lines: one line of counts, then the problems, the worst first. Problems of many
//! members with one reason are one item, so that the output stays short however large the outage is.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;

use super::report::{MeshRow, Report, Row, Severity, Share};
use crate::page;

/// The number of lines that the output aims at.
const MAX_LINES: usize = 10;

/// The number of lines that the message of one item may have.
const MAX_MESSAGE_LINES: usize = 2;

/// The number of lines that the remedy of one item may have.
const MAX_REMEDY_LINES: usize = 1;

/// The column in which messages begin.
const INDENT: usize = 11;

/// Renders the report. `all` = every problem as an item of its own, with its whole message.
pub(super) fn render(report: &Report, now: Timestamp, all: bool) -> String {
    let mut text = String::new();
    page::write_line(&mut text, 0, 2, &summary(report, now, all));
    if report.problems.is_empty() && (2..MAX_LINES).contains(&report.meshes.len()) {
        for mesh in &report.meshes {
            page::write_line(&mut text, 0, 2, &mesh_line(mesh, now));
        }
    }
    let items: Vec<Vec<&Row>> = match all {
        true => report.problems.iter().map(|row| vec![row]).collect(),
        false => group(&report.problems),
    };
    let (mut used, mut shown) = (text.lines().count(), 0);
    for (index, rows) in items.iter().enumerate() {
        let item = render_item(rows, now, all);
        let is_last = index + 1 == items.len();
        let fits = used + item.lines().count() + usize::from(!is_last) <= MAX_LINES;
        // The worst item is shown, however long it is.
        if !(all || fits || index == 0) {
            break;
        }
        used += item.lines().count();
        shown += 1;
        text.push_str(&item);
    }
    let left: usize = items[shown..].iter().map(Vec::len).sum();
    if left > 0 {
        let reasons: Vec<&str> = items[shown..]
            .iter()
            .filter_map(|rows| Some(&*rows.first()?.reason))
            .collect();
        let more = format!("and {left} more ({}): add --all", reasons.join(", "));
        page::write_line(&mut text, 0, 2, &more);
    }
    text
}

/// Groups the problems by severity and reason. Among the groups of one severity, problems of the controller come first, then
/// tunnels that are down, then the largest group.
fn group(problems: &[Row]) -> Vec<Vec<&Row>> {
    let mut groups: BTreeMap<(Severity, &str), Vec<&Row>> = BTreeMap::new();
    for row in problems {
        groups.entry((row.severity, &row.reason)).or_default().push(row);
    }
    let mut groups: Vec<Vec<&Row>> = groups.into_values().collect();
    for rows in &mut groups {
        // The oldest first. A problem without a known start comes last.
        rows.sort_by_key(|row| (row.since.is_none(), row.since));
    }
    groups.sort_by_key(|rows| {
        let first = rows.first();
        let is_tunnel = first.is_some_and(|row| row.reason == "TunnelsDown");
        let is_of_mesh = first.is_some_and(|row| row.mesh.is_some());
        (
            first.map(|row| row.severity),
            is_of_mesh,
            !is_tunnel,
            usize::MAX - rows.len(),
        )
    });
    groups
}

fn render_item(rows: &[&Row], now: Timestamp, all: bool) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let word = match first.severity {
        Severity::Down => "DOWN",
        Severity::Open => "OPEN",
        Severity::Partly => "PART",
        Severity::Note => "note",
    };
    let since = first.since.map_or_else(String::new, |since| age(since, now));
    let (object, reason, message) = (object(first), &first.reason, &first.message);
    let what = match (rows.len(), object.is_empty()) {
        (1, false) => format!("{object}: {reason}: {message}"),
        (1, true) => format!("{reason}: {message}"),
        (count, _) => format!("{count} x {reason}, first {object}: {message}"),
    };
    let mut item = String::new();
    page::write_line(&mut item, 0, INDENT, &format!("{word} {since:>4}  {what}"));
    if !all {
        item = cut(&item, MAX_MESSAGE_LINES);
    }
    if let Some(remedy) = &first.remedy {
        let mut lines = String::new();
        page::write_line(&mut lines, INDENT, INDENT + 3, &format!("-> {remedy}"));
        item.push_str(&if all { lines } else { cut(&lines, MAX_REMEDY_LINES) });
    }
    item
}

/// Keeps the first lines.
fn cut(text: &str, lines: usize) -> String {
    let kept: Vec<&str> = text.lines().take(lines).collect();
    let end = if text.lines().count() > lines { " ..." } else { "" };
    format!("{}{end}\n", kept.join("\n"))
}

/// The mesh and member that have a problem. Empty = the controller.
fn object(row: &Row) -> String {
    let link = |cluster: &String| match &row.to {
        Some(to) => format!("{cluster} to {to}"),
        None => cluster.clone(),
    };
    let parts = [row.mesh.clone(), row.cluster.as_ref().map(link)];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn summary(report: &Report, now: Timestamp, all: bool) -> String {
    let live = live_counts(&report.meshes);
    let controller = report.controller.as_ref().filter(|controller| controller.alive);
    let controller = controller.and_then(|controller| Some((controller.holder.as_ref()?, controller.renewed)));
    let controller = controller.map_or_else(String::new, |(holder, renewed)| {
        // The time of the renewal is shown only with `--all`: it changes with each read, and `--watch` prints the status again
        // whenever its text has changed.
        let renewed = renewed.filter(|_| all);
        let renewed = renewed.map_or_else(String::new, |renewed| {
            format!(" (Lease renewed {} ago)", age(renewed, now))
        });
        format!("; controller {holder}{renewed}")
    }) + &live;
    if let [mesh] = &*report.meshes {
        return mesh_line(mesh, now) + &controller;
    }
    let meshes = &report.meshes;
    let count = |worst| meshes.iter().filter(|mesh| mesh.worst == worst).count();
    let states = [
        (count(Some(Severity::Down)), "down"),
        (count(Some(Severity::Open)), "open"),
        (count(Some(Severity::Partly)), "partly working"),
        (count(None), "healthy"),
    ];
    let states: Vec<String> = states
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, state)| format!("{count} {state}"))
        .collect();
    // A cluster that is in several meshes counts once.
    let mut clusters: BTreeMap<&str, (bool, Share)> = BTreeMap::new();
    for row in meshes.iter().flat_map(|mesh| &mesh.clusters) {
        let (is_reachable, nodes) = clusters.entry(&row.identity).or_default();
        *is_reachable |= row.reachable;
        *nodes = Share {
            working: nodes.working.max(row.nodes.working),
            total: nodes.total.max(row.nodes.total),
        };
    }
    let count_of = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let members = Share {
        working: count_of(clusters.values().filter(|(is_reachable, _)| *is_reachable).count()),
        total: count_of(clusters.len()),
    };
    let nodes = sum(clusters.values().map(|(_, nodes)| *nodes));
    let counts = counts(members, nodes, sum(meshes.iter().map(|mesh| mesh.services)));
    format!("{} meshes: {}; {counts}{controller}", meshes.len(), states.join(", "))
}

/// Sums up what `--live` has read from the members. A member of several meshes counts once for each. Empty without `--live`.
fn live_counts(meshes: &[MeshRow]) -> String {
    let members = || meshes.iter().flat_map(|mesh| mesh.live.values());
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let answering = Share {
        working: count(members().filter(|member| member.answers).count()),
        total: count(members().count()),
    };
    let shares = [
        (answering, "members answer"),
        (sum(members().map(|member| member.nodes)), "Nodes registered"),
        (sum(members().map(|member| member.peers)), "Peers as planned"),
    ];
    let shares = shares.into_iter().filter(|(share, _)| share.total > 0);
    let texts: Vec<String> = shares
        .map(|(Share { working, total }, what)| format!("{working}/{total} {what}"))
        .collect();
    match texts.is_empty() {
        true => String::new(),
        false => format!("; read now: {}", texts.join(", ")),
    }
}

fn sum(shares: impl Iterator<Item = Share>) -> Share {
    shares.fold(Share::default(), |sum, share| Share {
        working: sum.working + share.working,
        total: sum.total + share.total,
    })
}

fn mesh_line(mesh: &MeshRow, now: Timestamp) -> String {
    let state = match mesh.worst {
        None => "healthy",
        Some(Severity::Down) => "down",
        Some(Severity::Open) => "open",
        Some(Severity::Partly | Severity::Note) => "partly working",
    };
    // `mesh.since` belongs to the condition Ready, so it does not apply to a mesh that is Ready and has another problem.
    let since = mesh.since.filter(|_| matches!(mesh.worst, None | Some(Severity::Down)));
    let since = since.map_or_else(String::new, |since| format!(" for {}", age(since, now)));
    format!(
        "{}: {state}{since}; {}",
        mesh.mesh,
        counts(mesh.members, mesh.nodes, mesh.services)
    )
}

fn counts(members: Share, nodes: Share, services: Share) -> String {
    let share = |Share { working, total }: Share, noun| (total > 0).then(|| format!("{working}/{total} {noun}"));
    let parts = [
        share(members, "members reachable"),
        share(nodes, "nodes meshed"),
        share(services, "Services"),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// The time since an event, in the unit that kubectl would choose.
pub(crate) fn age(since: Timestamp, now: Timestamp) -> String {
    let seconds = now.as_second().saturating_sub(since.as_second()).max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}
