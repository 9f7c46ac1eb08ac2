//! Renders a graph as text: a line of counts, then one paragraph for each member.

use super::model::{Graph, LinkState, Member};
use crate::{page, status::table::age};

/// How many links of a member in one state are listed by name. The others are only counted. If more links than this are up, none
/// of them is listed: their number is enough.
const MAX_NAMES: usize = 8;

pub(super) fn render(graph: &Graph) -> String {
    let mut text = String::new();
    page::write_line(&mut text, 0, 2, &summary(graph));
    let width = graph
        .members
        .iter()
        .map(|member| member.name.chars().count())
        .max()
        .unwrap_or(0);
    for (at, member) in graph.members.iter().enumerate() {
        let links: Vec<String> = LinkState::ALL
            .into_iter()
            .filter_map(|state| describe_links(graph, at, state))
            .collect();
        let links = match links.is_empty() {
            true => "not connected".to_owned(),
            false => links.join("; "),
        };
        let line = format!("{:width$}  {}: {links}", member.name, describe(graph, member));
        page::write_line(&mut text, 0, width + 2, &line);
    }
    text
}

/// The counts of members, and of links by state.
pub(super) fn summary(graph: &Graph) -> String {
    let states = LinkState::ALL.into_iter().filter(|state| graph.count(*state) > 0);
    let states: Vec<String> = states
        .map(|state| format!("{} {}", graph.count(state), state.word()))
        .collect();
    let states = if states.is_empty() {
        String::new()
    } else {
        format!(": {}", states.join(", "))
    };
    format!("{} members, {} links{states}", graph.members.len(), graph.links.len())
}

fn describe(graph: &Graph, member: &Member) -> String {
    let mut parts = Vec::new();
    if member.is_hub {
        parts.push("hub".to_owned());
    }
    parts.push(member.describe_nodes());
    if member.is_quarantined {
        parts.push("quarantined".to_owned());
    }
    parts.extend(describe_unreachable(graph, member));
    parts.join(", ")
}

/// Says that a member's API server is not reachable, and since when.
pub(super) fn describe_unreachable(graph: &Graph, member: &Member) -> Option<String> {
    let since = member
        .unreachable_since
        .map(|since| format!(" for {}", age(since, graph.time)));
    (!member.is_reachable).then(|| format!("API server not reachable{}", since.unwrap_or_default()))
}

/// The links of one member in one state: names, with details if the links are down or partly up.
fn describe_links(graph: &Graph, at: usize, state: LinkState) -> Option<String> {
    let of_member = graph.links.iter().filter(|link| link.state == state);
    let others: Vec<String> = of_member
        .filter_map(|link| {
            let other = match link.ends {
                (a, b) if a == at => b,
                (a, b) if b == at => a,
                _ => return None,
            };
            let name = &graph.members[other].name;
            Some(match (state, link.detail.is_empty()) {
                (LinkState::Down | LinkState::Partly, false) => format!("{name} ({})", link.detail),
                _ => name.clone(),
            })
        })
        .collect();
    let shown = match (state, others.len()) {
        (_, 0) => return None,
        (LinkState::Up, count) if count > MAX_NAMES => format!("{count} members"),
        (_, count) if count > MAX_NAMES => format!("{} and {} more", others[..MAX_NAMES].join(", "), count - MAX_NAMES),
        _ => others.join(", "),
    };
    Some(format!("{}: {shown}", state.word()))
}
