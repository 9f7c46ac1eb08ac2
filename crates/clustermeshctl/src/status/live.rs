//! `status --live`: reads every member, compares its objects with the plan, and replaces the problems that the controller reported
//! with the problems that it finds. So it shows the present state also while no controller runs.

use std::collections::BTreeMap;

use clustermesh_api::{annotations, convert};
use clustermesh_core::{
    diff::{Action, Item, Step},
    links,
    mesh::MeshId,
    observe::Observation,
    plan::{Fact, MeshPlan},
    status::{self, Cause},
};
use k8s_openapi::api::core::v1::Node;
use serde::Serialize;

use super::report::{Row, Share};
use crate::{
    args::{InputArgs, StatusArgs},
    plan::PlanResult,
    problem::Problem,
};

/// The reason for a member whose objects differ from the plan.
const OBJECTS_DIFFER: &str = "ObjectsDiffer";

/// The reasons that are computed here, from a plan of the objects that were just read. Other reasons need what only the
/// controller knows, such as the age of a held node or the addresses of a host name.
const COMPUTED: [&str; 8] = [
    "MemberMissing",
    "MemberUnreachable",
    "PeerCRDMissing",
    "NoNodes",
    "NoAnchor",
    "NoGateway",
    "NodesSkipped",
    "TunnelsDown",
];

/// The reasons that the controller reports for a member that it cannot read.
pub(super) const NOT_READ: [&str; 3] = ["MemberMissing", "MemberUnreachable", "MemberStale"];

/// Whether the controller refuses a ClusterMesh for this reason. Then it does not use the present spec, so a plan of that spec
/// tells nothing about the objects.
fn is_refusal(reason: &str) -> bool {
    reason == "SpecInvalid" || reason.ends_with("NotAllowed")
}

/// What was read from the members, for each mesh (NAMESPACE/NAME).
pub(super) type LiveMeshes = BTreeMap<String, LiveMesh>;

/// What was read from the members of one mesh.
#[derive(Debug, Default)]
pub(super) struct LiveMesh {
    pub(super) causes: Vec<Cause>,
    /// By entry.
    pub(super) members: BTreeMap<String, LiveMember>,
}

/// What was read from one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LiveMember {
    /// Whether this command could read the member.
    pub(super) answers: bool,
    /// How many of its Nodes are registered in other members.
    pub(super) nodes: Share,
    /// How many of the Peers that are planned in it exist as planned. Peers that describe a member that does not answer are not
    /// planned and not counted; the controller leaves them as they are.
    pub(super) peers: Share,
}

/// Reads every member of every mesh.
///
/// # Errors
/// The hub cannot be read, or `--member-context` names no member.
pub(super) async fn read(args: &StatusArgs) -> Result<LiveMeshes, Vec<Problem>> {
    let input = InputArgs {
        filename: Vec::new(),
        kubeconfig: args.hub.kubeconfig.clone(),
        context: args.hub.context.clone(),
        members: args.members.clone(),
        hub_namespaces: Vec::new(),
        member_namespaces: Vec::new(),
        hub_networks: Vec::new(),
        infrastructure_ports: Vec::new(),
        clusters: Vec::new(),
        hub_id: None,
    };
    // The report names the members that cannot be read, so the notes are left out.
    let result = PlanResult::read(&input, &mut std::io::empty(), &mut std::io::sink()).await?;
    let meshes = result.plan.meshes.iter();
    Ok(meshes
        .map(|(id, plan)| (id.to_string(), LiveMesh::new(&result, id, plan)))
        .collect())
}

impl LiveMesh {
    fn new(result: &PlanResult, id: &MeshId, plan: &MeshPlan) -> Self {
        let entries = plan.identities.keys();
        let reports = entries.filter_map(|entry| {
            let nodes = &result.cluster(plan, entry)?.objects.nodes;
            let prefix = annotations::member_key(&id.namespace, &id.name, "");
            let links = nodes.values().filter_map(|node| reported_links(node, &prefix));
            Some((entry.clone(), links.collect::<Vec<_>>()))
        });
        let broken = links::find_broken(plan, &reports.collect());
        let nothing = BTreeMap::new();
        let mut causes = status::causes(plan, &nothing, &nothing, &broken, &BTreeMap::new());
        causes.retain(|cause| COMPUTED.contains(&cause.reason));
        let mut members = BTreeMap::new();
        for (entry, identity) in &plan.identities {
            let steps = steps(result, id, plan, entry);
            causes.extend(objects_differ(entry, &steps));
            let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
            let cluster = result.cluster(plan, entry);
            let planned = plan.targets.get(entry).filter(|_| cluster.is_some());
            let planned = planned.map_or(0, |target| target.peers.len());
            let wrong = steps.iter().filter(|step| step.action != Action::Delete);
            let wrong = wrong.filter(|step| matches!(step.item, Item::Peer(..))).count();
            let member = LiveMember {
                answers: matches!(
                    result.inputs.observations.members.get(identity),
                    Some(Observation::Fresh(_))
                ),
                nodes: Share {
                    working: count(plan.clusters.get(entry).map_or(0, |report| report.registered)),
                    total: count(cluster.map_or(0, |cluster| cluster.objects.nodes.len())),
                },
                peers: Share {
                    working: count(planned.saturating_sub(wrong)),
                    total: count(planned),
                },
            };
            members.insert(entry.clone(), member);
        }
        Self { causes, members }
    }

    /// Replaces the rows of the status by the causes that were found. A cause that already has a row in the status keeps that
    /// row's `since`. `make_row` makes a row without `since`.
    pub(super) fn replace(&self, rows: &mut Vec<Row>, make_row: impl Fn(&Cause) -> Row) {
        if rows.iter().any(|row| is_refusal(&row.reason)) {
            return;
        }
        let is_same = |row: &Row, cause: &Cause| {
            let is_unread = |reason: &str| NOT_READ.contains(&reason);
            let has_same_reason = row.reason == cause.reason || is_unread(&row.reason) && is_unread(cause.reason);
            has_same_reason && row.cluster == cause.cluster && row.to == cause.to
        };
        let found: Vec<Row> = self
            .causes
            .iter()
            .map(|cause| Row {
                since: rows.iter().find(|row| is_same(row, cause)).and_then(|row| row.since),
                ..make_row(cause)
            })
            .collect();
        rows.retain_mut(|row| {
            if NOT_READ.contains(&&*row.reason) {
                if self.causes.iter().any(|cause| is_same(row, cause)) {
                    return false;
                }
                row.message = format!("it answers here, but the controller reported: {}", row.message);
                row.remedy = Some("do the hub's pods reach the address in its Secret?".to_owned());
                return true;
            }
            !COMPUTED.contains(&&*row.reason) && row.reason != "Converging"
        });
        rows.extend(found);
    }
}

/// The links that the agent of a node reports as broken, by entry name. A node that is not Ready, or is being deleted, is left out: its
/// agent may have stopped.
fn reported_links(node: &Node, prefix: &str) -> Option<BTreeMap<String, links::Tunnels>> {
    let core = convert::node::to_core(node);
    let agent = convert::node::agent(node).filter(|_| core.ready && !core.deleting)?;
    let links = agent.links.into_iter();
    let links = links.filter_map(|(member, link)| Some((member.strip_prefix(prefix)?.to_owned(), link.into())));
    Some(links.collect())
}

/// The steps that would change the objects of a mesh in a member to what is planned. Empty if the member was not read.
fn steps<'r>(result: &'r PlanResult, id: &MeshId, plan: &MeshPlan, entry: &str) -> Vec<&'r Step> {
    let mut steps = result.changes(id, plan, entry).unwrap_or_default();
    // Only the controller resolves host names of endpoints. Here, a Peer of a node with such an endpoint may appear to differ. So
    // if any host name is unresolved, no update of a Peer counts as a difference.
    let is_unresolved = |fact: &Fact| matches!(fact, Fact::EndpointUnresolved { .. });
    if plan.facts.iter().any(is_unresolved) {
        steps.retain(|step| step.action != Action::Update || !matches!(step.item, Item::Peer(..)));
    }
    steps
}

fn objects_differ(entry: &str, steps: &[&Step]) -> Option<Cause> {
    let first = steps.first()?;
    let state = match first.action {
        Action::Create => "is missing".to_owned(),
        Action::Update => format!("differs in {}", first.fields.join(", ")),
        Action::Delete => "should not exist".to_owned(),
    };
    let message = format!(
        "{} object(s) in it are not as planned, first {} {}, which {state}",
        steps.len(),
        first.item.kind(),
        first.item.name()
    );
    Some(Cause::of_member("Objects", OBJECTS_DIFFER, entry, message))
}
