//! Renders the plan as text for people: for each mesh the condition Ready and all conditions that need attention, every change with its
//! content, and the nodes and networks that are left out. [`super::report`] is the format for programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{Display, Write},
};

use clustermesh_api::convert;
use clustermesh_core::{
    diff::{Action, Item, Step},
    mesh::MeshId,
    observe::{AccessSpec, Endpoint, Families, Member, Mirror, Owner, PeerSpec, PolicySpec},
    plan::{MeshPlan, PlannedSlice, TargetPlan},
    status::{self, Condition},
};

use super::PlanResult;
use crate::page;

/// The maximum number of items of a list that are printed.
const MAX_ITEMS: usize = 24;

pub(super) fn render(outcome: &PlanResult) -> String {
    let mut page = Page::default();
    for (id, mesh) in &outcome.plan.meshes {
        page.write_mesh(outcome, id, mesh);
    }
    let all: Vec<&Step> = outcome.steps.values().flatten().map(|step| &**step).collect();
    let _ = match &*all {
        [] => writeln!(page.text, "Nothing would change."),
        steps => writeln!(page.text, "Total: {}.", count_text(steps)),
    };
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn write_mesh(&mut self, outcome: &PlanResult, id: &MeshId, mesh: &MeshPlan) {
        self.write_line(0, 0, &format!("ClusterMesh {id}"));
        // This command writes nothing and reads no reports of agents, so it knows no failed writes, no leftovers of removed clusters and
        // no tunnels that are down. The counts of objects that differ from the plan are empty, because the steps below show
        // these objects.
        for condition in status::conditions(mesh, &BTreeMap::new(), &BTreeMap::new(), &[], &BTreeMap::new()) {
            if condition.kind == "Ready" || needs_attention(&condition) {
                let state = match (condition.kind, condition.status) {
                    ("Ready", true) => "Ready".to_owned(),
                    ("Ready", false) => format!("Not ready: {}", condition.reason),
                    (kind, _) if kind == condition.reason => kind.to_owned(),
                    (kind, _) => format!("{kind}: {}", condition.reason),
                };
                self.write_line(2, 4, &format!("{state}: {}", condition.message));
            }
        }
        for (entry, target) in &mesh.targets {
            self.write_blank_line();
            self.write_target(outcome, id, mesh, entry, target);
        }
        self.write_left_out(mesh);
        self.write_blank_line();
    }

    fn write_target(&mut self, outcome: &PlanResult, id: &MeshId, mesh: &MeshPlan, entry: &str, target: &TargetPlan) {
        let (Some(steps), Some(cluster)) = (outcome.changes(id, mesh, entry), outcome.cluster(mesh, entry)) else {
            let text = format!("Into {entry}: no objects were given, so nothing is planned");
            self.write_line(2, 4, &text);
            return;
        };
        let slices: usize = target.services.values().map(|service| service.slices.len()).sum();
        let others = target.peers.len() + target.policies.len() + target.accesses.len();
        let desired = others + target.services.len() + slices;
        let to_write = steps.iter().filter(|step| step.action != Action::Delete).count();
        let unchanged_text = match (mesh.paused, desired.saturating_sub(to_write)) {
            (true, _) | (_, 0) => String::new(),
            (_, count) => format!("{}{count} up to date", if steps.is_empty() { "" } else { ", " }),
        };
        let changes = match (steps.is_empty(), unchanged_text.is_empty()) {
            (true, true) => "no change".to_owned(),
            (true, false) => "no change; ".to_owned(),
            (false, _) => count_text(&steps),
        };
        self.write_line(2, 4, &format!("Into {entry}: {changes}{unchanged_text}"));
        for step in steps {
            self.write_step(step, target, &cluster.member);
        }
    }

    fn write_step(&mut self, step: &Step, target: &TargetPlan, member: &Member) {
        let sign = match step.action {
            Action::Create => '+',
            Action::Update => '~',
            Action::Delete => '-',
        };
        let source = step.owner.source_cluster.as_deref().unwrap_or("?");
        let name = step.item.name();
        let subject = match &step.item {
            Item::Peer(peer, _) => match target.peers.get(peer) {
                Some(planned) => format!("Node {} of {source}", planned.node),
                None => format!("a node of {source}"),
            },
            Item::Policy(..) | Item::Access(..) => format!("what {source} may reach"),
            Item::Service(..) | Item::Slice(..) => format!("mirrors {source}"),
        };
        self.write_line(4, 8, &format!("{sign} {} {name}  ({subject})", step.item.kind()));
        for detail in details(step, member) {
            self.write_line(8, 10, &detail);
        }
    }

    /// Writes the nodes and networks that are left out, and the held nodes, with the reasons.
    fn write_left_out(&mut self, mesh: &MeshPlan) {
        for (entry, cluster) in &mesh.clusters {
            if !cluster.skipped.is_empty() {
                self.write_blank_line();
                let nodes: BTreeSet<&str> = cluster.skipped.iter().map(|skipped| skipped.node.as_str()).collect();
                self.write_line(2, 4, &format!("Left out of {entry}: {} node(s)", nodes.len()));
                for skipped in &cluster.skipped {
                    let text = format!("! Node {}  {}: {}", skipped.node, skipped.reason, skipped.message);
                    self.write_line(4, 8, &text);
                }
            }
            if let Some(first) = cluster.uncovered.first() {
                let more = match cluster.uncovered.len() - 1 {
                    0 => String::new(),
                    more => format!(", and {more} more"),
                };
                self.write_blank_line();
                let text = format!(
                    "Left out of {entry}, outside allowedNetworks or in an anchored network: podCIDR {} of Node {}{more}",
                    first.network, first.node
                );
                self.write_line(2, 4, &text);
            }
            if !cluster.held.is_empty() {
                self.write_blank_line();
                self.write_line(
                    2,
                    4,
                    &format!("Nodes of {entry} that keep their Peers for up to 5 minutes and are then left out:"),
                );
                for (node, reason) in &cluster.held {
                    self.write_line(4, 8, &format!("! Node {node}  {reason}"));
                }
            }
        }
    }

    fn write_blank_line(&mut self) {
        self.text.push('\n');
    }

    fn write_line(&mut self, indent: usize, hang: usize, text: &str) {
        page::write_line(&mut self.text, indent, hang, text);
    }
}

/// Whether the status of a condition shows a problem.
fn needs_attention(condition: &Condition) -> bool {
    let is_problem_when_true = ["NetworksOverlap", "Degraded", "Paused"].contains(&condition.kind);
    condition.status == is_problem_when_true
}

fn count_text(steps: &[&Step]) -> String {
    let count = |action| steps.iter().filter(|step| step.action == action).count();
    let parts = [
        (Action::Create, "to create"),
        (Action::Update, "to update"),
        (Action::Delete, "to delete"),
    ];
    let parts = parts.map(|(action, word)| (count(action), word));
    let parts: Vec<String> = parts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, word)| format!("{count} {word}"))
        .collect();
    parts.join(", ")
}

/// Returns lines that describe the content of a step.
fn details(step: &Step, member: &Member) -> Vec<String> {
    match &step.item {
        Item::Peer(name, planned) => {
            let existing = member.peers.as_ref().and_then(|peers| peers.get(name));
            let old = existing.map(|peer| peer.spec.as_ref());
            let owner = existing.map(|peer| &peer.owner);
            compare(step, planned.as_deref(), old, owner, describe_peer, peer_changes)
        }
        Item::Policy(name, planned) => {
            let existing = member.policies.as_ref().and_then(|policies| policies.get(name));
            let old = existing.map(|policy| policy.spec.as_ref());
            let owner = existing.map(|policy| &policy.owner);
            compare(step, planned.as_deref(), old, owner, describe_policy, policy_changes)
        }
        Item::Access(name, planned) => {
            let existing = member.accesses.as_ref().and_then(|accesses| accesses.get(name));
            let old = existing.map(|access| access.spec.as_ref());
            let owner = existing.map(|access| &access.owner);
            compare(step, planned.as_deref(), old, owner, describe_access, |old, new| {
                describe_access(old)
                    .iter()
                    .zip(describe_access(new))
                    .filter(|(old, new)| *old != new)
                    .map(|(old, new)| format!("{old} -> {new}"))
                    .collect()
            })
        }
        Item::Service(name, planned) => {
            let existing = member.services.get(name);
            let before = existing.map(|service| Mirror {
                ports: service.ports.clone(),
                families: service.families,
            });
            let old = before.as_ref().map(Ok);
            let owner = existing.and_then(|service| service.managed.as_ref());
            let describe = |mirror: &Mirror| {
                let families = match mirror.families {
                    Families::BOTH => ", dual-stack",
                    Families { v6: true, .. } => ", IPv6",
                    Families { .. } => "",
                };
                vec![format!("ports {}{families}", list(mirror.ports.iter().map(port_text)))]
            };
            compare(step, planned.as_ref(), old, owner, describe, |old, new| {
                let ports = |mirror: &Mirror| list(mirror.ports.iter().map(port_text));
                let mut lines = value_change("ports", &ports(old), &ports(new));
                if !old.families.cover(new.families) {
                    lines.extend(value_change("ipFamilies", "single-stack", "dual-stack"));
                }
                lines
            })
        }
        Item::Slice(name, planned) => {
            let existing = member.slices.get(name);
            let before = existing.map(|slice| PlannedSlice {
                v6: slice.v6,
                ports: slice.ports.clone(),
                endpoints: slice.endpoints.clone(),
            });
            let old = before.as_ref().map(Ok);
            let owner = existing.and_then(|slice| slice.managed.as_ref());
            let planned = planned.as_deref().map(|(_, slice)| slice);
            compare(step, planned, old, owner, describe_slice, slice_changes)
        }
    }
}

/// Returns the lines of `describe` for a created or deleted object, and the lines of `changes` for an updated one. If the existing object
/// is invalid, its update has the reason and the lines of `describe`, and its deletion has no lines. Each update also has lines for
/// changed labels.
fn compare<T>(
    step: &Step,
    planned: Option<&T>,
    old: Option<Result<&T, &String>>,
    owner: Option<&Owner>,
    describe: impl Fn(&T) -> Vec<String>,
    changes: impl Fn(&T, &T) -> Vec<String>,
) -> Vec<String> {
    let mut lines = match (planned, old) {
        (Some(new), None) => describe(new),
        (None, Some(Ok(old))) => describe(old),
        (Some(new), Some(Ok(old))) => changes(old, new),
        (Some(new), Some(Err(why))) => {
            let mut lines = vec![format!("the existing object is invalid: {why}")];
            lines.extend(describe(new));
            lines
        }
        (None, _) => vec![],
    };
    if let (Action::Update, Some(owner)) = (step.action, owner) {
        let (old, new) = (convert::labels(owner), convert::labels(&step.owner));
        let differing = |labels: &BTreeMap<String, String>, other: &BTreeMap<String, String>| {
            let entries = labels.iter().filter(|(key, value)| other.get(*key) != Some(*value));
            entries
                .map(|(key, value)| format!("{key}={value}"))
                .collect::<BTreeSet<_>>()
        };
        lines.extend(set_changes("labels", &differing(&old, &new), &differing(&new, &old)));
    }
    lines
}

/// The endpoint and the allowed IPs of a Peer, as lines.
pub(crate) fn describe_peer(spec: &PeerSpec) -> Vec<String> {
    let keepalive = match spec.persistent_keepalive {
        0 => String::new(),
        seconds => format!(", keepalive {seconds} s"),
    };
    let first = match spec.endpoint {
        Some(Endpoint::Ip(address)) => Some(address),
        _ => None,
    };
    let others: Vec<_> = spec
        .candidates
        .iter()
        .filter(|candidate| Some(**candidate) != first)
        .collect();
    let others = match &*others {
        [] => String::new(),
        others => format!(", else {}", list(others)),
    };
    let mut lines = vec![format!(
        "endpoint {}{others}{keepalive}",
        endpoint(spec.endpoint.as_ref())
    )];
    lines.push(match spec.allowed_ips.is_empty() {
        true => "no allowedIPs".to_owned(),
        false => format!("allowedIPs {}", list(&spec.allowed_ips)),
    });
    lines
}

fn endpoint(endpoint: Option<&Endpoint>) -> String {
    match endpoint {
        None => "none (only the peer initiates)".to_owned(),
        Some(Endpoint::Ip(address)) => address.to_string(),
        Some(Endpoint::Dns(host, port)) => format!("{host}:{port}"),
    }
}

fn peer_changes(old: &PeerSpec, new: &PeerSpec) -> Vec<String> {
    let mut lines = value_change("key", &old.public_key.to_string(), &new.public_key.to_string());
    lines.extend(value_change(
        "endpoint",
        &endpoint(old.endpoint.as_ref()),
        &endpoint(new.endpoint.as_ref()),
    ));
    lines.extend(value_change(
        "candidates",
        &list(&old.candidates),
        &list(&new.candidates),
    ));
    let seconds = |spec: &PeerSpec| format!("{} s", spec.persistent_keepalive);
    lines.extend(value_change("keepalive", &seconds(old), &seconds(new)));
    lines.extend(set_changes("allowedIPs", &old.allowed_ips, &new.allowed_ips));
    lines
}

fn describe_access(spec: &AccessSpec) -> Vec<String> {
    let grants = spec.grants.iter().map(|((protocol, port), granted)| {
        format!(
            "{}/{port} -> Service {} {}",
            protocol.as_str(),
            granted.service,
            granted.port
        )
    });
    vec![
        format!("from {}", list(&spec.networks)),
        format!("nodes {}", list(spec.nodes.values().map(|node| &node.name))),
        format!("through gateways at {}", list(grants)),
    ]
}

fn describe_policy(spec: &PolicySpec) -> Vec<String> {
    let allows = match spec.allow.is_empty() {
        true => "allows only replies".to_owned(),
        false => format!("allows {}", list(&spec.allow)),
    };
    let mut lines = vec![format!("from {}", list(&spec.sources)), allows];
    lines.extend(
        spec.closed
            .then(|| "closed: drops all packets from and to this member".to_owned()),
    );
    lines
}

fn policy_changes(old: &PolicySpec, new: &PolicySpec) -> Vec<String> {
    let mut lines = set_changes("sources", &old.sources, &new.sources);
    lines.extend(set_changes("networks", &old.networks, &new.networks));
    lines.extend(set_changes("allow", &old.allow, &new.allow));
    // The controller writes `standard` into every closed PeerPolicy, also for a quarantined member.
    let profile = |spec: &PolicySpec| if spec.closed { "standard" } else { "cluster-meshed" };
    lines.extend(value_change("isolationProfile", profile(old), profile(new)));
    lines.extend(set_changes("deny", &old.deny, &new.deny));
    lines.extend(set_changes("anchored", &old.anchored, &new.anchored));
    let ports = |spec: &PolicySpec| {
        let ports = spec.infrastructure_ports.iter();
        ports
            .map(|(protocol, port)| format!("{port}/{}", protocol.as_str()))
            .collect::<BTreeSet<_>>()
    };
    lines.extend(set_changes("infrastructurePorts", &ports(old), &ports(new)));
    lines
}

fn describe_slice(slice: &PlannedSlice) -> Vec<String> {
    let addresses = list(slice.endpoints.iter().map(|endpoint| endpoint.address));
    vec![format!("{addresses} on {}", list(slice.ports.iter().map(port_text)))]
}

fn slice_changes(old: &PlannedSlice, new: &PlannedSlice) -> Vec<String> {
    let ports = |slice: &PlannedSlice| list(slice.ports.iter().map(port_text));
    let mut lines = value_change("ports", &ports(old), &ports(new));
    let endpoints = |slice: &PlannedSlice| {
        let endpoints = slice.endpoints.iter().map(|endpoint| {
            let state = match (endpoint.ready, endpoint.serving, endpoint.terminating) {
                (true, _, _) => "",
                (false, true, true) => " (draining)",
                _ => " (not ready)",
            };
            format!("{}{state}", endpoint.address)
        });
        endpoints.collect::<BTreeSet<_>>()
    };
    lines.extend(set_changes("endpoints", &endpoints(old), &endpoints(new)));
    lines
}

fn port_text(port: &clustermesh_core::observe::ServicePort) -> String {
    let name = match &*port.name {
        "" => String::new(),
        name => format!(" ({name})"),
    };
    format!("{}/{}{name}", port.port, port.protocol.as_str())
}

fn value_change(field: &str, old: &str, new: &str) -> Vec<String> {
    if old == new {
        return vec![];
    }
    let or_none = |text: &str| {
        if text.is_empty() {
            "none".to_owned()
        } else {
            text.to_owned()
        }
    };
    vec![format!("{field} {} -> {}", or_none(old), or_none(new))]
}

fn set_changes<T: Ord + Display>(field: &str, old: &BTreeSet<T>, new: &BTreeSet<T>) -> Vec<String> {
    let mut lines = Vec::new();
    for (sign, mut differing) in [
        ("-", old.difference(new).peekable()),
        ("+", new.difference(old).peekable()),
    ] {
        if differing.peek().is_some() {
            lines.push(format!("{field} {sign} {}", list(differing)));
        }
    }
    lines
}

/// Joins items with commas. Only the first [`MAX_ITEMS`] are printed.
fn list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let all: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    let mut text = all[..all.len().min(MAX_ITEMS)].join(", ");
    if all.len() > MAX_ITEMS {
        let _ = write!(text, " and {} more", all.len() - MAX_ITEMS);
    }
    text
}
